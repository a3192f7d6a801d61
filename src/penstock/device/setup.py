"""Creates the pinner, prefetcher and GPU watch of one iterator.

Runs in the training process. The loader makes one :class:`DeviceSetup` for each iterator. The three
are imported on first use, because most loaders on a CPU need none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock.errors import NoSuchDevice

if TYPE_CHECKING:
    from penstock.device.pinning import SlotPinner
    from penstock.device.prefetcher import DevicePrefetcher
    from penstock.trace.gpu_events import GpuWatch
    from penstock.trace.recorder import Recorder


class DeviceSetup:
    """The device of one iterator, and the objects that move its batches there.

    Args:
        device: The target device of batches. None leaves them in CPU memory.
        depth: The number of batches to copy ahead.
        finish: Applied to each batch on the device.
        pin_memory_device: The device that ``pin_memory=True`` pins for. None pins nothing.
        note: Called with notes for the loader's plan.
    """

    def __init__(
        self,
        device: torch.device | None,
        depth: int,
        finish: Callable[[Any], Any] | None,
        pin_memory_device: str | None,
        note: Callable[[str], Any],
    ) -> None:
        self.device = None if device is None else resolve(device)
        self._depth, self._finish = depth, finish
        self.pinner = self._make_pinner(pin_memory_device, note)
        """Pins the memory of batches. None if they are in pageable memory."""

    def _make_pinner(
        self, pin_memory_device: str | None, note: Callable[[str], Any]
    ) -> SlotPinner | None:
        if self.device is not None and self.device.type == "cuda":
            from penstock.device.pinning import SlotPinner

            # Copies keep their source alive, so no fence is needed.
            return SlotPinner(self.device.index, note, is_fenced=False)
        stays = self.device is None or self.device.type == "cpu"
        if stays and pin_memory_device is not None and torch.cuda.is_available():
            from penstock.device.pinning import SlotPinner

            asked = torch.device(pin_memory_device or "cuda")
            return SlotPinner(asked.index, note) if asked.type == "cuda" else None
        return None

    def make_prefetcher(self, watch: GpuWatch | None) -> DevicePrefetcher | None:
        """Return a prefetcher for the device, or None if batches stay in CPU memory."""
        if self.device is None:
            return None
        from penstock.device.prefetcher import DevicePrefetcher

        on_unmoved = (lambda: None) if self.pinner is None else self.pinner.require_fences
        return DevicePrefetcher(self.device, self._depth, self._finish, on_unmoved, watch)

    def make_watch(self, recorder: Recorder) -> GpuWatch | None:
        """Return a recorder of GPU copies and steps, or None without a GPU build or recording."""
        if recorder.buffer is None or not (torch.version.cuda or torch.version.hip):
            return None
        from penstock.trace.gpu_events import GpuWatch

        return GpuWatch(recorder.record_device, is_asked=recorder.keeps_all)


def resolve(device: torch.device) -> torch.device:
    """Check the device. A GPU without an index resolves to the current GPU, as in torch.

    Raises:
        NoSuchDevice: The device does not exist on this machine or in this build of torch.

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
            "device='mps': torch finds no Apple GPU on this machine",
            remedy="DataLoader(..., device='cpu')",
            device="mps",
        )
    if device.type not in ("cpu", "mps", "meta"):
        _try_out(device)
    return device


def _try_out(device: torch.device) -> None:
    """Check that a device of an unknown type accepts a tensor."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise NoSuchDevice(
            f"device='{device}' does not accept tensors on this machine",
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
        likely = "there is no driver or no GPU, or CUDA_VISIBLE_DEVICES hides it"
    else:
        numbers = ", ".join(f"cuda:{index}" for index in range(count))
        likely = f"torch sees only {numbers}"
    raise NoSuchDevice(
        f"device='{device}' does not exist on this machine",
        likely=likely,
        remedy="penstock doctor --gpu, or DataLoader(..., device='cpu')",
        device=str(device),
    )
