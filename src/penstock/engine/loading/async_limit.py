"""The number of async samples in flight: the given number, or one found by trying.

``in_flight="auto"`` starts with FIRST samples at a time and doubles their number as long as that
makes them arrive clearly faster. Otherwise it goes back, and tries again later: a server or a
network can recover. The number never changes what a sample is.
"""

from __future__ import annotations

from penstock.engine.loading.fetch import MOST_IN_FLIGHT as MOST

FIRST = 8
"""Where ``"auto"`` starts. It ends at MOST_IN_FLIGHT."""
FASTER = 1.15
"""A larger number must raise the rate by this factor. Waiting that is not limited by the server or
the cores doubles it."""
WINDOW = 4
"""The rate is measured over this many times the samples in flight."""
RETRY_S = 20.0


class AsyncLimit:
    """Decides how many samples are in flight.

    Args:
        asked: A number, or ``"auto"``.

    Attributes:
        value: The current number.
        reason: Why ``"auto"`` has settled. None before.

    Example:
        >>> limit = AsyncLimit("auto")
        >>> for done in range(400):  # as fast as there are samples in flight
        ...     limit.note_done(1 / limit.value * done, is_full=True)
        >>> limit.value > FIRST, AsyncLimit(5).value
        (True, 5)
    """

    def __init__(self, asked: int | str) -> None:
        self._is_auto = isinstance(asked, str)
        self.value = FIRST if isinstance(asked, str) else asked
        self.reason: str | None = None
        self._rate_before = 0.0
        self._settled_s: float | None = None
        self._restart()

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
        if self._settled_s is not None:
            if now_s - self._settled_s < RETRY_S or self.value == MOST:
                return
            self._settled_s, self._rate_before = None, rate
            self.value *= 2
        elif rate < FASTER * self._rate_before:
            self._settle(self.value // 2, "more at a time were not faster", now_s)
        elif self.value == MOST:
            self._settle(MOST, "the most that 'auto' uses", now_s)
        else:
            self._rate_before = rate
            self.value *= 2

    def _settle(self, value: int, reason: str, now_s: float) -> None:
        self.value, self._settled_s = max(FIRST, value), now_s
        self.reason = f"{self.value} async samples in flight in a worker: {reason}"
