"""Rows of a table into a buffer: by NumPy in this thread, or by torch's threads?

Threads nearly halve the time on an idle machine. Where others hold the cores they wait for each
other and take many times as long. So both are timed, again and again, as the engine does it for
tensors in memory.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

TRY_OTHER_EVERY = 64
"""Gathers after which both ways are timed once more; while threads are far behind, less often."""
_MAX_WAIT = 4096
_MIN_BYTES = 1 << 20
"""Less than this is copied before another thread has woken up."""


class _Memory:
    """What NumPy asks for memory that it shall see as an array."""

    def __init__(self, address: int, shape: tuple[int, int], arrays: list[np.ndarray]) -> None:
        # The mappings must live as long as the array. Nothing else: the garbage collector does not
        # look through arrays, so a way back from here to a column would keep both for ever.
        self.arrays = arrays
        self.__array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),  # torch warns of read-only memory; nobody writes here
            "version": 3,
        }


class Table:
    """Rows of equal size that lie at fixed distances in memory.

    Args:
        address: Of the first.
        shape: How many there are, and how many bytes each has.
        arrays: What must live as long.
    """

    def __init__(self, address: int, shape: tuple[int, int], arrays: list[np.ndarray]) -> None:
        self.rows = np.asarray(_Memory(address, shape, arrays))
        self._is_wide = shape[1] % 8 == 0 and address % 8 == 0
        self._tensor: Any = None
        self._times_s = [0.0, 0.0]
        self._num_gathers = 0
        self._next_trial = TRY_OTHER_EVERY

    def gather(self, chosen: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, one after the other."""
        if out.nbytes < _MIN_BYTES or not self._has_threads():
            np.take(self.rows, chosen, axis=0, out=out, mode="clip")
            return
        use_torch = self._times_s[1] < self._times_s[0]
        if self._num_gathers < 2:  # both, one after the other
            use_torch = self._num_gathers == 1
        self._num_gathers += 1
        if self._num_gathers >= self._next_trial:
            self._num_gathers = 0
            is_far = self._times_s[1] > 2 * self._times_s[0]
            self._next_trial = min(2 * self._next_trial, _MAX_WAIT) if is_far else TRY_OTHER_EVERY
        start_s = time.perf_counter()
        if use_torch:
            self._gather_by_torch(chosen, out)
        else:
            np.take(self.rows, chosen, axis=0, out=out, mode="clip")
        self._times_s[use_torch] = time.perf_counter() - start_s

    def _has_threads(self) -> bool:
        torch = sys.modules.get("torch")
        return self._is_wide and torch is not None and torch.get_num_threads() > 1

    def _gather_by_torch(self, chosen: np.ndarray, out: np.ndarray) -> None:
        import torch

        if self._tensor is None:
            self._tensor = torch.from_numpy(self.rows.view(np.int64))
        target = torch.from_numpy(out.view(np.int64))
        torch.index_select(self._tensor, 0, torch.from_numpy(chosen), out=target)
