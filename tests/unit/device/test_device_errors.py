"""Device errors describe the copy and the likely cause."""

from __future__ import annotations

import pickle

import pytest
import torch

from penstock.device.device_errors import explained_errors
from penstock.errors import BadArgument, DeviceFailed

pytestmark = pytest.mark.legacy

CPU = torch.device("cpu")


def fail(error: Exception, batch: object = None) -> None:
    with explained_errors(CPU, batch):
        raise error


def test_out_of_memory_is_still_of_torchs_class() -> None:
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        fail(error, [torch.zeros(1 << 18)])
    assert isinstance(caught.value, DeviceFailed)
    assert "copying a batch of 1 MiB to cpu failed: CUDA out of memory" in str(caught.value)
    assert "device_prefetch=1" in str(caught.value)
    assert caught.value.batch_bytes == 1 << 20
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (type(sent), str(sent)) == (DeviceFailed, str(caught.value))
    assert sent.batch_bytes == 1 << 20


def test_a_lost_gpu_is_named_with_the_error_behind_it() -> None:
    error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(
        DeviceFailed, match="an earlier kernel failed, or the GPU was lost"
    ) as caught:
        fail(error)
    assert caught.value.__cause__ is error


def test_a_capture_is_named() -> None:
    with pytest.raises(DeviceFailed, match="a CUDA graph is being captured"):
        fail(RuntimeError("CUDA error: operation not permitted when stream is capturing"))


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), BadArgument("no such field")])
def test_a_mistake_in_user_code_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value is error
