"""The number of async samples in flight: the given number, or one found by trying.

``in_flight="auto"`` starts with FIRST samples at a time and doubles their number as long as that
makes them arrive clearly faster, see :mod:`penstock.engine.loading.hill_climb`.
"""

from __future__ import annotations

from penstock.engine.loading.fetch import MOST_IN_FLIGHT as MOST
from penstock.engine.loading.hill_climb import HillClimb

FIRST = 8
"""Where ``"auto"`` starts. It ends at MOST_IN_FLIGHT."""
FASTER = 1.15
"""A larger number must raise the rate by this factor. Waiting that is not limited by the server or
the cores doubles it."""
WINDOW = 4
"""The rate is measured over this many times the samples in flight."""


class AsyncLimit:
    """Decides how many samples are in flight.

    Args:
        asked: A number, or ``"auto"``.

    Attributes:
        reason: Why ``"auto"`` stays at its number. None before.

    Example:
        >>> limit = AsyncLimit("auto")
        >>> for done in range(400):  # as fast as there are samples in flight
        ...     limit.note_done(1 / limit.value * done, is_full=True)
        >>> limit.value > FIRST, AsyncLimit(5).value
        (True, 5)
    """

    def __init__(self, asked: int | str) -> None:
        self._is_auto = isinstance(asked, str)
        self._climb = HillClimb(FIRST if isinstance(asked, str) else asked, faster=FASTER)
        self.reason: str | None = None
        self._restart()

    @property
    def value(self) -> int:
        """The current number."""
        return self._climb.value

    def _restart(self) -> None:
        self._num_done = -self.value  # those that started under the number before
        self._start_s = 0.0

    def note_done(self, now_s: float, *, is_full: bool) -> None:
        """Record that a sample is loaded.

        Args:
            is_full: Others wait for its place. If not, the rate is that of the training loop.
        """
        if not self._is_auto:
            return
        if not is_full:
            self._restart()
            return
        self._num_done += 1
        if self._num_done <= 0:
            self._start_s = now_s
        elif self._num_done >= WINDOW * self.value:
            self._judge(self._num_done / max(now_s - self._start_s, 1e-9), now_s)
            self._restart()

    def _judge(self, rate: float, now_s: float) -> None:
        before = self.value
        self._climb.judge(rate, now_s, min(MOST, 2 * before))
        why = None
        if self.value < before:
            why = "more at a time were not faster"
        elif self.value == before == MOST:
            why = "the most that 'auto' uses"
        if why is not None:
            self.reason = f"{self.value} async samples in flight in a worker: {why}"
