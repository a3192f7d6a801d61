"""Finds the sample and field that cannot be stacked, or that do not match the rest of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from penstock.errors import MismatchedSamples
from penstock.user_objects import probe


def find_mismatch(
    samples: list[Any], indices: list[Any], error: BaseException, path: str = ""
) -> MismatchedSamples | None:
    """Return the error for samples that default_collate rejected, or None if they match."""
    for place, sample in enumerate(samples):
        for own_path, value in _leaves(sample, path):
            is_huge = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
            known = (*_STACKED, *torch_collate.default_collate_fn_map)
            if (is_huge and "verflow" in str(error)) or not isinstance(value, known):
                return _describe_unstackable(value, own_path, indices, place, error)
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


_STACKED = (torch.Tensor, np.ndarray, np.generic, int, float, complex, str, bytes)
"""Types that default_collate can put into a batch."""
_CONVERSIONS = {
    "Decimal": "float",
    "datetime": "datetime.datetime.timestamp",
    "date": "datetime.date.toordinal",
    "timedelta": "datetime.timedelta.total_seconds",
    "int": "str",
}


def _describe_unstackable(
    value: Any, path: str, indices: list[Any], place: int, error: BaseException
) -> MismatchedSamples:
    kind = type(value)
    what = "None" if value is None else f"an object of type {kind.__name__}"
    remedy = "return tensors, numbers or strings, or pass a collate_fn: "
    remedy += "DataLoader(..., collate_fn=list)"
    if value is None:
        remedy = "return a value for every index; or raise an exception for a broken sample and "
        remedy += 'leave it out with DataLoader(..., on_error="skip")'
        if path:
            remedy += ". With open_dataset: columns=[...] without this field"
    elif kind.__module__.partition(".")[0] == "PIL":
        what = "a PIL image"
        remedy = "convert images to tensors in the dataset: "
        remedy += "transform=torchvision.transforms.ToTensor()"
    elif kind.__name__ in _CONVERSIONS:
        what = f"{value} ({kind.__name__})"
        transform = f"{{{path.strip('[]') or 'name'}: {_CONVERSIONS[kind.__name__]}}}"
        remedy = f"convert it in the dataset, as open_dataset(..., transforms={transform}) does; "
        remedy += "or pass DataLoader(..., collate_fn=list)"
    where = f" in field {path}" if path else ""
    sample = f"dataset[{_name(indices, place)}]" if place < len(indices) else _name(indices, place)
    return _class_for(type(error))(
        f"{sample} returned {what}{where}, which cannot be stacked into a batch. ({error})",
        remedy=remedy,
        field=path,
        sample_index=indices[place] if place < len(indices) else None,
        expected="a tensor, array, number or string",
        found=kind.__name__,
    )


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return the values in a sample that are not containers, with their paths."""
    try:
        children = _children(value, path)
    except Exception:  # the user's container, which torch's error is about
        return []
    if children is None:
        return [(path, value)]
    return [leaf for child_path, child in children for leaf in _leaves(child, child_path)]


def _children(value: Any, path: str) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", value[key]) for key in value]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    if hasattr(type(value), "__dataclass_fields__"):
        names = type(value).__dataclass_fields__
        return [(f"{path}.{name}", getattr(value, name)) for name in names]
    return None


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
    columns = [dict(_children(value, path) or ()) for value in values]
    for child_path in columns[0]:
        found = _first_difference([column[child_path] for column in columns], child_path)
        if found is not None:
            return found
    return None


def _describe(value: Any) -> str:
    shape = probe(value, "shape")
    if shape is not None:
        return f"{type(value).__name__} {probe(value, 'dtype', '')} of shape {tuple(shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {', '.join(sorted(map(repr, value)))}"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
