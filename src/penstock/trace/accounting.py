"""Totals of a run: how long the training loop and each worker worked and waited.

Start-up time of each epoch is counted separately. :func:`compare` compares the totals of two runs.
Called by :class:`penstock.Timeline` and ``penstock trace compare``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from penstock.trace.model import Lane, Reading, Span, TraceModel


@dataclass(frozen=True, kw_only=True)
class WorkerAccount:
    """Totals of one worker.

    Args:
        fetch_s, collate_s: Time in the dataset and in collate_fn.
        cpu_s: CPU time of both together.
        queued_s: Time waiting for a core, extrapolated from the parts where it was measured.
        copied_s: Time copying into batches, extrapolated in the same way.
        row_s: Time per sample: the median over parts of batches.
        stall_busy_share: Share of the training loop's stalls during which the worker was busy.
        first_pass: First epoch of the worker. It is the same for all workers of one loader.
        network_s: The part of ``fetch_s`` that it waited for object storage.
    """

    number: int
    num_rows: int = 0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    copied_s: float = 0.0
    row_s: float = 0.0
    stall_busy_share: float = 0.0
    first_pass: int = 0
    network_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.fetch_s + self.collate_s

    @property
    def wait_share(self) -> float:
        """Share of the busy time spent neither computing nor waiting for a core."""
        return max(0.0, 1.0 - (self.cpu_s + self.queued_s) / self.busy_s) if self.busy_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Account:
    """Totals of a run. The steady run excludes the first batch of each epoch.

    Args:
        startup_s: Time until the first batch of each epoch, summed over epochs.
        first_start_s: The part of ``startup_s`` in the first epoch, which includes one-time costs.
        loading_s: Time loading samples in the training process.
        network_s: The part of ``loading_s`` that it waited for object storage.
        main_cpu_s: CPU time of the training process, all threads, or 0 if unknown.
        refused: Number of times no slot was free for the next batch.
    """

    num_batches: int = 0
    num_rows: int = 0
    num_passes: int = 0
    total_s: float = 0.0
    startup_s: float = 0.0
    first_start_s: float = 0.0
    steady_s: float = 0.0
    steady_rows: int = 0
    stall_s: float = 0.0
    step_s: float = 0.0
    deliver_s: float = 0.0
    transfer_s: float = 0.0
    loading_s: float = 0.0
    network_s: float = 0.0
    main_cpu_s: float = 0.0
    copy_s: float = 0.0
    gpu_s: float = 0.0
    refused: int = 0
    num_faults: int = 0
    free_memory_share: float = 1.0
    top_stall_share: float = 0.0
    """Share of the total stall time that the longest 10% of the stalls took."""
    slowest_ratio: float = 1.0
    """Time per sample of the slowest part behind those stalls, relative to the median."""
    slowest: Span | None = None
    workers: tuple[WorkerAccount, ...] = ()
    most_at_once: int = 0
    """Largest number of workers that loaded at the same time, or 0 if unknown."""

    @property
    def num_workers(self) -> int:
        """The number of workers. Those of loaders that ran one after the other are not added up."""
        return self.most_at_once or len(self.workers)

    @property
    def rate(self) -> float:
        """Samples per second in the steady run."""
        return self.steady_rows / self.steady_s if self.steady_s > 0 else 0.0

    @property
    def typical_row_s(self) -> float:
        """Median time per sample over workers, or 0 if unknown."""
        rows_s = sorted(worker.row_s for worker in self.workers if worker.row_s)
        return rows_s[len(rows_s) // 2] if rows_s else 0.0

    def share(self, seconds: float) -> float:
        """Return ``seconds`` as a share of the steady run."""
        return min(1.0, seconds / self.steady_s) if self.steady_s > 0 else 0.0


def make_account(model: TraceModel) -> Account:
    """Compute the totals of a model."""
    batches = model.batches()
    if not batches:
        return Account(total_s=model.total_ns * 1e-9)
    firsts: dict[int, int] = {}
    for batch in batches:
        firsts[batch.pass_] = min(batch.batch, firsts.get(batch.pass_, batch.batch))
    sums_s: dict[str, float] = defaultdict(float)
    starts_s: dict[int, float] = defaultdict(float)
    steady: list[Span] = []
    for span in (span for lane in model.of("main") for span in lane.top()):
        is_first = firsts.get(span.pass_) == span.batch and span.kind != "step"
        if span.kind == "launch" or is_first:
            starts_s[span.pass_] += span.took_ns * 1e-9
        else:
            sums_s[span.kind] += span.took_ns * 1e-9
            steady.append(span)
    stalls = [span for span in steady if span.kind == "stall"]
    top_share, slowest_ratio, slowest = _longest_stalls(model, stalls)
    return Account(
        num_batches=len(batches),
        num_rows=sum(batch.rows for batch in batches),
        num_passes=len(firsts),
        total_s=model.total_ns * 1e-9,
        startup_s=sum(starts_s.values()),
        first_start_s=starts_s[min(firsts)],
        steady_s=sum(sums_s[kind] for kind in ("stall", "step", "deliver", "transfer", "fetch")),
        steady_rows=sum(span.rows for span in steady if span.kind == "deliver"),
        stall_s=sums_s["stall"],
        step_s=sums_s["step"],
        deliver_s=sums_s["deliver"],
        transfer_s=sums_s["transfer"],
        loading_s=sums_s["fetch"],
        network_s=sums_s["fetch"] * _network_share(model.of("main"), steady),
        main_cpu_s=sum(_increase(lane.cpu_s) for lane in model.of("main")),
        copy_s=sum(_took_s(lane.spans) for lane in model.of("copy")),
        gpu_s=sum(_took_s(lane.spans) for lane in model.of("gpu")),
        refused=model.num_refused,
        num_faults=sum(lane.num_faults for lane in model.lanes),
        free_memory_share=_free_share(model),
        top_stall_share=top_share,
        slowest_ratio=slowest_ratio,
        slowest=slowest,
        workers=tuple(_account_worker(lane, stalls) for lane in model.of("worker")),
        most_at_once=model.num_workers,
    )


def _network_share(lanes: list[Lane], spans: list[Span]) -> float:
    """Return the share of the loading in ``spans`` that waited for object storage."""
    waits = [span for lane in lanes for span in lane.spans if span.kind == "network"]
    return _overlap_share([span for span in spans if span.kind == "fetch"], waits)


def _increase(readings: list[Reading]) -> float:
    return readings[-1].value - readings[0].value if readings else 0.0


def _took_s(spans: Iterable[Span]) -> float:
    return sum(span.took_ns for span in spans) * 1e-9


def _free_share(model: TraceModel) -> float:
    free = [reading.value for reading in model.free_memory]
    total = model.facts.get("memory_bytes")
    return min(free) / total if free and isinstance(total, (int, float)) and total > 0 else 1.0


def _account_worker(lane: Lane, stalls: list[Span]) -> WorkerAccount:
    fetches = [span for span in lane.of("fetch") if not span.is_open]
    collates = lane.of("collate")
    collate_s = _took_s(collates)
    passes = {span.pass_ for span in fetches}
    return WorkerAccount(
        number=lane.number,
        num_rows=sum(span.rows for span in fetches),
        fetch_s=_took_s(fetches),
        collate_s=collate_s,
        cpu_s=_scaled(fetches, collates, "cpu_ns"),
        queued_s=_scaled(fetches, collates, "queued_ns"),
        # The first part also determines the layout. The user's collate_fn is counted separately.
        copied_s=max(0.0, _scaled(fetches[1:], collates, "copied_ns") - collate_s),
        row_s=row_s(fetches),
        stall_busy_share=_overlap_share(
            [stall for stall in stalls if stall.pass_ in passes], [*fetches, *collates]
        ),
        first_pass=min(passes, default=0),
        network_s=_took_s(fetches) * _network_share([lane], fetches),
    )


def _scaled(fetches: list[Span], collates: list[Span], field: str) -> float:
    """Return the sum of a field over all parts, extrapolated from the measured parts."""
    collate_ns = {span.place: span.took_ns for span in collates}

    def took_ns(spans: list[Span]) -> int:
        return sum(span.took_ns + collate_ns.get(span.place, 0) for span in spans)

    known = [span for span in fetches if getattr(span, field) >= 0]
    known_ns = took_ns(known)
    share = sum(getattr(span, field) for span in known) / known_ns if known_ns else 0.0
    return share * took_ns(fetches) * 1e-9


def row_s(fetches: list[Span]) -> float:
    """Return the time per sample: the median over parts."""
    took_ns = [s.took_ns / s.rows for s in fetches if s.rows]  # abandoned parts have 0 rows
    return statistics.median(took_ns) * 1e-9 if took_ns else 0.0


def _overlap_share(stalls: list[Span], busy: list[Span]) -> float:
    """Return the share of the stalls that the busy spans cover."""
    total = sum(stall.took_ns for stall in stalls)
    if not total or not busy:
        return 0.0
    busy = sorted(busy, key=lambda span: span.start_ns)
    edges = np.array([edge for span in busy for edge in (span.start_ns, span.end_ns)], dtype=float)
    edges = np.maximum.accumulate(edges)
    busy_ns = np.diff(edges, prepend=edges[0])
    busy_ns[::2] = 0.0  # the gaps between spans
    starts, ends = np.array([stall[2:4] for stall in stalls], dtype=float).T
    sums = np.cumsum(busy_ns)
    covered = np.interp(ends, edges, sums) - np.interp(starts, edges, sums)
    return min(1.0, float(covered.sum()) / total)


def _longest_stalls(model: TraceModel, stalls: list[Span]) -> tuple[float, float, Span | None]:
    """Examine the longest 10% of the stalls and the slowest part that caused them.

    Returns their share of the total stall time, the time per sample of that part relative to the
    median, and the part.
    """
    fetches = [span for lane in model.of("worker") for span in lane.of("fetch")]
    longest = sorted(stalls, key=lambda span: span.took_ns, reverse=True)
    top = longest[: max(1, len(model.batches()) // 10)]
    keys = {(stall.pass_, stall.batch) for stall in top}
    behind = [span for span in fetches if (span.pass_, span.batch) in keys]
    usual_s = row_s(fetches)
    if len(fetches) < 10 or not behind or not usual_s or not _took_s(top):
        return 0.0, 1.0, None
    slowest = max(behind, key=lambda span: span.took_ns)
    ratio = slowest.took_ns * 1e-9 / (usual_s * max(1, slowest.rows))
    return _took_s(top) / _took_s(stalls), ratio, slowest


# -- comparing two runs ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One quantity of two runs.

    Args:
        is_better: True if the value of the second run is better. None if neither is better.
    """

    what: str
    one: float
    other: float
    unit: str
    is_better: bool | None = None

    @property
    def change(self) -> str:
        """The second value relative to the first, as text."""
        if self.unit == "%":
            return f"{(self.other - self.one) * 100:+.0f} points"
        if not self.one:
            return "" if not self.other else "new"
        return f"{self.other / self.one:.2f}x"

    def shown(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "%" else f"{value:,.4g} {self.unit}".rstrip()


_COMPARED: list[tuple[str, Callable[[Account], float], str, bool | None]] = [
    ("samples a second", lambda a: a.rate, "", True),
    ("waiting for batches", lambda a: a.share(a.stall_s + a.loading_s), "%", False),
    ("your step", lambda a: a.share(a.step_s), "%", None),
    ("to the device", lambda a: a.share(a.transfer_s), "%", False),
    ("putting together", lambda a: a.share(a.deliver_s), "%", False),
    ("start-up", lambda a: a.startup_s, "s", False),
    ("a sample in a worker", lambda a: a.typical_row_s * 1e3, "ms", False),
    ("workers", lambda a: a.num_workers, "", None),
    ("batches", lambda a: a.num_batches, "", None),
]
"""Compared quantities: name, value, unit, and whether a larger value is better."""


def compare(one: Account, other: Account) -> list[ComparisonRow]:
    """Compare two runs.

    Example:
        >>> fast = Account(num_batches=9, steady_s=1.0, steady_rows=80, step_s=1.0)
        >>> slow = Account(num_batches=9, steady_s=2.0, steady_rows=80, step_s=1.0, stall_s=1.0)
        >>> row = compare(slow, fast)[0]
        >>> row.what, row.change, row.is_better
        ('samples a second', '2.00x', True)
    """
    found = []
    for what, read, unit, more_is_better in _COMPARED:
        left, right = float(read(one)), float(read(other))
        is_better = None
        if more_is_better is not None and left != right:
            is_better = (right > left) == more_is_better
        found.append(
            ComparisonRow(what=what, one=left, other=right, unit=unit, is_better=is_better)
        )
    return found
