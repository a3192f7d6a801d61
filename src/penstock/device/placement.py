"""What a loader was told about devices: the part of it about that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from penstock.device.pinning import SlotPinner
from penstock.device.prefetcher import DevicePrefetcher
from penstock.errors import BadArgument, NoSuchDevice
from penstock.trace.gpu_events import GpuWatch


class Placed:
    """The device keywords of a DataLoader, checked."""

    device: torch.device | None = None
    device_prefetch = 2
    finish: Callable[[Any], Any] | None = None
    pin_memory: bool
    pin_memory_device: str
    _notes: dict[str, None]

    def _settle_device(self, device: Any, device_prefetch: int, finish: Any) -> None:
        self.device = None if device is None else checked_device(device)
        self.device_prefetch = checked_depth(device_prefetch)
        if checked_finish(finish) is not None and device is None:
            raise BadArgument(
                "finish= works where the batch is brought to, and no device= was given",
                remedy="DataLoader(..., device='cuda', finish=...), or device='cpu'",
            )
        self.finish = finish

    def _device_setup(self) -> dict[str, Any]:
        """For the engine's Setup: who pins slots, who brings batches on, who watches the GPU."""
        watch = {"make_watch": GpuWatch if _may_have_gpu() else None}
        if self.device is None:
            return {"pinner": self._pinner(None), **watch}
        device = resolve(self.device)
        depth, finish, pinner = self.device_prefetch, self.finish, self._pinner(device)
        keep = (lambda: None) if pinner is None else pinner.insist
        return {
            "pinner": pinner,
            "make_prefetcher": lambda watch: DevicePrefetcher(device, depth, finish, keep, watch),
            **watch,
        }

    def _pinner(self, device: torch.device | None) -> SlotPinner | None:
        if device is not None and device.type == "cuda":  # the courier keeps what it copies
            return SlotPinner(device.index, self._note, is_fenced=False)
        stays = device is None or device.type == "cpu"
        if stays and self.pin_memory and torch.cuda.is_available():
            asked = torch.device(self.pin_memory_device or "cuda")
            return SlotPinner(asked.index, self._note) if asked.type == "cuda" else None
        return None

    @property
    def _note(self) -> Callable[[str], None]:
        notes = self._notes
        return lambda text: notes.setdefault(text)


def _may_have_gpu() -> bool:
    """Without opening one: was torch built for any?"""
    return bool(torch.version.cuda or torch.version.hip)


def checked_depth(depth: Any, name: str = "device_prefetch") -> int:
    """A number of batches to be ahead.

    Example:
        >>> checked_depth(2)
        2
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 1000:
        raise BadArgument(
            f"{name}={depth!r} is no number of batches from 1 to 1000",
            remedy=f"{name}=2",
        )
    return depth


def checked_finish(finish: Any) -> Callable[[Any], Any] | None:
    if finish is not None and not callable(finish):
        raise BadArgument(
            f"finish={finish!r} is no function of a batch",
            remedy="finish=penstock.finish(mean=..., std=...)",
        )
    return cast("Callable[[Any], Any] | None", finish)


def checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise NoSuchDevice(
            f"device={device!r}: {first_line}",
            remedy="DataLoader(..., device='cuda')",
            device=str(device),
        ) from None


def resolve(device: torch.device) -> torch.device:
    """The device as it is now: a GPU without a number is the current one, as in torch.

    Raises:
        NoSuchDevice: This machine, or this build of torch, has none like it.

    Example:
        >>> resolve(torch.device("cpu"))
        device(type='cpu')
    """
    if device.type == "cuda":
        _check_cuda(device)
        index = cast("int | None", device.index)
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise NoSuchDevice(
            "device='mps': torch finds no Apple GPU here",
            remedy="DataLoader(..., device='cpu')",
            device="mps",
        )
    if device.type not in ("cpu", "mps", "meta"):
        _try_out(device)
    return device


def _try_out(device: torch.device) -> None:
    """Of a kind that we know nothing about: does it take a tensor?"""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise NoSuchDevice(
            f"device='{device}' takes no tensors here",
            likely=str(error).strip().partition("\n")[0],
            remedy="DataLoader(..., device='cpu')",
            device=str(device),
        ) from None


def _check_cuda(device: torch.device) -> None:
    count, index = torch.cuda.device_count(), cast("int | None", device.index)
    if count and (index is None or index < count):
        return
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        likely = "this torch was built without GPU support"
    elif not count:
        likely = "no driver or no card, or CUDA_VISIBLE_DEVICES hides it"
    else:
        numbers = ", ".join(f"cuda:{index}" for index in range(count))
        likely = f"torch sees {numbers} and no other"
    raise NoSuchDevice(
        f"device='{device}' does not exist here",
        likely=likely,
        remedy="penstock doctor --gpu, or DataLoader(..., device='cpu')",
        device=str(device),
    )
