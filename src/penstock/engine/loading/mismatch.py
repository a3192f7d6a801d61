"""Finds the sample and field that do not match the rest of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import MismatchedSamples
from penstock.user_objects import probe


def find_mismatch(
    samples: list[Any], indices: list[Any], error: BaseException, path: str = ""
) -> MismatchedSamples | None:
    """Return the error for samples that default_collate rejected, or None if they match."""
    found = _first_difference(samples, path)
    if found is None:
        return None
    path, place, ours, theirs = found
    field = f"field {path}" if path else "the sample itself"
    first, odd = _name(indices, 0), _name(indices, place)
    return _class_for(type(error))(
        f"samples of one batch differ in {field}: sample {first} has {theirs}, sample {odd} has "
        f"{ours}. ({error})",
        remedy="resize or pad in the dataset so that all samples match, or pass a collate_fn that "
        "does not stack them: DataLoader(..., collate_fn=list)",
        field=path,
        sample_index=indices[place] if place < len(indices) else None,
        expected=theirs,
        found=ours,
    )


def _class_for(kind: type[BaseException]) -> type[MismatchedSamples]:
    """Return a MismatchedSamples that is also a ``kind``, so that ``except kind`` still works."""
    if issubclass(MismatchedSamples, kind):
        return MismatchedSamples
    namespace = {"__module__": MismatchedSamples.__module__}
    return type(MismatchedSamples.__name__, (MismatchedSamples, kind), namespace)


def _name(indices: list[Any], place: int) -> str:
    return repr(indices[place]) if place < len(indices) else f"#{place} of the batch"


def _first_difference(values: list[Any], path: str) -> tuple[str, int, str, str] | None:
    first = values[0]
    for place, value in enumerate(values):
        ours, theirs = _describe(value), _describe(first)
        if ours != theirs:
            return path, place, ours, theirs
    if isinstance(first, Mapping):
        children = [(f"{path}[{key!r}]", [value[key] for value in values]) for key in first]
    elif isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
        children = [
            (f"{path}[{place}]", [value[place] for value in values]) for place in range(len(first))
        ]
    elif hasattr(type(first), "__dataclass_fields__"):
        names = type(first).__dataclass_fields__
        children = [(f"{path}.{name}", [getattr(v, name) for v in values]) for name in names]
    else:
        children = []
    for child_path, column in children:
        found = _first_difference(column, child_path)
        if found is not None:
            return found
    return None


def _describe(value: Any) -> str:
    shape = probe(value, "shape")
    if shape is not None:
        return f"{type(value).__name__} {probe(value, 'dtype', '')} of shape {tuple(shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {sorted(map(repr, value))}"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
