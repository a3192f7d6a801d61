"""Converts times of a node's clock to the clock of this process."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.trace.record import Record, TraceBuffer
from penstock.trace.record import now_ns as read_clock

DRIFT = 50e-6
"""Two clocks are assumed to differ by at most this fraction of the time since they were compared.
Quartz clocks are specified to 20 to 50 parts in a million."""


class NodeClock:
    """The offset of a node's clock, from questions and answers. The fastest answers count.

    Example:
        >>> clock = NodeClock()
        >>> clock.note(1000, 5_000_500, answered_ns=2000)
        >>> clock.offset_ns, clock.error_ns
        (-4999000, 500)
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self.error_ns = 2**62
        self._noted_ns = 0

    def now_ns(self) -> int:
        """Return the time of this process."""
        return read_clock()

    def note(self, asked_ns: int, node_ns: int, *, answered_ns: int | None = None) -> None:
        """Record that the node's clock showed ``node_ns`` between two times of this process."""
        answered_ns = self.now_ns() if answered_ns is None else answered_ns
        error_ns = (answered_ns - asked_ns) // 2
        if error_ns <= self.error_ns + DRIFT * (answered_ns - self._noted_ns):
            self.offset_ns = (asked_ns + answered_ns) // 2 - node_ns
            self.error_ns, self._noted_ns = error_ns, answered_ns

    def copy(self, records: Iterable[Record], memory: memoryview) -> None:
        """Copy records of the node's timeline to a buffer of this process."""
        buffer, offset_ns = TraceBuffer(memory), self.offset_ns
        for one in records:
            buffer.add(
                one.kind,
                one.start_ns + offset_ns,
                one.end_ns + offset_ns,
                one.pass_,
                one.batch,
                one.part,
                one.rows,
                one.a,
                one.b,
                one.extra,
                buffer.name(one.name) if one.name else 0,
                one.thread,
            )
