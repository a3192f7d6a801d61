"""Page-locks the slots of batches once, so that the GPU copies directly from them.

A batch in a registered slot is already pinned, without a pinning thread or a second copy. If
registration fails (limits, some drivers, some systems), batches are copied to torch's own pinned
buffers instead, and the loader's plan says so.

Memory is unregistered before it is unmapped, never after. Otherwise the driver would keep the
registration, and the next mapping at that address could not be pinned. So the process, not the
loader, keeps pinned memory alive until it is unpinned. The loader may be gone by then.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from penstock.device.cuda_runtime import CudaRuntime
from penstock.device.fences import Fence, IsDone, choose_fence
from penstock.device.on_demand_thread import OnDemandThread

_GIVE_UP_S = 60.0
"""If a GPU does not finish within this time, its memory stays pinned. Reusing it could corrupt
data."""


class _Pinned(NamedTuple):
    """Pinned memory, with the objects that must stay alive until it is unpinned."""

    pinner: SlotPinner
    owner: object
    memory: np.ndarray


_pinned: dict[int, _Pinned] = {}
"""All pinned memory of this process, by address."""


class SlotPinner:
    """Pins the slots of one loader for one GPU.

    Implements :class:`penstock.engine.memory.pinned_ring.Pinner`.

    Args:
        index: The GPU. None chooses one when the first batch arrives.
        note: Called with a note if slots cannot be pinned.
        is_fenced: False if the caller keeps every batch until its copy is complete.
    """

    def __init__(
        self, index: int | None, note: Callable[[str], None], *, is_fenced: bool = True
    ) -> None:
        self._index = index
        self._note = note
        self._is_fenced = is_fenced
        self._gpu: _Gpu | None = None
        self._is_refused = False
        self._process = os.getpid()

    @property
    def num_pinned(self) -> int:
        """The number of pieces of memory that this pinner has pinned."""
        return sum(piece.pinner is self for piece in list(_pinned.values()))

    @property
    def gpu(self) -> _Gpu:
        """The GPU to pin for, chosen on first access. No other GPU is opened."""
        if self._gpu is None:
            index = choose_index() if self._index is None else self._index
            self._gpu = _gpus.setdefault(index, _Gpu(index))
        return self._gpu

    def require_fences(self) -> None:
        """Use fences from now on, because a batch has parts that the user may copy to the GPU."""
        self._is_fenced = True

    def may_pin(self) -> bool:
        is_ours = os.getpid() == self._process
        return not self._is_refused and is_ours and not self.gpu.runtime.is_capturing()

    def pin(self, memory: np.ndarray, owner: object) -> bool:
        self.gpu.unpin_leftovers()
        address, runtime = memory.ctypes.data, self.gpu.runtime
        if not runtime.register(address, memory.nbytes):
            self._is_refused = True
            self._note(
                f"slots cannot be pinned ({runtime.error}): each batch is first copied to one of "
                "torch's pinned buffers"
            )
            return False
        _pinned[address] = _Pinned(self, owner, memory)
        return True

    def unpin(self, memory: np.ndarray) -> None:
        piece = _pinned.pop(memory.ctypes.data, None)
        if piece is not None:
            self.gpu.runtime.unregister(memory.ctypes.data)

    def unpin_later(self, pieces: list[np.ndarray]) -> None:
        if os.getpid() == self._process and not sys.is_finalizing():
            self.gpu.to_unpin.extend((self, memory) for memory in pieces)
            self.gpu.unpin_leftovers()

    def may_ask(self) -> bool:
        if os.getpid() != self._process:
            return False  # a forked process must not use the GPU
        return not self._is_fenced or not self.gpu.runtime.is_capturing()

    def fence(self) -> IsDone:
        if not self._is_fenced:
            return lambda: True
        self.gpu.unpin_leftovers()
        return self.gpu.record()


class _Gpu:
    """The state of one GPU, shared by all loaders of this process."""

    def __init__(self, index: int) -> None:
        self.runtime = CudaRuntime(index)
        self._fence: Fence | None = None
        self.to_unpin: deque[tuple[SlotPinner, np.ndarray]] = deque()
        """Memory to unpin as soon as the GPU can be queried."""

    def record(self) -> IsDone:
        if self._fence is None:
            self._fence = choose_fence(self.runtime)
        return self._fence.record()

    def unpin_leftovers(self) -> None:
        """Schedule pending unpins, unless a graph is being captured. Queries end the capture."""
        if not self.to_unpin or self.runtime.is_capturing():
            return
        pieces: list[tuple[SlotPinner, np.ndarray]] = []
        try:
            while True:
                pieces.append(self.to_unpin.popleft())
        except IndexError:
            pass
        if pieces:
            unpin_thread.submit(_PendingUnpin(pieces, self.record()))


_gpus: dict[int, _Gpu] = {}


def choose_index() -> int:
    """Return the GPU to pin for: the current one, unless only another one is open.

    A process that uses ``cuda:1`` without calling ``torch.cuda.set_device`` should not get a
    context on GPU 0 because its loader pins memory.
    """
    current = torch.cuda.current_device()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or has_context(current):
        return current
    others = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    return others[0] if others else current


class _PendingUnpin(NamedTuple):
    """Memory without views, and a function that tells when the GPU is done with it."""

    pieces: list[tuple[SlotPinner, np.ndarray]]
    is_done: IsDone


def _unpin_all(pending: list[_PendingUnpin]) -> None:
    """Unpin each piece once the GPU is done with it. Runs in a thread."""
    while pending:
        entry = pending.pop(0)
        if _wait(entry.is_done):
            while entry.pieces:
                pinner, memory = entry.pieces.pop()
                pinner.unpin(memory)
                del pinner, memory
        del entry  # otherwise the memory would stay mapped until the next entry


def _wait(is_done: IsDone) -> bool:
    until_s, nap_s = time.monotonic() + _GIVE_UP_S, 1e-4
    while not is_done():
        if time.monotonic() > until_s:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 0.01)
    return True


unpin_thread: OnDemandThread[_PendingUnpin] = OnDemandThread(_unpin_all)
