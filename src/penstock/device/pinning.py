"""Page-locks the memory of batches once, so that the GPU copies straight out of it.

A batch in a registered slot is pinned as it is: no pinning thread, no second copy. Where
registering is refused (limits, some drivers, some systems) batches are copied to torch's own pinned
buffers instead; the loader's plan says so.

Memory is unregistered before it is unmapped, never after: a registration of memory that is gone
stays with the driver, and the next mapping at that address could not be pinned. So the process
keeps what is pinned until it is unpinned, and not the loader, which may be gone by then.
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
"""A GPU that does not get done in this time keeps its memory pinned: better than wrong bytes."""


class _Pinned(NamedTuple):
    """Memory that is pinned, with what must not go before it is unpinned."""

    pinner: SlotPinner
    owner: object
    memory: np.ndarray


_pinned: dict[int, _Pinned] = {}
"""All of this process, by address."""


class SlotPinner:
    """Pins slots for one GPU. One for each loader; see
    :class:`penstock.engine.memory.pinned_ring.Pinner`.

    Args:
        index: The GPU; None: chosen when the first batch is there.
        note: Takes a note when slots cannot be pinned.
        is_fenced: False where the caller keeps every batch until its copy is complete.
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
        """Pieces of memory that are pinned now."""
        return sum(piece.pinner is self for piece in list(_pinned.values()))

    @property
    def gpu(self) -> _Gpu:
        """The one that was chosen, and nothing of any other."""
        if self._gpu is None:
            index = choose_index() if self._index is None else self._index
            self._gpu = _gpus.setdefault(index, _Gpu(index))
        return self._gpu

    def require_fences(self) -> None:
        """From now on wait for everything: a batch has parts that the user may copy himself."""
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
                f"slots cannot be pinned ({runtime.error}): each batch is copied to a "
                "pinned buffer of torch's first"
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
            return False  # a fork: nothing of the GPU is ours
        return not self._is_fenced or not self.gpu.runtime.is_capturing()

    def fence(self) -> IsDone:
        if not self._is_fenced:
            return lambda: True
        self.gpu.unpin_leftovers()
        return self.gpu.record()


class _Gpu:
    """What all loaders of this process share of one GPU."""

    def __init__(self, index: int) -> None:
        self.runtime = CudaRuntime(index)
        self._fence: Fence | None = None
        self.to_unpin: deque[tuple[SlotPinner, np.ndarray]] = deque()
        """To be unpinned as soon as the GPU may be asked."""

    def record(self) -> IsDone:
        if self._fence is None:
            self._fence = choose_fence(self.runtime)
        return self._fence.record()

    def unpin_leftovers(self) -> None:
        """Have unpinned what is left, unless a graph is captured: asking would end that."""
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
    """The GPU to pin for: the current one, unless only another one was opened.

    A process that works on ``cuda:1`` without saying so to ``torch.cuda.set_device`` should not
    get a context on GPU 0 because its loader pins memory.
    """
    current = torch.cuda.current_device()
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or has_context(current):
        return current
    others = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    return others[0] if others else current


class _PendingUnpin(NamedTuple):
    """Memory that has no views any more, and when the GPU is done with it."""

    pieces: list[tuple[SlotPinner, np.ndarray]]
    is_done: IsDone


def _unpin_all(pending: list[_PendingUnpin]) -> None:
    """Unpin each piece once the GPU is done with it. Called from: a thread."""
    while pending:
        entry = pending.pop(0)
        if _wait(entry.is_done):
            while entry.pieces:
                pinner, memory = entry.pieces.pop()
                pinner.unpin(memory)
                del pinner, memory
        del entry  # or the memory would stay mapped until the next one


def _wait(is_done: IsDone) -> bool:
    until_s, nap_s = time.monotonic() + _GIVE_UP_S, 1e-4
    while not is_done():
        if time.monotonic() > until_s:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 0.01)
    return True


unpin_thread: OnDemandThread[_PendingUnpin] = OnDemandThread(_unpin_all)
