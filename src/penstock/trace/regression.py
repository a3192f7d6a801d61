"""Alarms: whether a run waits too much, or is slower than another run, beyond its own noise.

    model --> time of each steady batch --> blocks --> mean and noise of a run

Blocks of a run differ because the machine, the data and the training step vary. Their spread gives
the noise: half the width of the 95% confidence interval of the mean. A slow drift shows only in
long blocks, and fast changes are measured best with many. So the noise is the larger of those that
ten and five blocks give. Runs in which other programs used the cores are not judged.

Called by ``penstock run --max-wait``, ``penstock trace compare --fail-if`` and ``penstock bench``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.trace.accounting import make_account
from penstock.trace.diagnosis import OTHERS_HOLD_CORES, wait_for_others
from penstock.trace.model import TraceModel

_T_95 = {10: 2.262, 5: 2.776}
"""Student's t of a two-sided 95% interval, by number of blocks."""
MIN_BATCHES = 2 * max(_T_95)
"""With fewer batches after start-up, the noise cannot be measured."""
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
        is_busy: Other programs held the cores in one of the runs.
    """

    share: float
    noise: float
    is_busy: bool = False

    def is_above(self, limit: float) -> bool:
        """Return True if the whole confidence interval is above the limit, and no run was busy.

        Example:
            >>> Slowdown(share=0.08, noise=0.02).is_above(0.05)
            True
            >>> Slowdown(share=0.08, noise=0.04).is_above(0.05)
            False
        """
        return not self.is_busy and self.share - self.noise > limit


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


def is_busy(model: TraceModel) -> bool:
    """Return True if the workers waited for cores that other programs held."""
    return wait_for_others(make_account(model), model.facts) > OTHERS_HOLD_CORES


def measure_wait(model: TraceModel) -> BlockMean | None:
    """Return the share of the time in which the loop waits for batches, or None if too short."""
    return _measure(
        batch_times(model), lambda some: sum(b.waited_s for b in some) / sum(b.took_s for b in some)
    )


def measure_noise(model: TraceModel) -> float | None:
    """Return the noise of the rate, as a share of it, or None if the run is too short."""
    rate = _log_rate(model)
    return None if rate is None else math.expm1(rate.noise)


def measure_slowdown(before: TraceModel, after: TraceModel) -> Slowdown | None:
    """Compare the rates of two runs, or return None if one of them is too short."""
    first, second = _log_rate(before), _log_rate(after)
    if first is None or second is None:
        return None
    ratio = math.exp(second.value - first.value)
    return Slowdown(
        share=1.0 - ratio,
        noise=ratio * math.hypot(first.noise, second.noise),
        is_busy=is_busy(before) or is_busy(after),
    )


def _log_rate(model: TraceModel) -> BlockMean | None:
    return _measure(
        batch_times(model),
        lambda some: math.log(sum(b.rows for b in some) / sum(b.took_s for b in some)),
    )


def _measure(
    batches: list[BatchTime], read: Callable[[list[BatchTime]], float]
) -> BlockMean | None:
    """Return the mean and the noise of a value of blocks, or None if there are too few batches."""
    if len(batches) < MIN_BATCHES:
        return None
    noises = []
    for num_blocks, t_95 in _T_95.items():
        bounds = [len(batches) * block // num_blocks for block in range(num_blocks + 1)]
        values = [read(batches[start:end]) for start, end in itertools.pairwise(bounds)]
        noises.append(t_95 * statistics.stdev(values) / math.sqrt(num_blocks))
    return BlockMean(value=read(batches), noise=max(noises))
