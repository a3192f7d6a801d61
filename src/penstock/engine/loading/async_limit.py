"""The number of async samples in flight: the given number, or one found by trying.

``in_flight="auto"`` starts with FIRST samples at a time and doubles their number as long as that
makes them arrive clearly faster, see :mod:`penstock.engine.loading.hill_climb`. The limit of open
files ends that. The limit of memory is in the training process, which leases no more samples than
their batches may take, see :class:`penstock.planning.prefetch_depth.PrefetchDepth`.
"""

from __future__ import annotations

import os
import sys

from penstock.engine.loading.hill_climb import HillClimb
from penstock.machine.host import max_fds

FIRST, MOST = 8, 1024
"""Where ``"auto"`` starts, and where it ends at the latest."""
FASTER = 1.15
"""A larger number must raise the rate by this factor. Waiting that is not limited by the server or
the cores doubles it."""
WINDOW = 4
"""The rate is measured over this many times the samples in flight."""
FULL_SHARE = 0.5
"""If others waited for the place of fewer samples, the rate is that of the training loop."""


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
        self.is_auto = isinstance(asked, str)
        self._climb = HillClimb(FIRST if isinstance(asked, str) else asked, faster=FASTER)
        self.reason: str | None = None
        self._restart()

    @property
    def value(self) -> int:
        """The current number."""
        return self._climb.value

    def _restart(self) -> None:
        self._num_done = -self.value  # those that started under the number before
        self._num_full, self._start_s = 0, 0.0

    def fit(self, num_rows: int) -> None:
        """Let ``"auto"`` start with one call of ``__getitems__`` if that has more samples."""
        if self.is_auto and num_rows > self.value:
            self._climb = HillClimb(num_rows, faster=FASTER)
            self._restart()

    def note_done(self, now_s: float, num_rows: int = 1, *, is_full: bool) -> None:
        """Record that a sample is loaded, or the ``num_rows`` samples of a batch.

        Args:
            is_full: Others wait for its place.
        """
        if not self.is_auto:
            return
        self._num_done += num_rows
        if self._num_done <= 0:
            self._start_s = now_s
            return
        self._num_full += num_rows if is_full else 0
        if self._num_done >= WINDOW * self.value:
            if self._num_full >= FULL_SHARE * self._num_done:
                self._judge(self._num_done / max(now_s - self._start_s, 1e-9), now_s)
            self._restart()

    def _judge(self, rate: float, now_s: float) -> None:
        before, why = self.value, _why_not_double(self.value)
        self._climb.judge(rate, now_s, 0 if why is not None else 2 * before)
        if self.value < before:
            why = "more at a time were not faster"
        if why is not None:
            self.reason = f"{self.value} async samples in flight in a worker: {why}"


def _why_not_double(value: int) -> str | None:
    """Return why twice as many samples in flight are not tried. None: they are."""
    if 2 * value > MOST:
        return "the most that 'auto' uses"
    limit = max_fds()
    if limit is None:
        return None
    try:
        num_open = len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))
    except OSError:  # no /proc in this container
        num_open = 4 * value
    if 4 * num_open > limit:  # twice as many would be more than half of those allowed
        return f"{num_open} files are open, of {limit} (ulimit -n)"
    return None
