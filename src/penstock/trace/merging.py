"""Several loaders of one program as one trace: training and validation, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.trace.record import BATCH


def merge_records(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of records; workers and epochs are counted on from loader to loader.

    Example:
        >>> one = {"facts": {}, "lanes": [{"name": "worker 0", "role": "worker", "spans": []}]}
        >>> [lane["name"] for lane in merge_records([one, one])["lanes"]]
        ['worker 0', 'loader 2: worker 0']
    """
    lanes: list[dict[str, Any]] = []
    num_workers = num_passes = 0
    facts: Mapping[str, Any] = {}
    most = -1
    has_user = False
    for place, records in enumerate(several):
        new_workers, new_passes, num_batches = num_workers, num_passes, 0
        for lane in records.get("lanes") or ():
            if lane.get("role") == "user":
                if has_user:  # it is the program's, and each loader has it
                    continue
                has_user = True
            moved = dict(lane, spans=[_moved(span, num_passes) for span in lane["spans"]])
            if lane.get("role") == "worker":
                moved["number"] = int(lane.get("number") or 0) + num_workers
                new_workers = max(new_workers, moved["number"] + 1)
                if place:
                    moved["name"] = f"loader {place + 1}: {lane['name']}"
            new_passes = max([new_passes, *(span.pass_ + 1 for span in moved["spans"])])
            num_batches += sum(span.kind == BATCH for span in lane["spans"])
            lanes.append(moved)
        num_workers, num_passes = new_workers, new_passes
        if num_batches > most:
            most, facts = num_batches, records.get("facts") or {}
    return {"facts": dict(facts), "lanes": lanes}


def _moved(span: Any, by: int) -> Any:
    return span._replace(pass_=span.pass_ + by) if span.pass_ >= 0 else span
