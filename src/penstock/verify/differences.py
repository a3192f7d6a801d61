"""Where do two runs part, and in what? The first batch, sample and field, and both values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from penstock.verify.hashing import as_array, digest, leaves_of
from penstock.verify.runs import Record

_MAX_SHOWN = 100


def first_place(one: Record, other: Record) -> tuple[int, int] | None:
    """(Epoch, batch) of the first difference; None: the runs are the same."""
    for epoch in range(max(len(one.epochs), len(other.epochs))):
        ours, theirs = (
            record.epochs[epoch] if epoch < len(record.epochs) else [] for record in (one, other)
        )
        for number in range(max(len(ours), len(theirs))):
            if number >= min(len(ours), len(theirs)) or ours[number] != theirs[number]:
                return epoch, number
    return None


def first_row(one: Record, other: Record, place: tuple[int, int]) -> int | None:
    """The sample within the batch at which two runs part; None: not to be told apart."""
    epoch, number = place
    batches = [
        record.epochs[epoch][number].rows
        for record in (one, other)
        if epoch < len(record.epochs) and number < len(record.epochs[epoch])
    ]
    if len(batches) < 2 or batches[0] is None or batches[1] is None:
        return None
    pairs = zip(*batches, strict=False)  # one batch may be longer
    found = next((row for row, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    shorter = min(len(batches[0]), len(batches[1]))
    return shorter if found is None and len(batches[0]) != len(batches[1]) else found


def describe_move(one: Record, other: Record, place: tuple[int, int], row: int | None) -> str:
    """Where a sample went, if the epoch has the same samples in another order; else nothing."""
    epoch, number = place
    if row is None or Counter(one.rows(epoch)) != Counter(other.rows(epoch)):
        return ""
    rows = one.epochs[epoch][number].rows
    sought = rows[row] if rows is not None and row < len(rows) else None
    for batch_number, batch in enumerate(other.epochs[epoch]):
        if sought is not None and batch.rows is not None and sought in batch.rows:
            found = batch.rows.index(sought)
            return (
                "the same samples in another order; the one that comes here first comes there in "
                f"batch {batch_number} as sample {found}"
            )
    return ""


def first_leaf(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """(Path, value, value) of the first field in which two samples or batches differ."""
    ours, theirs = dict(leaves_of(one)), dict(leaves_of(other))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if path not in ours or path not in theirs:
            return path, ours.get(path), theirs.get(path)
        if digest(ours[path]) != digest(theirs[path]):
            return path, ours[path], theirs[path]
    return None


def describe(one: Any, other: Any) -> tuple[str, str, str]:
    """(How two values differ, the one and the other in short).

    Example:
        >>> describe(np.array([1, 2, 3]), np.array([1, 5, 3]))
        ('1 of 3 numbers, the first at [1], by at most 3', '2', '5')
    """
    left, right = as_array(one), as_array(other)
    if left is None or right is None:
        if type(one) is not type(other):
            return f"{type(one).__name__} and {type(other).__name__}", shown(one), shown(other)
        return "other values", shown(one), shown(other)
    for what, mine, theirs in (
        ("dtypes", left[0], right[0]),
        ("shapes", left[1].shape, right[1].shape),
    ):
        if mine != theirs:
            return f"other {what}", str(mine), str(theirs)
    return _describe_numbers(left[1], right[1])


def _describe_numbers(left: np.ndarray, right: np.ndarray) -> tuple[str, str, str]:
    if not left.ndim:
        return "other numbers", shown(left[()]), shown(right[()])
    unlike = left != right
    if left.dtype.kind in "fc":  # NaN is not equal to itself, and 0.0 is to -0.0
        unlike &= ~(np.isnan(left) & np.isnan(right))
        if not unlike.any():
            return "equal numbers with other bits (NaN or -0.0)", shown(left), shown(right)
    places = np.argwhere(unlike)
    first = tuple(int(axis) for axis in places[0])
    text = f"{len(places)} of {left.size} numbers, the first at {list(first)}"
    if left.dtype.kind in "iuf":
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(left[unlike].astype(np.float64) - right[unlike].astype(np.float64)).max()
        text += f", by at most {gap:.4g}"
    return text, shown(left[first]), shown(right[first])


def shown(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
