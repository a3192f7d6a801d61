"""Totals of a run: how long the training loop and each worker worked and waited.

Start-up time of each epoch is counted separately. :func:`compare` compares the totals of two runs.
Called by :class:`penstock.Timeline`, ``loader.metrics()`` and ``penstock trace compare``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.trace.model import TraceModel
from penstock.trace.record_columns import Columns
from penstock.trace.span_table import (
    CODES,
    LaneColumns,
    SpanTable,
    batch_keys,
    join,
    of_kind,
    tabulate_model,
    took_ns,
)


class SlowPart(NamedTuple):
    """A part of a batch that took long."""

    pass_: int
    batch: int
    took_s: float


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
    slowest: SlowPart | None = None
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
    return account_spans(tabulate_model(model))


def account_spans(table: SpanTable) -> Account:
    """Compute the totals of a run."""
    main = join([lane.spans for lane in table.of("main")])
    batches = of_kind(main, "deliver")
    if not len(batches):
        return Account(total_s=table.total_ns * 1e-9)
    passes, at = np.unique(batches["pass_"], return_inverse=True)
    firsts = np.full(len(passes), 2**62)
    np.minimum.at(firsts, at, batches["batch"])
    main = main[main["is_top"]]
    at = np.minimum(np.searchsorted(passes, main["pass_"]), len(passes) - 1)
    is_start = (passes[at] == main["pass_"]) & (firsts[at] == main["batch"])
    is_start &= main["kind"] != CODES["step"]
    is_start |= main["kind"] == CODES["launch"]
    starts, steady = main[is_start], main[~is_start]
    took_s = np.bincount(steady["kind"], took_ns(steady) * 1e-9, len(CODES)).tolist()
    sums_s = dict(zip(CODES, took_s, strict=True))
    stalls = of_kind(steady, "stall")
    top_share, slowest_ratio, slowest = _longest_stalls(table, stalls, len(batches))
    return Account(
        num_batches=len(batches),
        num_rows=int(batches["rows"].sum()),
        num_passes=len(passes),
        total_s=table.total_ns * 1e-9,
        startup_s=_sum_s(starts),
        first_start_s=_sum_s(starts[starts["pass_"] == passes[0]]),
        steady_s=sum(sums_s[kind] for kind in ("stall", "step", "deliver", "transfer", "fetch")),
        steady_rows=int(of_kind(steady, "deliver")["rows"].sum()),
        stall_s=sums_s["stall"],
        step_s=sums_s["step"],
        deliver_s=sums_s["deliver"],
        transfer_s=sums_s["transfer"],
        loading_s=sums_s["fetch"],
        network_s=sums_s["fetch"] * _network_share(table.of("main"), of_kind(steady, "fetch")),
        main_cpu_s=sum(lane.cpu_s for lane in table.of("main")),
        copy_s=sum(_sum_s(lane.spans) for lane in table.of("copy")),
        gpu_s=sum(_sum_s(lane.spans) for lane in table.of("gpu")),
        refused=table.num_refused,
        num_faults=sum(lane.num_faults for lane in table.lanes),
        free_memory_share=_free_share(table),
        top_stall_share=top_share,
        slowest_ratio=slowest_ratio,
        slowest=slowest,
        workers=tuple(_account_worker(lane, stalls) for lane in table.of("worker")),
        most_at_once=table.num_workers,
    )


def _network_share(lanes: list[LaneColumns], spans: Columns) -> float:
    """Return the share of the loading in ``spans`` that waited for object storage."""
    waits = [of_kind(lane.spans, "network") for lane in lanes]
    return _overlap_share(spans, join(waits))


def _sum_s(spans: Columns) -> float:
    return float(took_ns(spans).sum()) * 1e-9


def _free_share(table: SpanTable) -> float:
    free, total = table.least_free_bytes, table.facts.get("memory_bytes")
    is_known = free is not None and isinstance(total, (int, float)) and total > 0
    return free / total if is_known else 1.0  # type: ignore[operator]


def _account_worker(lane: LaneColumns, stalls: Columns) -> WorkerAccount:
    busy = lane.of("fetch", "collate")
    busy = busy[~busy["is_open"]]
    fetches, collate_s = of_kind(busy, "fetch"), _sum_s(of_kind(busy, "collate"))
    passes = np.unique(fetches["pass_"])
    return WorkerAccount(
        number=lane.number,
        num_rows=int(fetches["rows"].sum()),
        fetch_s=_sum_s(fetches),
        collate_s=collate_s,
        cpu_s=_scaled(fetches, "cpu_ns"),
        queued_s=_scaled(fetches, "queued_ns"),
        # The first part also determines the layout. The user's collate_fn is counted separately.
        copied_s=max(0.0, _scaled(fetches[1:], "copied_ns") - collate_s),
        row_s=_row_s(fetches),
        stall_busy_share=_overlap_share(stalls[np.isin(stalls["pass_"], passes)], busy),
        first_pass=int(passes[0]) if len(passes) else 0,
        network_s=_sum_s(fetches) * _network_share([lane], fetches),
    )


def _scaled(fetches: Columns, field: str) -> float:
    """Return the sum of a field over all parts, extrapolated from the measured parts."""
    known = fetches[fetches[field] >= 0]
    known_ns = known["part_ns"].sum()
    share = known[field].sum() / known_ns if known_ns else 0.0
    return float(share * fetches["part_ns"].sum()) * 1e-9


def _row_s(fetches: Columns) -> float:
    """Return the time per sample: the median over parts."""
    loaded = fetches[fetches["rows"] != 0]  # abandoned parts have 0 rows
    return float(np.median(took_ns(loaded) / loaded["rows"])) * 1e-9 if len(loaded) else 0.0


def _overlap_share(stalls: Columns, busy: Columns) -> float:
    """Return the share of the stalls that the busy spans cover."""
    total = took_ns(stalls).sum()
    if not total or not len(busy):
        return 0.0
    busy = busy[np.argsort(busy["start_ns"], kind="stable")]
    edges = np.column_stack([busy["start_ns"], busy["end_ns"]]).ravel().astype(float)
    edges = np.maximum.accumulate(edges)
    busy_ns = np.diff(edges, prepend=edges[0])
    busy_ns[::2] = 0.0  # the gaps between spans
    sums = np.cumsum(busy_ns)
    ends_ns = np.interp(stalls["end_ns"], edges, sums)
    covered_ns = float((ends_ns - np.interp(stalls["start_ns"], edges, sums)).sum())
    return min(1.0, covered_ns / float(total))


def _longest_stalls(
    table: SpanTable, stalls: Columns, num_batches: int
) -> tuple[float, float, SlowPart | None]:
    """Examine the longest 10% of the stalls and the slowest part that caused them.

    Returns their share of the total stall time, the time per sample of that part relative to the
    median, and the part.
    """
    fetches = table.spans("worker", "fetch")
    longest = np.argsort(-took_ns(stalls), kind="stable")
    top = stalls[longest[: max(1, num_batches // 10)]]
    behind = fetches[np.isin(batch_keys(fetches), batch_keys(top))]
    usual_s = _row_s(fetches)
    if len(fetches) < 10 or not len(behind) or not usual_s or not _sum_s(top):
        return 0.0, 1.0, None
    slowest = behind[np.argmax(took_ns(behind))]
    part = SlowPart(
        int(slowest["pass_"]),
        int(slowest["batch"]),
        int(slowest["end_ns"] - slowest["start_ns"]) * 1e-9,
    )
    ratio = part.took_s / (usual_s * max(1, int(slowest["rows"])))
    return _sum_s(top) / _sum_s(stalls), ratio, part


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
