"""Explains device errors: out of memory, GPU lost, or a graph capture in progress."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.device.nested import tensors_in
from penstock.errors import DeviceFailed, PenstockError

_GIB = 1 << 30
_DEVICE_WORDS = re.compile(
    r"(CUDA|HIP|cuDNN|MIOpen|MPS|XPU)( driver)? error|MPS backend|out of memory|captur|"
    r"re-initialize CUDA|no kernel image|device-side assert",
    re.IGNORECASE,
)
"""Matches torch's device errors. torch raises them as a plain RuntimeError, like other errors."""


@contextmanager
def explained_errors(device: torch.device, batch: Any) -> Iterator[None]:
    """Convert device errors to a :class:`DeviceFailed` that is also an instance of their class.

    Other errors, such as those of the user's ``finish`` function, are not changed.
    """
    try:
        yield
    except PenstockError:
        raise
    except RuntimeError as error:
        is_full = isinstance(error, torch.cuda.OutOfMemoryError)
        if not is_full and _DEVICE_WORDS.search(str(error)) is None:
            raise
        raise _describe(device, batch, error) from error


def _describe(device: torch.device, batch: Any, error: RuntimeError) -> DeviceFailed:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
    first_line = str(error).strip().split("\n")[0]
    what = f"copying a batch of {num_bytes / (1 << 20):.4g} MiB to {device} failed: {first_line}"
    if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in first_line:
        likely = _memory_of(device)
        remedy = "a smaller batch_size, or DataLoader(..., device_prefetch=1)"
    elif "captur" in first_line:
        likely = "a batch was requested while a CUDA graph is being captured"
        remedy = "next(batches) before the capture; inside it, only copy into static tensors"
    else:
        likely = "an earlier kernel failed, or the GPU was lost. GPU errors are reported late"
        remedy = "CUDA_LAUNCH_BLOCKING=1 to find the failing call; dmesg | grep -i xid"
    cls = _also(type(error))
    return cls(what, likely=likely, remedy=remedy, device=str(device), batch_bytes=num_bytes)


def _also(kind: type[RuntimeError]) -> type[DeviceFailed]:
    """Return a DeviceFailed class that is also a ``kind``.

    For example, ``except torch.cuda.OutOfMemoryError`` catches it too.
    """
    if issubclass(DeviceFailed, kind):
        return DeviceFailed
    try:
        members = {"__module__": DeviceFailed.__module__, "__reduce__": _reduce}
        return type("DeviceFailed", (DeviceFailed, kind), members)
    except TypeError:  # the two classes cannot be combined
        return DeviceFailed


def _reduce(error: DeviceFailed) -> tuple[object, ...]:
    """Pickle as the plain DeviceFailed, because the derived class cannot be found by name."""
    plain = DeviceFailed(error.what)
    plain.args = error.args
    plain.__dict__.update(error.__dict__)
    return plain.__reduce__()


def _memory_of(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device)
    except (RuntimeError, ValueError):  # not CUDA, for example MPS
        return "the device memory is full"
    return (
        f"{free / _GIB:.2f} of {total / _GIB:.1f} GiB free on {device}; "
        f"torch holds {ours / _GIB:.2f} GiB in this process"
    )
