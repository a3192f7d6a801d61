"""A fake GPU that replaces torch's runtime calls and NVIDIA's driver, and records every call.

The library's own code runs unchanged. Only calls into a vendor's library are replaced.
:meth:`PretendGpu.begin_copy` and :meth:`PretendGpu.finish_all` simulate copies.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.device import cuda_runtime as runtime
from penstock.device import fences, pinning
from penstock.device.on_demand_thread import OnDemandThread

NOT_READY, CAPTURE_UNSUPPORTED = 600, 900


class PretendGpu:
    """Calls to the vendor's libraries, in order, each with its current device.

    Args:
        vendor: ``"cuda"`` has events of the whole context. ``"hip"`` (AMD) has none.
    """

    def __init__(self, vendor: str, num_gpus: int = 2) -> None:
        self.vendor, self.num_gpus = vendor, num_gpus
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.unmapped: list[int] = []
        """Addresses that were unregistered after their memory was unmapped. Must stay empty."""
        self.current = 0
        self.is_capturing = False
        self.is_elsewhere_capturing = False
        self.refusal = 0
        self.lost = False
        self.num_asked = self.num_done = 0
        self.events: dict[int, int] = {}
        self._here = threading.local()

    # -- called by tests -------------------------------------------------------------------------

    def begin_copy(self) -> None:
        """Start a copy for the user. It runs until :meth:`finish_all`."""
        self.num_asked += 1

    def finish_all(self) -> None:
        self.num_done = self.num_asked

    def names(self) -> list[str]:
        """Return the names of the calls, without capture queries."""
        return [call[0] for call in self.calls if call[0] != "is capturing"]

    def devices_of(self, name: str) -> set[int]:
        return {call[1] for call in self.calls if call[0] == name}

    def wait_until_unpinned(self, limit_s: float = 5.0) -> bool:
        """Wait until no memory is registered. Returns False after the time limit."""
        until_s = time.monotonic() + limit_s
        while self.registered and time.monotonic() < until_s:
            time.sleep(0.002)
        return not self.registered and not pinning._pinned

    # -- fakes of torch and the driver -----------------------------------------------------------

    def note(self, name: str, *more: Any) -> None:
        self.calls.append((name, getattr(self._here, "index", self.current), *more))

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = getattr(self._here, "index", self.current)
        self._here.index = index
        try:
            yield
        finally:
            self._here.index = before

    def asks_capturing(self) -> bool:
        self.note("is capturing")
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.is_capturing

    def synchronize(self, index: int) -> None:
        with self.device(index):
            self.note("synchronise")
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        target = self.num_asked
        until_s = time.monotonic() + 20
        while self.num_done < target and time.monotonic() < until_s:
            time.sleep(0.001)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.note("register", address, num_bytes, flags)
        if self.refusal or address in self.registered:
            return self.refusal or 712
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.note("unregister", address)
        if address not in self.registered:
            return 713
        if not is_mapped(address, self.registered.pop(address)):
            self.unmapped.append(address)
        return 0

    def cudaError(self, status: int) -> int:
        return status

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory" if status == 2 else f"error {status}"


class Driver:
    """Fakes of the ``libcuda`` calls that Penstock uses."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self._gpu.note("retain", device.value)
        context._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        self._gpu.note("make event")
        if self._gpu.lost:
            return 719
        event._obj.value = 1000 + sum(call[0] == "make event" for call in self._gpu.calls)
        return 0

    def cuCtxRecordEvent(self, context: Any, event: Any) -> int:
        self._gpu.note("record event", context.value - 100)
        if self._gpu.lost:
            return 719
        if self._gpu.is_elsewhere_capturing:
            return CAPTURE_UNSUPPORTED
        self._gpu.events[event.value] = self._gpu.num_asked
        return 0

    def cuEventQuery(self, event: Any) -> int:
        if self._gpu.lost:
            return 719
        is_over = self._gpu.num_done >= self._gpu.events.get(event.value, 0)
        return 0 if is_over else NOT_READY

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self._gpu.note("relax")
        return 0


def is_mapped(address: int, num_bytes: int) -> bool:
    """Return True if all of this memory is still mapped in this process."""
    if not os.path.exists("/proc/self/maps"):
        return True
    with open("/proc/self/maps") as lines:
        for line in lines:
            first, _, last = line.split()[0].partition("-")
            if int(first, 16) <= address and address + num_bytes <= int(last, 16):
                return True
    return False


@contextmanager
def pretended(vendor: str, num_gpus: int = 2) -> Iterator[PretendGpu]:
    """Install the fake GPU until the threads that use it have ended."""
    used: set[OnDemandThread[Any]] = set()
    submit = OnDemandThread.submit

    def noting_submit(thread: OnDemandThread[Any], item: Any) -> None:
        used.add(thread)
        submit(thread, item)

    with pytest.MonkeyPatch.context() as patch:
        gpu = install(patch, vendor, num_gpus)
        patch.setattr(OnDemandThread, "submit", noting_submit)
        yield gpu
        gpu.finish_all()
        until_s = time.monotonic() + 5
        while any(each.is_running for each in used) and time.monotonic() < until_s:
            time.sleep(0.002)


def install(patch: pytest.MonkeyPatch, vendor: str, num_gpus: int = 2) -> PretendGpu:
    """Replace the real GPU, which does not need to exist, with the fake one."""
    gpu = PretendGpu(vendor, num_gpus)

    def driver() -> Any:
        if vendor == "hip":
            raise OSError("libcuda.so.1: cannot open shared object file")
        return Driver(gpu)

    patch.setattr(torch.version, "hip", "6.2" if vendor == "hip" else None)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    patch.setattr(torch.cuda, "current_device", lambda: gpu.current)
    patch.setattr(torch.cuda, "device", gpu.device)
    patch.setattr(torch.cuda, "cudart", lambda: gpu)
    patch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    patch.setattr(torch.cuda, "is_current_stream_capturing", gpu.asks_capturing)
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False)
    patch.setattr(runtime, "load_driver", driver)
    patch.setattr(fences, "load_driver", driver)
    patch.setattr(runtime.CudaRuntime, "_forget_error", lambda self: gpu.note("forget error"))
    patch.setattr(pinning, "_gpus", {})
    patch.setattr(pinning, "_pinned", {})
    if hasattr(torch, "accelerator"):
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(
            torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
        )
    return gpu
