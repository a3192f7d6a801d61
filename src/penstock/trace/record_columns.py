"""Trace records as NumPy columns, for metrics: reading a thousand records takes microseconds.

Called by the reader of a buffer: the training process, or ``penstock top``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.trace.record import NUM_KINDS, RECORD, RECORDS_AT, Record, first_since

Columns = NDArray[np.void]
_FIELDS = (
    *("number", "start_ns", "end_ns", "a", "b", "kind", "name", "thread", "part"),
    *("pass_", "batch", "rows", "extra"),
)
_TYPES = {"q": "<i8", "H": "<u2", "i": "<i4"}
RECORD_COLUMNS = np.dtype(
    [(field, _TYPES[code]) for field, code in zip(_FIELDS, RECORD.format[1:], strict=True)]
)
"""The layout of :data:`penstock.trace.record.RECORD`."""


def read_columns(memory: Any, since: int) -> Columns:
    """Return the records from number ``since`` on, oldest first, without the overwritten ones.

    Example:
        >>> from penstock.trace.record import TRACE_BYTES, Kind, TraceBuffer
        >>> buffer = TraceBuffer(bytearray(TRACE_BYTES))
        >>> number = buffer.add(Kind.BATCH, 100, 250, batch=3, rows=8)
        >>> read_columns(buffer.memory, 0)["batch"].tolist()
        [3]
    """
    view = memoryview(memory).cast("B")
    head = view[:8].cast("q")[0]
    capacity = (view.nbytes - RECORDS_AT) // RECORD.size
    numbers = np.arange(max(since, head - capacity, 0), head)
    found = np.frombuffer(view, RECORD_COLUMNS, capacity, RECORDS_AT)[numbers % capacity]
    is_whole = (found["number"] == numbers) & (found["kind"] < NUM_KINDS) & (found["start_ns"] > 0)
    whole: Columns = found[is_whole]
    return whole


def to_columns(records: Iterable[Record]) -> Columns:
    """Return decoded records as columns. Names are left out."""
    rows = [
        (
            *(0, r.start_ns, r.end_ns, r.a, r.b, r.kind, 0, r.thread, r.part),
            *(r.pass_, r.batch, r.rows, r.extra),
        )
        for r in records
    ]
    return np.array(rows, RECORD_COLUMNS)


def recent_columns(memory: Any, since_ns: int, pass_offset: int = 0) -> Columns:
    """Return the records of a buffer that ended after ``since_ns`` or have not ended.

    Args:
        pass_offset: Added to the number of each epoch.
    """
    found = read_columns(memory, first_since(memory, since_ns))
    found = found[is_recent(found, since_ns)]
    found["pass_"][found["pass_"] >= 0] += pass_offset
    return found


def is_recent(columns: Columns, since_ns: int) -> NDArray[np.bool_]:
    """Return which records ended after ``since_ns`` or have not ended."""
    return np.asarray((columns["end_ns"] >= since_ns) | (columns["end_ns"] == 0))
