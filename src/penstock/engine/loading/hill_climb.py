"""Finds by trying how many samples at a time arrive fastest.

Used for the number of workers (:mod:`penstock.engine.parent.worker_tuning`) and for async samples
in flight (:mod:`penstock.engine.loading.async_limit`). The number never changes what a sample is.
"""

from __future__ import annotations

FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0
"""A larger number that was not faster is tried again after this time, and after twice as long each
time that it fails: a measurement can be wrong, and a server or a network can recover."""


class HillClimb:
    """Raises a number as long as that makes samples arrive clearly faster.

    Args:
        value: The first number.
        faster: A larger number must raise the rate by this factor.

    Attributes:
        value: The current number.

    Example:
        >>> climb = HillClimb(8, faster=1.1)
        >>> climb.judge(100.0, now_s=1.0, larger=16)
        >>> climb.value
        16
        >>> climb.judge(100.0, now_s=2.0, larger=32)  # not faster
        >>> climb.value
        8
    """

    def __init__(self, value: int, *, faster: float) -> None:
        self.value = value
        self._faster = faster
        self._before: tuple[int, float] | None = None
        """The number before the last raise and its rate, until that raise is judged."""
        self._retry_at_s, self._pause_s = 0.0, FIRST_PAUSE_S

    def judge(self, rate: float, now_s: float, larger: int) -> None:
        """Record the rate at the current number, and choose the next number.

        Args:
            larger: The number to try next, if it is larger and the time has come.
        """
        if self._before is not None and rate < self._faster * self._before[1]:
            self.revert(now_s)
            return
        if self._before is not None:
            self._before, self._pause_s = None, FIRST_PAUSE_S
        if larger > self.value and now_s >= self._retry_at_s:
            self._before, self.value = (self.value, rate), larger

    def revert(self, now_s: float) -> None:
        """Take the last raise back: it did not help, or was not possible."""
        if self._before is not None:
            self.value, self._before = self._before[0], None
        self._retry_at_s = now_s + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
