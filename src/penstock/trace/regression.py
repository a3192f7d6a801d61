"""Alarms: whether a run waits too much, or is slower than another run, beyond its own noise.

    model --> time of each steady batch --> NUM_BLOCKS blocks --> mean and noise of a run

Blocks of a run differ because the machine, the data and the training step vary. Their spread gives
the noise: half the width of the 95% confidence interval of the mean. Called by ``penstock run
--max-wait``, ``penstock trace compare --fail-if`` and ``penstock bench``.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from penstock.trace.model import TraceModel

NUM_BLOCKS = 10
MIN_BATCHES = 2 * NUM_BLOCKS
"""With fewer batches after start-up, the noise cannot be measured."""
_T_95 = 2.262
"""Student's t of a two-sided 95% interval, for ``NUM_BLOCKS - 1`` degrees of freedom."""
_WAITING = ("stall", "fetch")
_STEADY = (*_WAITING, "step", "deliver", "transfer")


class BatchTime(NamedTuple):
    """Times of one batch in the training loop: its share of the run, and the wait within it."""

    took_s: float
    waited_s: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class BlockMean:
    """A mean over the blocks of a run, and its noise in the same unit."""

    value: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """How much slower a second run is. Negative if it is faster.

    Args:
        share: The part of the first run's rate that is missing, such as 0.05.
        noise: Half the width of the 95% confidence interval of ``share``.
    """

    share: float
    noise: float

    def is_above(self, limit: float) -> bool:
        """Return True if the slowdown is above the limit, and not within the noise.

        Example:
            >>> Slowdown(share=0.08, noise=0.02).is_above(0.05)
            True
            >>> Slowdown(share=0.08, noise=0.10).is_above(0.05)
            False
        """
        return self.share > limit and self.share > self.noise


def batch_times(model: TraceModel) -> list[BatchTime]:
    """Return the times of each batch, without the first batch of each epoch."""
    firsts: dict[int, int] = {}
    for batch in model.batches():
        firsts[batch.pass_] = min(batch.batch, firsts.get(batch.pass_, batch.batch))
    found: dict[tuple[int, int], BatchTime] = {}
    for span in (span for lane in model.of("main") for span in lane.top()):
        is_first = firsts.get(span.pass_, span.batch) == span.batch
        if span.kind not in _STEADY or is_first:
            continue
        took_s, waited_s, rows = found.get((span.pass_, span.batch), BatchTime(0.0, 0.0, 0))
        span_s = span.took_ns * 1e-9
        found[span.pass_, span.batch] = BatchTime(
            took_s + span_s,
            waited_s + (span_s if span.kind in _WAITING else 0.0),
            rows + (span.rows if span.kind == "deliver" else 0),
        )
    return [times for times in found.values() if times.took_s > 0 and times.rows]


def measure_wait(model: TraceModel) -> BlockMean | None:
    """Return the share of the time in which the loop waits for batches, or None if too short."""
    blocks = _blocks(batch_times(model))
    shares = [sum(b.waited_s for b in block) / sum(b.took_s for b in block) for block in blocks]
    return _measure(shares) if shares else None


def measure_noise(model: TraceModel) -> float | None:
    """Return the noise of the rate, as a share of it, or None if the run is too short."""
    logs = _log_rates(model)
    return math.expm1(_measure(logs).noise) if logs else None


def measure_slowdown(before: TraceModel, after: TraceModel) -> Slowdown | None:
    """Compare the rates of two runs, or return None if one of them is too short."""
    logs = []
    for model in (before, after):
        rates = _log_rates(model)
        if not rates:
            return None
        logs.append(_measure(rates))
    ratio = math.exp(logs[1].value - logs[0].value)
    return Slowdown(share=1.0 - ratio, noise=ratio * math.hypot(logs[0].noise, logs[1].noise))


def _log_rates(model: TraceModel) -> list[float]:
    """Return the logarithm of the rate of each block."""
    blocks = _blocks(batch_times(model))
    return [math.log(sum(b.rows for b in some) / sum(b.took_s for b in some)) for some in blocks]


def _blocks(batches: list[BatchTime]) -> list[list[BatchTime]]:
    """Split into blocks of equal size, or return none if there are too few batches."""
    if len(batches) < MIN_BATCHES:
        return []
    bounds = [len(batches) * block // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    return [batches[bounds[n] : bounds[n + 1]] for n in range(NUM_BLOCKS)]


def _measure(values: list[float]) -> BlockMean:
    noise = _T_95 * statistics.stdev(values) / math.sqrt(len(values))
    return BlockMean(value=statistics.fmean(values), noise=noise)
