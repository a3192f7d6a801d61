"""``loader.stats()``: current rates and waits, from the recent records of the training process.

Tested by ``tests/integration/trace/test_worker_recorder.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.trace.record import Kind
from penstock.trace.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Rates and waits over the last few thousand batches of the current epoch.

    Args:
        stall_share: Share of the time in which the training loop waited for a batch.
        step_share: Share of the time in which the training loop used its batches.
        num_ready: Batches that were loaded but not yet requested, when last counted.
    """

    num_batches: int = 0
    batches_per_s: float = 0.0
    samples_per_s: float = 0.0
    stall_share: float = 0.0
    step_share: float = 0.0
    num_ready: int = 0
    is_off: bool = False
    """True if tracing is off, so there are no statistics."""
    sources: dict[str, int] | None = None
    """Samples of each source of a mixture so far in this epoch, over all ranks."""

    def __str__(self) -> str:
        if self.is_off:
            return "no statistics: tracing is off (trace=False or PENSTOCK_TRACE=0)"
        return (
            f"{self.num_batches} batches, {self.samples_per_s:,.0f} samples/s; "
            f"waiting {self.stall_share:.0%}, step {self.step_share:.0%}, {self.num_ready} ready"
        )


def make_stats(recorder: Recorder | None) -> Stats:
    """Compute the statistics of a recorder. None means that nothing was loaded yet."""
    count = None if recorder is None else recorder.count_sources
    return replace(_count_batches(recorder), sources=None if count is None else count())


def _count_batches(recorder: Recorder | None) -> Stats:
    if recorder is None:
        return Stats()
    if recorder.buffer is None:
        return Stats(is_off=True)
    spans = recorder.recent()
    batches = [span for span in spans if span.kind == Kind.BATCH]
    batches = [span for span in batches if span.pass_ == batches[-1].pass_]
    if not batches:
        return Stats()
    first_ns = batches[0].b or batches[0].start_ns
    total_ns = max(1, batches[-1].end_ns - first_ns)
    inline = {(span.pass_, span.batch): span for span in spans if span.kind == Kind.LEASE}
    stall_ns = 0
    for span in batches:
        load = inline.get((span.pass_, span.batch))
        stall_ns += span.a if load is None else load.end_ns - load.start_ns
    return Stats(
        num_batches=len(batches),
        batches_per_s=len(batches) * 1e9 / total_ns,
        samples_per_s=sum(span.rows for span in batches) * 1e9 / total_ns,
        stall_share=min(1.0, stall_ns / total_ns),
        step_share=sum(span.start_ns - span.b for span in batches if span.b) / total_ns,
        num_ready=batches[-1].part,
    )
