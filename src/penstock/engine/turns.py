"""Whose turn is it? Chooses the worker for the next part, and knows how much each has to do."""

from __future__ import annotations


class Turns:
    """The load of each worker, in samples.

    Args:
        in_turn: Go round the workers strictly (randomness of the worker, iterable datasets);
            otherwise the one with the least to do is next.

    Example:
        >>> turns = Turns(2, in_turn=False)
        >>> [turns.give(rows) for rows in (5, 1, 1)]
        [0, 1, 1]
    """

    def __init__(self, num_workers: int, *, in_turn: bool) -> None:
        self._loads = [0] * num_workers
        self._in_turn = in_turn
        self.begin()

    def begin(self, first: int = 0) -> None:
        """A new epoch: everyone takes part again, beginning with worker ``first``."""
        self._is_active = [True] * len(self._loads)
        self._last = first - 1

    def give(self, rows: int, limit: int | None = None) -> int:
        """The worker for a part of ``rows``; one with ``limit`` samples or more is passed over."""
        worker = self._choose(limit)
        self._loads[worker] += rows
        return worker

    def take_back(self, worker: int, rows: int) -> None:
        """A worker has answered for ``rows`` samples."""
        self._loads[worker] -= rows

    def retire(self, worker: int) -> None:
        """A worker has no more to give in this epoch."""
        self._is_active[worker] = False

    @property
    def has_active(self) -> bool:
        return any(self._is_active)

    def _choose(self, limit: int | None) -> int:
        num_workers = len(self._loads)
        if not self._in_turn:
            return min(range(num_workers), key=self._loads.__getitem__)
        for _ in range(num_workers):
            self._last = (self._last + 1) % num_workers
            if self._is_active[self._last] and (limit is None or self._loads[self._last] < limit):
                return self._last
        return self._is_active.index(True)
