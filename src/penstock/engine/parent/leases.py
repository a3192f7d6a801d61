"""Chooses the worker for the next part of a batch, and keeps what each one has not answered."""

from __future__ import annotations

from penstock.engine.memory.messages import Lease


class LeaseQueue:
    """The leases that each worker has not answered yet, in the order in which it works on them.

    Args:
        in_turn: Go round the workers strictly (randomness of the worker, iterable datasets);
            otherwise the one with the least to do is next.
    """

    def __init__(self, num_workers: int, *, in_turn: bool) -> None:
        self._loads = [0] * num_workers
        self._owed: list[dict[tuple[int, int, int], Lease]] = [{} for _ in range(num_workers)]
        self._in_turn = in_turn
        self.begin()

    def begin(self, first: int = 0) -> None:
        """A new epoch: everyone takes part again, beginning with worker ``first``."""
        self._is_active = [True] * len(self._loads)
        self._last = first - 1

    def give(self, lease: Lease, limit: int | None = None) -> int:
        """The worker for a lease; one with ``limit`` samples or more is passed over."""
        worker = self._choose(limit)
        self._owed[worker][lease.key] = lease
        self._loads[worker] += lease.num_samples
        return worker

    def take_back(self, worker: int, key: tuple[int, int, int]) -> None:
        """A worker has answered a lease."""
        self._loads[worker] -= self._owed[worker].pop(key).num_samples

    def owed(self, worker: int) -> list[Lease]:
        """What a worker has not answered; it works on the first."""
        return list(self._owed[worker].values())

    def amend(self, worker: int, lease: Lease) -> None:
        """Put ``lease`` in the place of the one with the same key."""
        self._owed[worker][lease.key] = lease

    @property
    def has_owed(self) -> bool:
        return any(self._owed)

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
