"""``loader.metrics()``: rates, waits, faults and the verdict of the last seconds of loading.

    Recorder.recent_records(), or the buffers of another process (penstock top)
        --> columns of the spans of the last WINDOW_S --> account, diagnosis --> Metrics

Called in the training process and by ``penstock top``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.machine.host import io_bytes
from penstock.trace.accounting import account_spans
from penstock.trace.diagnosis import MIN_BATCHES_OF_WINDOW, Diagnosis, diagnose
from penstock.trace.record_columns import Columns
from penstock.trace.recorder import Recorder
from penstock.trace.span_table import SpanTable, batch_keys, tabulate_records, took_ns

WINDOW_S = 30.0
"""Length of the part of a run that rates, times and the verdict describe."""


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The distribution of one time over batches, in seconds. All are 0 without batches."""

    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """State of a loader. Rates, shares and times describe the last 30 seconds of loading.

    Args:
        num_batches, num_samples: Delivered since the loader was created.
        window_s: Length of the part of the run that the rates describe.
        batches_per_s, samples_per_s: Rates, without the first batch of an epoch.
        wait_share: Share of the time in which the training loop waited for a batch, without the
            first batch of an epoch.
        step_share: Share of the time in which the training loop used its batches.
        load: Time to load a batch, summed over the workers that loaded its parts.
        wait: Time that the training loop waited for a batch.
        step: Time between the delivery of a batch and the request for the next one.
        num_ready: Batches that were loaded but not yet requested, when last counted.
        num_restarts: Lost workers that were replaced.
        num_hangs: The part of them that hung.
        bad_samples: Number of bad samples by type of error.
        read_bytes: Bytes that the running processes have read from files, including cached ones.
        disk_bytes: The part of them that came from a disk. None: unknown.
        sources: Samples of each source of a mixture so far in this epoch, over all ranks.
        network: For data in object storage: what was downloaded, read from the cache and evicted.
        verdict: The bottleneck. ``verdict.cause`` is one of ``penstock.trace.diagnosis.CAUSES``.
        is_off: True if tracing is off, so that only faults and bytes are known.
    """

    num_batches: int = 0
    num_samples: int = 0
    window_s: float = 0.0
    batches_per_s: float = 0.0
    samples_per_s: float = 0.0
    wait_share: float = 0.0
    step_share: float = 0.0
    load: Percentiles = Percentiles()
    wait: Percentiles = Percentiles()
    step: Percentiles = Percentiles()
    num_ready: int = 0
    num_restarts: int = 0
    num_hangs: int = 0
    bad_samples: dict[str, int] = field(default_factory=dict)
    read_bytes: int | None = None
    disk_bytes: int | None = None
    sources: dict[str, int] | None = None
    network: dict[str, Any] | None = None
    verdict: Diagnosis
    is_off: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dictionaries, for JSON and for loggers.

        Example:
            >>> import json
            >>> from penstock import DataLoader
            >>> loader = DataLoader(range(8), batch_size=4)
            >>> for batch in loader:
            ...     pass
            >>> json.loads(json.dumps(loader.metrics().to_dict()))["num_samples"]
            8
        """
        plain = asdict(self)
        plain["verdict"]["evidence"] = list(self.verdict.evidence)
        return plain

    def __str__(self) -> str:
        if self.is_off:
            return "no metrics: tracing is off (trace=False or PENSTOCK_TRACE=0)"
        return (
            f"{self.num_batches:,} batches, {self.samples_per_s:,.0f} samples/s; "
            f"waiting {self.wait_share:.0%}, step {self.step_share:.0%}, {self.num_ready} ready\n"
            f"{self.verdict.sentence}"
        )


def loader_metrics(recorder: Recorder | None) -> Metrics:
    """Return the metrics of a loader in this process. None means that nothing was loaded yet."""
    recorder = recorder or Recorder()
    counts = {**recorder.counts(), **sum_io(recorder.pids())}
    return make_metrics(recorder.recent_records(int(WINDOW_S * 1e9)), counts)


def sum_io(pids: list[int]) -> dict[str, int]:
    """Return ``read_bytes`` and ``disk_bytes`` of some processes, or nothing if unknown."""
    found = [counted for pid in pids if (counted := io_bytes(pid)) is not None]
    if not found:
        return {}
    return {"read_bytes": sum(one[0] for one in found), "disk_bytes": sum(one[1] for one in found)}


def make_metrics(records: Mapping[str, Any], counts: Mapping[str, Any]) -> Metrics:
    """Return the metrics of the records of a running loader.

    Args:
        records: As of :meth:`penstock.trace.recorder.Recorder.recent_records`.
        counts: The fields of :class:`Metrics` that do not follow from records.
    """
    table = tabulate_records(records)
    run = account_spans(table)
    times: dict[str, Any] = dict(_percentiles(table)) if run.num_batches else {}
    rows_per_batch = run.num_rows / run.num_batches if run.num_batches else 0.0
    return Metrics(
        **counts,
        **times,
        window_s=table.total_ns * 1e-9 if run.num_batches else 0.0,
        batches_per_s=run.rate / rows_per_batch if rows_per_batch else 0.0,
        samples_per_s=run.rate,
        wait_share=run.share(run.stall_s + run.loading_s),
        step_share=run.share(run.step_s),
        num_ready=table.num_ready,
        verdict=diagnose(run, table.facts, min_batches=MIN_BATCHES_OF_WINDOW),
        is_off=table.facts.get("is_off") is True,
    )


def _percentiles(table: SpanTable) -> dict[str, Percentiles]:
    load = table.spans("worker", "fetch", "collate")
    if not len(load):
        load = table.spans("main", "fetch", "collate")
    step = table.spans("main", "step")
    batches = np.unique(batch_keys(table.spans("main", "deliver")))
    return {
        "load": _by_batch(load[~load["is_open"]], batches),
        "wait": _by_batch(table.spans("main", "stall", "fetch"), batches),
        "step": _by_batch(step, np.unique(batch_keys(step))),
    }


def _by_batch(spans: Columns, batches: Any) -> Percentiles:
    """Return the distribution of the time of the spans of each batch."""
    if not len(batches):
        return Percentiles()
    keys = batch_keys(spans)
    at = np.minimum(np.searchsorted(batches, keys), len(batches) - 1)
    is_known = batches[at] == keys
    took_s = np.bincount(at[is_known], took_ns(spans)[is_known] * 1e-9, len(batches))
    p50_s, p95_s, p99_s = np.percentile(took_s, [50, 95, 99]).tolist()
    return Percentiles(p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)
