"""Finds the first difference between two runs: batch, sample and field, and both values."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

import numpy as np

from penstock.verify.hashed_run import HashedRun
from penstock.verify.hashing import as_array, digest, leaves_of

_MAX_SHOWN = 100


def first_difference(one: HashedRun, other: HashedRun) -> tuple[int, int] | None:
    """Return (epoch, batch) of the first difference. None if the runs are the same."""
    for epoch in range(max(len(one.epochs), len(other.epochs))):
        pairs = zip_longest(one.batches(epoch), other.batches(epoch))
        for number, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                return epoch, number
    return None


def first_sample(one: HashedRun, other: HashedRun, place: tuple[int, int]) -> int | None:
    """Return the first differing sample of a batch. None if it cannot be determined."""
    epoch, number = place
    batches = [run.batches(epoch)[number : number + 1] for run in (one, other)]
    if not all(batches):
        return None
    mine, theirs = (batch.samples for (batch,) in batches)
    if mine is None or theirs is None:
        return None
    pairs = enumerate(zip_longest(mine, theirs))  # one batch can be longer
    return next((index for index, (left, right) in pairs if left != right), None)


def describe_move(
    one: HashedRun, other: HashedRun, place: tuple[int, int], sample: int | None
) -> str:
    """Describe where a sample moved. Empty unless the epochs differ only in their order."""
    epoch, number = place
    if sample is None or Counter(one.samples(epoch)) != Counter(other.samples(epoch)):
        return ""
    samples = one.epochs[epoch][number].samples or ()
    for batch_number, batch in enumerate(other.batches(epoch)):
        if sample < len(samples) and samples[sample] in (batch.samples or ()):
            found = (batch.samples or ()).index(samples[sample])
            return (
                "the same samples in a different order; in the other run, this sample is sample "
                f"{found} of batch {batch_number}"
            )
    return ""


def first_leaf(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Return (path, value, value) of the first field in which two samples or batches differ."""
    ours, theirs = dict(leaves_of(one)), dict(leaves_of(other))
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        if path not in ours or path not in theirs:
            return path, ours.get(path), theirs.get(path)
        if digest(ours[path]) != digest(theirs[path]):
            return path, ours[path], theirs[path]
    return None


def describe(one: Any, other: Any) -> tuple[str, str, str]:
    """Return (how two values differ, the first value as text, the second value as text).

    Example:
        >>> describe(np.array([1, 2, 3]), np.array([1, 5, 3]))
        ('1 of 3 numbers differ, the first at [1], by at most 3', '2', '5')
    """
    left, right = as_array(one), as_array(other)
    if left is None or right is None:
        if type(one) is not type(other):
            return f"{type(one).__name__} and {type(other).__name__}", shown(one), shown(other)
        return "different values", shown(one), shown(other)
    for what, mine, theirs in (
        ("dtypes", left[0], right[0]),
        ("shapes", left[1].shape, right[1].shape),
    ):
        if mine != theirs:
            return f"different {what}", str(mine), str(theirs)
    return _describe_numbers(left[1], right[1])


def _describe_numbers(left: np.ndarray, right: np.ndarray) -> tuple[str, str, str]:
    if not left.ndim:
        return "different numbers", shown(left[()]), shown(right[()])
    unlike = left != right
    if left.dtype.kind in "fc":  # NaN does not equal itself, and 0.0 equals -0.0
        unlike &= ~(np.isnan(left) & np.isnan(right))
        if not unlike.any():
            return "equal numbers with different bits (NaN or -0.0)", shown(left), shown(right)
    places = np.argwhere(unlike)
    first = tuple(int(axis) for axis in places[0])
    text = f"{len(places)} of {left.size} numbers differ, the first at {list(first)}"
    if left.dtype.kind in "iuf":
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(left[unlike].astype(np.float64) - right[unlike].astype(np.float64)).max()
        text += f", by at most {gap:.4g}"
    return text, shown(left[first]), shown(right[first])


def shown(value: Any) -> str:
    """Return a value as one line of text."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
