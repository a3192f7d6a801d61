"""Calls of CUDA's or HIP's runtime that page-lock memory and ask about captures.

torch carries the runtime's calls under CUDA's names in both builds (``torch.cuda.cudart()``), so
registering is the same code on NVIDIA and AMD. Tests: test_pinning.py and test_fences.py.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every GPU, not only the one that was current."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


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
        load_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return  # AMD's runtime, or none: nothing to relax


def load_driver() -> ctypes.CDLL:
    """NVIDIA's driver.

    Raises:
        OSError: There is none.
    """
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _describe(status: int) -> str:
    try:
        return f"{status} ({_cudart().cudaGetErrorString(_cudart().cudaError(status))})"
    except Exception:  # the words are a courtesy
        return str(status)
