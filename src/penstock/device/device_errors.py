"""Explains errors of a device: out of memory, lost, or busy with the capture of a graph."""

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
"""How torch's errors about a device read, among all those that are a plain RuntimeError."""


@contextmanager
def explained_errors(device: torch.device, batch: Any) -> Iterator[None]:
    """Errors of the device inside become a :class:`DeviceFailed`, which is also of their class.

    Others, such as those of a ``finish`` function of the user's, stay what they are.
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
    what = f"a batch of {num_bytes / (1 << 20):.4g} MiB did not get to {device}: {first_line}"
    if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in first_line:
        likely = _memory_of(device)
        remedy = "a smaller batch_size, or DataLoader(..., device_prefetch=1)"
    elif "captur" in first_line:
        likely = "a CUDA graph is being captured, and a batch was asked for meanwhile"
        remedy = "next(batches) before the capture; inside it, only copy into static tensors"
    else:
        likely = "an earlier kernel failed, or the GPU was lost: errors show up late"
        remedy = "CUDA_LAUNCH_BLOCKING=1 to see which call it was; dmesg | grep -i xid"
    cls = _also(type(error))
    return cls(what, likely=likely, remedy=remedy, device=str(device), batch_bytes=num_bytes)


def _also(kind: type[RuntimeError]) -> type[DeviceFailed]:
    """DeviceFailed that an ``except torch.cuda.OutOfMemoryError`` catches, too."""
    if issubclass(DeviceFailed, kind):
        return DeviceFailed
    try:
        members = {"__module__": DeviceFailed.__module__, "__reduce__": _reduce}
        return type("DeviceFailed", (DeviceFailed, kind), members)
    except TypeError:  # classes that cannot be bases together
        return DeviceFailed


def _reduce(error: DeviceFailed) -> tuple[object, ...]:
    """In another process it is the plain class: this one cannot be found by its name."""
    plain = DeviceFailed(error.what)
    plain.args = error.args
    plain.__dict__.update(error.__dict__)
    return plain.__reduce__()


def _memory_of(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device)
    except (RuntimeError, ValueError):  # Apple's, say
        return "its memory is full"
    return (
        f"{free / _GIB:.2f} of {total / _GIB:.1f} GiB are free on {device}; "
        f"torch holds {ours / _GIB:.2f} GiB in this process"
    )
