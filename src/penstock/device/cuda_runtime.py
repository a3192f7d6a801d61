"""Calls of CUDA's or HIP's runtime that page-lock memory and track copies.

torch carries the runtime's calls under CUDA's names in both builds (``torch.cuda.cudart()``), so
registering is the same code on NVIDIA and AMD. Events that cover a whole context are a call of
NVIDIA's driver alone (12.5 and newer). Tests: test_pinning.py and test_fences.py.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU, not only the one that was current."""
_DISABLE_TIMING = 2
_NOT_READY = 600
_CAPTURING = range(900, 910)
"""The driver's answers about captures of graphs."""
_RELAXED = 2


class CudaRuntime:
    """Registering and unregistering, on one device.

    Args:
        index: The GPU whose context does the work: no other one is opened.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.error = ""
        """What the last call that failed said."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Page-lock a piece of mapped memory; False, and :attr:`error`, where that is refused."""
        is_done = self._call("HostRegister", address, num_bytes, PORTABLE)
        if not is_done:
            self._forget_error()
        return is_done

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register`. Pairs with it, at the same address."""
        return self._call("HostUnregister", address)

    def synchronize(self) -> None:
        """Wait for everything that was asked of the GPU so far."""
        torch.cuda.synchronize(self.index)

    def is_capturing(self) -> bool:
        """Is a graph being captured on this thread's current stream?"""
        try:
            with torch.cuda.device(self.index):
                return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # a GPU that is lost captures nothing
            return False

    def _call(self, name: str, *arguments: int) -> bool:
        shown = f"{'hip' if torch.version.hip else 'cuda'}{name}"
        try:
            with torch.cuda.device(self.index):
                status = int(getattr(_cudart(), f"cuda{name}")(*arguments))
        except RuntimeError as error:
            self.error = f"{shown}: {str(error).strip().partition(chr(10))[0]}"
            return False
        if status == 0:
            return True
        self.error = f"{shown} answered {_describe(status)}"
        return False

    def _forget_error(self) -> None:
        """The runtime keeps a thread's last error; the user's next kernel there would be blamed."""
        try:
            torch.zeros(1, device=f"cuda:{self.index}")
        except RuntimeError:
            return  # that was it; now it is forgotten


def allow_during_capture() -> None:
    """Let this thread's calls pass while another thread captures a graph: they are no part of it.

    Without this a question about an event, asked here, ends the capture there.
    """
    try:
        mode = ctypes.c_int(_RELAXED)
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return  # AMD's runtime, or none: nothing to relax


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class ContextEvents:
    """Events after all work of a GPU's context, on whatever stream it was asked for.

    Raises:
        OSError, AttributeError: There is no such driver here, or it is older than 12.5.
    """

    def __init__(self, index: int) -> None:
        self._driver = _driver()
        self._record = self._driver.cuCtxRecordEvent
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._check(self._driver.cuDeviceGet(ctypes.byref(device), index))
        self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))

    def _check(self, status: int) -> None:
        if status != 0:
            raise OSError(f"the CUDA driver answered {status}")

    def make(self) -> ctypes.c_void_p:
        """A new event of this context."""
        event, popped = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuCtxPushCurrent_v2(self._context))
        try:
            self._check(self._driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING))
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
        return event

    def record(self, event: ctypes.c_void_p) -> bool:
        """Let the event stand after everything that was asked of any stream so far.

        False: a graph is being captured in the context, and it is to be tried again later.
        """
        status = int(self._record(self._context, event))
        if status in _CAPTURING:
            return False
        self._check(status)
        return True

    def is_done(self, event: ctypes.c_void_p) -> bool:
        """Is everything before the event done? True also once the GPU is lost."""
        return int(self._driver.cuEventQuery(event)) != _NOT_READY


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _describe(status: int) -> str:
    try:
        return f"{status} ({_cudart().cudaGetErrorString(_cudart().cudaError(status))})"
    except Exception:  # the words are a courtesy
        return str(status)
