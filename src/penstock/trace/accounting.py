"""Sums: how long everybody worked and waited, the beginning of each epoch apart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.trace.model import Lane, Model, Span


@dataclass(frozen=True, kw_only=True)
class WorkerAccount:
    """What one worker did.

    Args:
        fetch_s, collate_s: In the dataset and in collate_fn.
        cpu_s: Computed, of these two together.
        queued_s: Ready to compute while others held the cores; from parts where it was measured.
        copied_s: Copied into batches; likewise.
        row_s: What a sample takes it, as the median over parts of batches.
        stall_busy_share: How much of the time the training loop waited for its loader it was busy.
        first_pass: The first epoch that it took part in: workers of one loader have the same.
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

    @property
    def busy_s(self) -> float:
        return self.fetch_s + self.collate_s

    @property
    def wait_share(self) -> float:
        """Of its time at work, what it neither computed nor waited for a core."""
        return max(0.0, 1.0 - (self.cpu_s + self.queued_s) / self.busy_s) if self.busy_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a run spent its time on. Times of the steady run leave out each epoch's first batch.

    Args:
        startup_s: Until the first batch of each epoch was there.
        first_start_s: The part of it that the first epoch took, which pays once for much.
        loading_s: Loading in the training process itself.
        refused: How often there was no slot for another batch.
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
    copy_s: float = 0.0
    gpu_s: float = 0.0
    refused: int = 0
    num_faults: int = 0
    free_memory_share: float = 1.0
    top_stall_share: float = 0.0
    """Of the stalls, the part that the longest tenth of them took."""
    slowest_ratio: float = 1.0
    """How much longer than usual a sample of the batches behind those took."""
    slowest: Span | None = None
    workers: tuple[WorkerAccount, ...] = ()

    @property
    def rate(self) -> float:
        """Samples a second in the steady run."""
        return self.steady_rows / self.steady_s if self.steady_s > 0 else 0.0

    def share(self, seconds: float) -> float:
        return min(1.0, seconds / self.steady_s) if self.steady_s > 0 else 0.0


def make_account(model: Model) -> Account:
    """The sums of a model."""
    batches = model.batches()
    if not batches:
        return Account(total_s=model.total_ns * 1e-9)
    firsts: dict[int, int] = {}
    for batch in batches:
        firsts[batch.pass_] = min(batch.batch, firsts.get(batch.pass_, batch.batch))
    sums, starts_ns, steady_rows, stalls = _sum_up(model, firsts)
    steady_s = sum(sums[kind] for kind in ("stall", "step", "deliver", "transfer", "fetch"))
    top_share, slowest_ratio, slowest = _concentration(model, stalls)
    free = [reading.value for reading in model.free_memory]
    return Account(
        num_batches=len(batches),
        num_rows=sum(batch.rows for batch in batches),
        num_passes=len(firsts),
        total_s=model.total_ns * 1e-9,
        startup_s=sum(starts_ns.values()) * 1e-9,
        first_start_s=starts_ns.get(min(firsts), 0) * 1e-9,
        steady_s=steady_s,
        steady_rows=steady_rows,
        stall_s=sums["stall"],
        step_s=sums["step"],
        deliver_s=sums["deliver"],
        transfer_s=sums["transfer"],
        loading_s=sums["fetch"],
        copy_s=sum(s.took_ns for lane in model.of("copy") for s in lane.spans) * 1e-9,
        gpu_s=sum(s.took_ns for lane in model.of("gpu") for s in lane.spans) * 1e-9,
        refused=len(model.refused_ns),
        num_faults=sum(lane.num_faults for lane in model.lanes),
        free_memory_share=_free_share(free, model),
        top_stall_share=top_share,
        slowest_ratio=slowest_ratio,
        slowest=slowest,
        workers=tuple(_account_worker(lane, stalls) for lane in model.of("worker")),
    )


def _sum_up(
    model: Model, firsts: dict[int, int]
) -> tuple[dict[str, float], dict[int, int], int, list[Span]]:
    """Seconds of each kind, the start-up apart, and the stalls; ``firsts``: each epoch's batch."""
    sums: dict[str, float] = defaultdict(float)
    starts_ns: dict[int, int] = defaultdict(int)
    steady_rows = 0
    stalls: list[Span] = []
    for lane in model.of("main"):
        for span in lane.top():
            is_first = firsts.get(span.pass_) == span.batch and span.kind != "step"
            if span.kind == "launch" or is_first:
                starts_ns[span.pass_] += span.took_ns
                continue
            sums[span.kind] += span.took_ns * 1e-9
            if span.kind == "stall":
                stalls.append(span)
            if span.kind == "deliver":
                steady_rows += span.rows
    return sums, starts_ns, steady_rows, stalls


def _free_share(free: list[float], model: Model) -> float:
    total = model.facts.get("memory_bytes")
    return min(free) / total if free and isinstance(total, (int, float)) and total > 0 else 1.0


def _account_worker(lane: Lane, stalls: list[Span]) -> WorkerAccount:
    fetches = [span for span in lane.top() if span.kind == "fetch" and not span.is_open]
    collates = [span for span in lane.top() if span.kind == "collate"]
    fetch_s = sum(span.took_ns for span in fetches) * 1e-9
    collate_s = sum(span.took_ns for span in collates) * 1e-9
    passes = {span.pass_ for span in fetches}
    waited_for = [stall for stall in stalls if stall.pass_ in passes]
    return WorkerAccount(
        number=lane.number,
        num_rows=sum(span.rows for span in fetches),
        fetch_s=fetch_s,
        collate_s=collate_s,
        cpu_s=_scaled(fetches, collates, "cpu_ns"),
        queued_s=_scaled(fetches, collates, "queued_ns"),
        # The first finds out the layout; the user's collate_fn is counted by itself.
        copied_s=max(0.0, _scaled(fetches[1:], collates, "copied_ns") - collate_s),
        row_s=row_s(fetches),
        stall_busy_share=_overlap_share(waited_for, [*fetches, *collates]),
        first_pass=min(passes, default=0),
    )


def _scaled(fetches: list[Span], collates: list[Span], field: str) -> float:
    """A sum over all parts from those where it was measured."""
    ends = {(s.pass_, s.batch, s.part): s.took_ns for s in collates}
    known = [s for s in fetches if getattr(s, field) >= 0]

    def took(span: Span) -> int:
        return span.took_ns + ends.get((span.pass_, span.batch, span.part), 0)

    base = sum(took(span) for span in known)
    share = sum(getattr(span, field) for span in known) / base if base else 0.0
    return share * sum(took(span) for span in fetches) * 1e-9


def row_s(fetches: list[Span]) -> float:
    """What a sample takes: the median over parts."""
    took_ns = [s.took_ns / s.rows for s in fetches if s.rows]  # none: dropped half way
    return statistics.median(took_ns) * 1e-9 if took_ns else 0.0


def _overlap_share(stalls: list[Span], busy: list[Span]) -> float:
    """Which part of the stalls the busy spans cover."""
    total = sum(stall.took_ns for stall in stalls)
    if not total or not busy:
        return 0.0
    busy = sorted(busy, key=lambda span: span.start_ns)
    edges = np.array([edge for span in busy for edge in (span.start_ns, span.end_ns)], dtype=float)
    edges = np.maximum.accumulate(edges)
    sums = np.cumsum([0.0, *(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))])
    starts = np.array([stall.start_ns for stall in stalls], dtype=float)
    ends = np.array([stall.end_ns for stall in stalls], dtype=float)
    covered = np.interp(ends, edges, sums) - np.interp(starts, edges, sums)
    return min(1.0, float(covered.sum()) / total)


def _concentration(model: Model, stalls: list[Span]) -> tuple[float, float, Span | None]:
    """Do a few long stalls take most of the time, and is one slow part behind them?"""
    total = sum(stall.took_ns for stall in stalls)
    fetches = [s for lane in model.of("worker") for s in lane.top() if s.kind == "fetch"]
    if not total or len(fetches) < 10:
        return 0.0, 1.0, None
    longest = sorted(stalls, key=lambda span: span.took_ns, reverse=True)
    num_batches = len(model.batches())
    top = longest[: max(1, num_batches // 10)]
    keys = {(stall.pass_, stall.batch) for stall in top}
    usual = row_s(fetches)
    behind = [s for s in fetches if (s.pass_, s.batch) in keys]
    slowest = max(behind, key=lambda s: s.took_ns, default=None)
    if slowest is None or not usual:
        return 0.0, 1.0, None
    ratio = slowest.took_ns * 1e-9 / (usual * max(1, slowest.rows))
    return sum(stall.took_ns for stall in top) / total, ratio, slowest
