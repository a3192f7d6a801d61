"""Measures for ``penstock bench``: each stage of loading, each number of workers, and the ceiling.

The ceiling is the rate with samples that are already in memory, with the recommended number of
workers. Nothing is printed here.

Tested by ``tests/integration/cli/test_bench.py``.
"""

from __future__ import annotations

import functools
import itertools
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cli.bench_dataset import BenchDataset
from penstock.cli.user_code import describe_error, place_of
from penstock.engine.loading.sample_path import find_path
from penstock.errors import BadTarget
from penstock.machine.host import usable_cores
from penstock.machine.other_load import cores_for, measure_load, say_load
from penstock.order.event_loop import sample_getter
from penstock.planning.sample_timing import spread_indices, time_samples

if TYPE_CHECKING:
    from penstock.trace.timeline import Timeline

NEAR_BEST = 0.95
"""Rates above this fraction of the best count as equal. The fewest workers are then recommended."""
NOISY, MAX_NOISE = 0.1, 0.5
MOSTLY_WAITING = 0.15
"""Samples that compute for less of their time wait for something else than a core."""
MAX_SAMPLES = 100_000
NUM_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """The time of one stage of loading, measured separately in this process."""

    name: str
    sample_ms: float
    note: str = ""


@dataclass(kw_only=True)
class WorkersRate:
    """The loading rate with one number of workers.

    Args:
        predicted: The rate that the simulator predicted before the run, or None.
        noise: Noise of the rate, as a share of it: half the width of its 95% confidence interval.
            None if the run was too short.
    """

    workers: int
    rate: float
    stall_share: float
    verdict: str
    predicted: float | None = None
    noise: float | None = None


@dataclass(kw_only=True)
class BenchResult:
    """All measurements of a dataset. Rates are in samples per second."""

    name: str
    batch_size: int
    stages: list[StageTime] = field(default_factory=list)
    ceiling: float = 0.0
    runs: list[WorkersRate] = field(default_factory=list)
    timeline: Timeline | None = None
    """Timeline of the recommended run."""
    busy_share: float = 1.0
    """Share of the time of ``dataset[i]`` that is computing. The rest is waiting."""
    load: str = ""
    """A sentence about other programs, if they kept the machine busy before the first run."""

    @property
    def recommended(self) -> WorkersRate:
        """The run with the fewest workers whose rate is the best one, or within the noise of it.

        On a busy machine, more workers than cores take cores from other programs. They are not
        recommended if samples compute.
        """
        runs = self.runs
        if self.load and self.busy_share > MOSTLY_WAITING:
            runs = [run for run in runs if run.workers <= usable_cores()] or runs
        most = max(run.rate for run in runs)
        near = min(NEAR_BEST, 1 - self.noise)
        return next(run for run in runs if run.rate >= near * most)

    @property
    def noise(self) -> float:
        """The median noise of the runs, or 0 if unknown."""
        known = sorted(run.noise for run in self.runs if run.noise is not None)
        return min(MAX_NOISE, known[len(known) // 2]) if known else 0.0

    @property
    def warning(self) -> str:
        """What makes the rates uncertain, or an empty text."""
        is_noisy = self.noise > NOISY
        noise = f"Rates vary by {self.noise:.0%} within a run. Smaller differences mean nothing."
        return " ".join(filter(None, (self.load, noise if is_noisy else "")))

    @property
    def line(self) -> str:
        """The recommended line of code, to paste."""
        return (
            f"DataLoader(..., batch_size={self.batch_size}, num_workers={self.recommended.workers})"
        )


class RepeatedDataset:
    """Repeats a dataset, so that a short one can be measured for as long as a long one."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self._count = count

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % self._count]


def measure(
    source: BenchDataset,
    *,
    batch_size: int,
    workers: Sequence[int],
    seconds: float,
    tell: Callable[[str], None],
) -> BenchResult:
    """Run all measurements in sequence. ``tell`` is called with the name of each next step."""
    import torch

    from penstock.trace.diagnosis import diagnose
    from penstock.trace.regression import measure_noise
    from penstock.trace.simulator import predict_rate

    result = BenchResult(name=source.name, batch_size=batch_size)
    cores, used = usable_cores(), measure_load()
    result.load = say_load(used, cores)
    tell("one sample at a time")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        kept = _measure_stages(result, source, seconds)
    finally:
        torch.set_num_threads(num_threads)
    endless = RepeatedDataset(source.dataset, max(1, len(source.dataset)))
    timelines: dict[int, Timeline] = {}
    previous: Timeline | None = None
    for count in workers:
        tell(f"{count} worker{'s' if count != 1 else ''}")
        predicted = None
        if previous is not None and previous.num_batches > 3:
            predicted = predict_rate(previous.model, count)
            if result.load and predicted is not None and result.busy_share > MOSTLY_WAITING:
                before, after = (
                    cores_for(n, cores, used) for n in (result.runs[-1].workers, count)
                )
                predicted = min(predicted, result.runs[-1].rate * after / before)
        timeline = _run(endless, batch_size, source.collate_fn, count, seconds)
        account = timeline.account
        result.runs.append(
            WorkersRate(
                workers=count,
                rate=account.rate,
                stall_share=account.share(account.stall_s + account.loading_s),
                verdict=timeline.verdict.sentence,
                predicted=predicted,
                noise=measure_noise(timeline.model),
            )
        )
        timelines[count] = previous = timeline
    chosen = result.recommended
    result.timeline = timelines[chosen.workers]
    # The table has the rates with other numbers of workers, so the verdict promises none.
    result.timeline.verdict = diagnose(
        result.timeline.account, result.timeline.facts, lambda workers: chosen.rate
    )
    tell("the ceiling: samples in memory")
    ready = RepeatedDataset(kept, len(kept))
    at_most = _run(ready, batch_size, source.collate_fn, chosen.workers, seconds)
    result.ceiling = at_most.account.rate
    return result


def _measure_stages(result: BenchResult, source: BenchDataset, seconds: float) -> list[Any]:
    """Time loading of single samples, then collating. Returns some of the samples."""
    from penstock.engine.loading.default_collate import default_collate

    num_samples = len(source.dataset)
    if not num_samples:
        raise BadTarget(
            f"{source.name} is empty: len(dataset) is 0",
            remedy="penstock bench train.py:dataset",
        )
    kept: dict[int, Any] = {}
    times_s, busy_s = [], 0.0
    indices = spread_indices(num_samples, min(num_samples, MAX_SAMPLES))
    for timed in time_samples(sample_getter(source.dataset), indices, seconds):
        if timed.error is not None:
            path = find_path(source.dataset, timed.index, timed.error)
            raise BadTarget(
                f"dataset[{timed.index}] raises {describe_error(timed.error)}",
                where=path or place_of(timed.error),
                remedy=f"penstock doctor {source.name}, for details" if source.is_script else None,
            ) from timed.error
        times_s.append(timed.wall_s)
        busy_s += timed.busy_s
        if len(kept) < NUM_KEPT:
            kept[timed.index] = timed.sample
    busy_share = min(1.0, busy_s / max(sum(times_s), 1e-9))
    times_s.sort()
    late_ms = times_s[len(times_s) * 95 // 100] * 1e3
    note = f"95% within {late_ms:.3g} ms; computing {busy_share:.0%}, waiting {1 - busy_share:.0%}"
    middle_ms = times_s[len(times_s) // 2] * 1e3
    result.busy_share = busy_share
    result.stages.append(StageTime(name="dataset[i]", sample_ms=middle_ms, note=note))
    placed = list(itertools.islice(itertools.cycle(kept), result.batch_size))
    batch = [kept[index] for index in placed]
    collate = source.collate_fn or functools.partial(default_collate, indices=placed)
    fastest_s = min(timeit.repeat(lambda: collate(batch), number=1, repeat=5))
    result.stages.append(StageTime(name="collate", sample_ms=fastest_s / result.batch_size * 1e3))
    return list(kept.values())


def _run(dataset: Any, batch_size: int, collate_fn: Any, workers: int, seconds: float) -> Timeline:
    """Run a loader for ``seconds`` without a training step, and return its timeline."""
    from penstock.engine.loading.fetch import expected_in_flight, in_flight_of
    from penstock.loader import DataLoader

    # Repeated samples are async if those of the dataset inside are.
    in_flight = expected_in_flight(in_flight_of(dataset.dataset, "auto")) or "auto"
    with warnings.catch_warnings():  # more workers than cores are tried on purpose
        warnings.filterwarnings("ignore", message="This DataLoader will create", append=False)
        loader: Any = DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=collate_fn,
            in_flight=in_flight,
        )
        batches = iter(loader)
        next(batches)
    end_s = time.perf_counter() + seconds
    num_batches = 0
    while time.perf_counter() < end_s or num_batches < 3:
        next(batches)
        num_batches += 1
    timeline: Timeline = loader.timeline()
    del batches
    loader.close()
    return timeline
