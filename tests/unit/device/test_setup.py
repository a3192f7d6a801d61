"""Supported devices, and the messages for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import DataLoader, to_device
from penstock.device.setup import resolve
from penstock.errors import BadArgument, NoSuchDevice
from penstock.options import check_device, check_prefetch
from support import fake_gpu

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("device", ["warp", "cuda:x", "", object(), 1.5, ["cuda"]])
def test_what_is_no_device_is_said_when_the_loader_is_made(device: Any) -> None:
    with pytest.raises(NoSuchDevice, match=r"^\[G01\] device="):
        DataLoader(range(4), device=device)


def test_a_name_that_torch_does_not_know_gets_a_suggestion() -> None:
    with pytest.raises(NoSuchDevice, match=r"'gpu' is not a device of torch\. Did you mean 'cuda'"):
        DataLoader(range(4), device="gpu")


def test_a_number_that_is_not_there_is_told_with_those_that_are() -> None:
    with fake_gpu.pretended("cuda"):
        assert resolve(torch.device("cuda")) == torch.device("cuda", 0)
        assert resolve(torch.device("cuda:1")) == torch.device("cuda", 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.cuda, "is_built", lambda: True)
            with pytest.raises(NoSuchDevice, match="torch sees only cuda:0, cuda:1"):
                resolve(torch.device("cuda:2"))


def test_a_gpu_without_a_number_is_the_current_one_of_this_rank() -> None:
    with fake_gpu.pretended("hip") as gpu:
        gpu.current = 1
        assert resolve(torch.device("cuda")) == torch.device("cuda", 1)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac with a GPU")
def test_no_apple_gpu_is_said() -> None:
    with pytest.raises(NoSuchDevice, match="no Apple GPU"):
        resolve(torch.device("mps"))


def test_a_kind_that_we_know_nothing_about_is_tried_out() -> None:
    with pytest.raises(NoSuchDevice, match="device='xpu' does not accept tensors on this machine"):
        resolve(torch.device("xpu"))
    assert resolve(torch.device("meta")).type == "meta"


@pytest.mark.parametrize("depth", [0, -1, 1.0, True, "2", None, 1001])
def test_a_depth_is_a_small_number_above_0(depth: Any) -> None:
    with pytest.raises(BadArgument, match=r"device_prefetch=.* must be a number of batches"):
        DataLoader(range(4), device="cpu", device_prefetch=depth)
    with pytest.raises(BadArgument, match=r"\bprefetch=.* must be a number of batches"):
        to_device([], "cpu", prefetch=depth)
    assert check_prefetch("prefetch", 1000) == 1000


def test_finish_needs_a_device_and_to_be_a_function() -> None:
    with pytest.raises(BadArgument, match="no device= was given"):
        DataLoader(range(4), finish=print)
    with pytest.raises(BadArgument, match="finish=3 must be a function"):
        DataLoader(range(4), finish=3, device="cpu")


def test_arguments_are_attributes_so_that_others_can_rebuild_the_loader() -> None:
    loader = DataLoader(range(4), device="cpu", device_prefetch=3, finish=print)
    assert (loader.device, loader.device_prefetch, loader.finish) == (
        torch.device("cpu"),
        3,
        print,
    )
    assert DataLoader(range(4), device=loader.device).device == check_device("device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "index", "is_fenced"),
    [
        ({"device": "cuda"}, 0, False),
        ({"device": "cuda:1"}, 1, False),
        ({"device": "cuda:1", "pin_memory": True}, 1, False),
        ({"pin_memory": True}, None, True),
        ({"pin_memory": True, "device": "cpu"}, None, True),
        ({"device": "cpu"}, "nobody", None),
        ({}, "nobody", None),
    ],
)
def test_who_pins_and_for_which_gpu(
    arguments: dict[str, Any], index: Any, is_fenced: bool | None
) -> None:
    with fake_gpu.pretended("cuda") as gpu:
        pinner = DataLoader(range(4), **arguments)._parts().device_setup.pinner
        found = ("nobody", None) if pinner is None else (pinner._index, pinner._is_fenced)
        assert found == (index, is_fenced)
        assert gpu.calls == [], "no GPU is opened for that"
