"""Memory of batches, page-locked once, so that the GPU copies straight out of it.

A batch that lies in a registered slot is pinned as it is: no pinning thread, no second copy. Where
registering is refused (limits, some drivers, some systems) batches are copied to torch's own pinned
buffers instead, which it uses again and again; the loader's plan says so.

Memory is unregistered before it is unmapped, never after: a registration of memory that is gone
stays with the driver, and the next mapping at that address could not be pinned.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from penstock.device.fences import Fence, IsOver, choose_fence
from penstock.device.runtime import Runtime, allow_during_capture

_GIVE_UP_S = 60.0
"""A GPU that does not get done in this time keeps its memory pinned: better than wrong bytes."""


class SlotPinner:
    """Pins slots for one GPU. One for each loader; see :class:`penstock.engine.pinned.Pinner`.

    Args:
        index: The GPU; None: chosen when the first batch is there.
        tell: Takes a note when slots cannot be pinned.
        is_fenced: False where the caller keeps every batch until its copy is complete.
    """

    def __init__(
        self, index: int | None, tell: Callable[[str], None], *, is_fenced: bool = True
    ) -> None:
        self._index = index
        self._tell = tell
        self._is_fenced = is_fenced
        self._runtime: Runtime | None = None
        self._fence: Fence | None = None
        self._owners: dict[int, object] = {}
        self._left: list[np.ndarray] = []
        """To be unpinned as soon as the GPU may be asked."""
        self._is_refused = False
        self._process = os.getpid()

    @property
    def num_pinned(self) -> int:
        """Pieces of memory that are pinned now."""
        return len(self._owners)

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            index = choose_index() if self._index is None else self._index
            self._runtime = Runtime(index)
        return self._runtime

    def pin(self, memory: np.ndarray, owner: object) -> bool:
        if self._is_refused or self.runtime.is_capturing():
            return False
        address = memory.ctypes.data
        if not self.runtime.register(address, memory.nbytes):
            self._is_refused = True
            self._tell(
                f"slots cannot be pinned ({self.runtime.trouble}): each batch is copied to a "
                "pinned buffer of torch's first"
            )
            return False
        self._owners[address] = (owner, memory)
        return True

    def unpin(self, memory: np.ndarray) -> None:
        address = memory.ctypes.data
        if address in self._owners:
            with suppress(RuntimeError):  # of a GPU that is lost: the system frees it when we end
                self.runtime.unregister(address)
            del self._owners[address]

    def unpin_later(self, memory: np.ndarray) -> None:
        if os.getpid() != self._process:
            return
        self._left.append(memory)
        with suppress(RuntimeError, OSError):  # the GPU is lost, or this process is ending
            if not self.runtime.is_capturing():  # else with the next one: asking ends a capture
                is_over = self._everything()
                pieces, self._left = self._left, []
                _reaper.take(_Piece(self, pieces, is_over))

    def may_ask(self) -> bool:
        return not self._is_fenced or not self.runtime.is_capturing()

    def fence(self) -> IsOver:
        return self._everything() if self._is_fenced else _always

    def _everything(self) -> IsOver:
        if self._fence is None:
            self._fence = choose_fence(self.runtime)
        return self._fence.record()


def _always() -> bool:
    return True


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


class _Piece(NamedTuple):
    pinner: SlotPinner
    memory: list[np.ndarray]
    is_over: IsOver


class _Reaper:
    """Unpins memory that nobody views any more, once the GPU is done with it, in a thread.

    ``take`` may run inside garbage collection: it puts something into a queue, and starts a bare
    thread where none is running. The thread ends when there is nothing left.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._left: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._is_running = False
        self._lock = threading.RLock()

    def take(self, piece: _Piece) -> None:
        self._left.put(piece)
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        try:  # not threading.Thread, whose start takes locks and waits
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter is going: the system frees everything
            self._is_running = False

    def _run(self) -> None:
        allow_during_capture()
        while True:
            with self._lock:
                if self._left.empty():
                    self._is_running = False
                    return
            piece = self._left.get()
            if _is_soon_over(piece.is_over):
                for memory in piece.memory:
                    piece.pinner.unpin(memory)
            del piece  # or the memory would stay mapped until the next one


def _is_soon_over(is_over: IsOver) -> bool:
    until_s, nap_s = time.monotonic() + _GIVE_UP_S, 1e-4
    while not is_over():
        if time.monotonic() > until_s:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, 0.01)
    return True


_reaper = _Reaper()
