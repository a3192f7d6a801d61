"""How long a sample takes, how fast it could be at best, and how fast each setting is."""

from __future__ import annotations

import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cli.bench.subject import Subject
from penstock.errors import BadTarget

if TYPE_CHECKING:
    from penstock import Timeline

NEAR_BEST = 0.95
"""Of settings that come this near to the best, the one with the fewest workers is recommended."""
NUM_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of the way, timed alone in this process."""

    name: str
    sample_ms: float
    note: str = ""


@dataclass(kw_only=True)
class Trial:
    """One setting.

    Args:
        predicted: What the simulator said before it was run; None: it was not asked.
    """

    workers: int
    rate: float
    stall_share: float
    verdict: str
    predicted: float | None = None


@dataclass(kw_only=True)
class Findings:
    """All that was measured. Rates are samples a second."""

    name: str
    batch_size: int
    stages: list[Stage] = field(default_factory=list)
    ceiling: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    best: Timeline | None = None

    @property
    def recommended(self) -> Trial:
        most = max(trial.rate for trial in self.trials)
        return next(trial for trial in self.trials if trial.rate >= NEAR_BEST * most)

    @property
    def line(self) -> str:
        """To paste."""
        return (
            f"DataLoader(..., batch_size={self.batch_size}, num_workers={self.recommended.workers})"
        )


class Endless:
    """A dataset over and over: short ones are measured as long as others."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self._count = count

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % self._count]


def measure(
    subject: Subject,
    *,
    batch_size: int,
    workers: Sequence[int],
    seconds: float,
    tell: Callable[[str], None],
) -> Findings:
    """Everything, one after the other. ``tell``: called with what comes next."""
    import torch

    import penstock

    findings = Findings(name=subject.name, batch_size=batch_size)
    tell("one sample at a time")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        kept = _measure_stages(findings, subject, seconds)
    finally:
        torch.set_num_threads(num_threads)
    endless = Endless(subject.dataset, max(1, len(subject.dataset)))
    previous: Timeline | None = None
    best_rate = 0.0
    for count in workers:
        tell(f"{count} worker{'s' if count != 1 else ''}")
        predicted = None
        if previous is not None and previous.num_batches > 3:
            predicted = penstock.simulate(previous, workers=count).account.rate
        timeline = _run(endless, batch_size, subject.collate_fn, count, seconds)
        account = timeline.account
        findings.trials.append(
            Trial(
                workers=count,
                rate=account.rate,
                stall_share=account.share(account.stall_s + account.loading_s),
                verdict=timeline.verdict.sentence,
                predicted=predicted,
            )
        )
        if account.rate > best_rate:
            findings.best, best_rate = timeline, account.rate
        if count:
            previous = timeline
    tell("the ceiling: samples that lie ready")
    ready = Endless(kept, len(kept))
    count = max(1, findings.recommended.workers)
    findings.ceiling = _run(ready, batch_size, subject.collate_fn, count, seconds).account.rate
    return findings


def _measure_stages(findings: Findings, subject: Subject, seconds: float) -> list[Any]:
    """Load one by one, then collate; some samples are kept for later."""
    from torch.utils.data import default_collate

    kept: list[Any] = []
    times, cpu_s = [], time.thread_time()
    end_s = time.perf_counter() + seconds
    if not len(subject.dataset):
        raise BadTarget(
            f"{subject.name} is empty: len(dataset) is 0", remedy="penstock bench train.py:dataset"
        )
    for index in _indices(len(subject.dataset)):
        start_s = time.perf_counter()
        sample = _load(subject.dataset, index)
        times.append(time.perf_counter() - start_s)
        if len(kept) < NUM_KEPT:
            kept.append(sample)
        if time.perf_counter() > end_s:
            break
    cpu_share = min(1.0, (time.thread_time() - cpu_s) / max(sum(times), 1e-9))
    times.sort()
    middle, late = times[len(times) // 2], times[len(times) * 95 // 100]
    note = f"95% within {late * 1e3:.3g} ms; computing {cpu_share:.0%}, waiting {1 - cpu_share:.0%}"
    findings.stages.append(Stage(name="dataset[i]", sample_ms=middle * 1e3, note=note))
    collate = subject.collate_fn or default_collate
    batch = list(itertools.islice(itertools.cycle(kept), findings.batch_size))
    collating = []
    for _ in range(5):
        start_s = time.perf_counter()
        collate(batch)
        collating.append(time.perf_counter() - start_s)
    per_sample_ms = min(collating) / findings.batch_size * 1e3
    findings.stages.append(Stage(name="collate", sample_ms=per_sample_ms))
    return kept


def _load(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise BadTarget(
            f"dataset[{index}] raises {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
            remedy="penstock doctor train.py:dataset, which says more about it",
        ) from error


def _indices(length: int) -> Iterator[int]:
    """All samples, spread over the dataset: the first are not always like the rest."""
    step = max(1, int(length * 0.618)) | 1
    while length > 1 and _have_common_divisor(step, length):
        step += 2
    return (place * step % length for place in range(length))


def _have_common_divisor(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one > 1


def _run(dataset: Any, batch_size: int, collate_fn: Any, workers: int, seconds: float) -> Timeline:
    """A loader that runs for so long, without a step."""
    import penstock

    with warnings.catch_warnings():  # more workers than cores are tried on purpose
        warnings.filterwarnings("ignore", message="This DataLoader will create", append=False)
        loader: Any = penstock.DataLoader(
            dataset, batch_size=batch_size, num_workers=workers, collate_fn=collate_fn
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
