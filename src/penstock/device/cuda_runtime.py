"""Calls to the CUDA or HIP runtime that page-lock memory and query graph capture.

torch exposes the runtime under CUDA's names in both builds (``torch.cuda.cudart()``), so the same
code registers memory on NVIDIA and AMD.

Tested by ``tests/integration/device/test_pinning.py``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU, not only the current one."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


class CudaRuntime:
    """Registers and unregisters memory on one device.

    Args:
        index: The GPU whose context is used. No other GPU is opened.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.error = ""
        """The message of the last failed call."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Page-lock mapped memory. Returns False and sets :attr:`error` if the runtime refuses."""
        is_done = self._call("HostRegister", address, num_bytes, PORTABLE)
        if not is_done:
            self._forget_error()
        return is_done

    def unregister(self, address: int) -> bool:
        """Undo :meth:`register` for the same address."""
        return self._call("HostUnregister", address)

    def is_capturing(self) -> bool:
        """Return True if a graph is being captured on this thread's current stream."""
        try:
            with torch.cuda.device(self.index):
                return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # the GPU is lost, so nothing is captured
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
        self.error = f"{shown} returned {_describe(status)}"
        return False

    def _forget_error(self) -> None:
        """Clear the thread's last error, which the user's next kernel would otherwise report."""
        try:
            torch.zeros(1, device=f"cuda:{self.index}")
        except RuntimeError:
            return  # the pending error was raised, and is now cleared


def allow_during_capture() -> None:
    """Allow this thread to call the driver while another thread captures a graph.

    The calls are not part of the graph. Without this, querying an event in this thread ends the
    capture.
    """
    try:
        mode = ctypes.c_int(_RELAXED)
        load_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return  # AMD's runtime, or no driver: nothing to relax


def load_driver() -> ctypes.CDLL:
    """Load NVIDIA's driver library.

    Raises:
        OSError: The library is not installed.
    """
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _describe(status: int) -> str:
    try:
        return f"{status} ({_cudart().cudaGetErrorString(_cudart().cudaError(status))})"
    except Exception:  # the text is optional
        return str(status)
