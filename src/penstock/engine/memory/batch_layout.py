"""The form of a sample: its nesting and, for each leaf, what it is.

A layout is what default_collate would make of such samples, field by field: tensors, arrays and
numbers become one tensor each at a fixed place in the slot; strings and bytes stay a list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.memory.shared_file import round_up

FIELD_GRAIN = 64
"""Fields start on cache lines, which also satisfies every dtype's alignment."""

_NUMPY_KINDS = "biufc"


class LayoutError(Exception):
    """A sample that the layout at hand (or any layout) cannot hold; torch's own collate decides."""


class LeafSpec(NamedTuple):
    """One leaf: ``kind`` is tensor, array, int, float, bool, scalar or object."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int


class TreeSpec(NamedTuple):
    """One container: how to take it apart and what to build from the collated fields."""

    kind: str
    cls: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


class Layout(NamedTuple):
    """The whole form. Equal layouts compare equal, so parts of a batch can be checked."""

    tree: Any
    leaves: tuple[LeafSpec, ...]

    def places(self, rows: int) -> tuple[list[int], int]:
        """The byte offset of each leaf's field for ``rows`` samples, and the end of the last."""
        offsets, end = [], 0
        for leaf in self.leaves:
            offsets.append(end)
            end = round_up(end + leaf.item_bytes * rows, FIELD_GRAIN)
        return offsets, end

    @property
    def has_objects(self) -> bool:
        return any(leaf.kind == "object" for leaf in self.leaves)

    @property
    def sample_bytes(self) -> int:
        return sum(leaf.item_bytes for leaf in self.leaves)


LeafReader = Callable[[Any], LeafSpec]


def read_layout(sample: Any, read_leaf: LeafReader) -> Layout:
    """The layout of one sample.

    Raises:
        LayoutError: It holds something only torch's own collate (or nobody) can treat.
    """
    leaves: list[LeafSpec] = []
    tree = _read(sample, read_leaf, leaves)
    return Layout(tree, tuple(leaves))


def _read(value: Any, read_leaf: LeafReader, leaves: list[LeafSpec]) -> Any:
    kind = type(value)
    if kind is dict:
        keys = tuple(value)
        return TreeSpec("dict", dict, keys, _read_all(value.values(), read_leaf, leaves))
    if kind is list or kind is tuple:
        return TreeSpec("list", kind, (len(value),), _read_all(value, read_leaf, leaves))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return TreeSpec("namedtuple", kind, (), _read_all(value, read_leaf, leaves))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        values = [getattr(value, name) for name in names]
        return TreeSpec("dataclass", kind, names, _read_all(values, read_leaf, leaves))
    leaves.append(read_leaf(value))
    return None


def _read_all(values: Any, read_leaf: LeafReader, leaves: list[LeafSpec]) -> tuple[Any, ...]:
    return tuple(_read(value, read_leaf, leaves) for value in values)


def compile_flatten(tree: Any) -> Callable[[Any], list[Any]]:
    """A function from a sample of this form to its leaves; raises LayoutError for another form."""
    if tree is None:
        return lambda sample: [sample]
    if all(child is None for child in tree.children):
        return _flat_reader(tree)

    def flatten(sample: Any) -> list[Any]:
        out: list[Any] = []
        _take_apart(tree, sample, out)
        return out

    return flatten


def split_columns(tree: Any, samples: list[Any]) -> Any:
    """One sequence of values per leaf, for samples that all have this form.

    Raises:
        LayoutError: One has not.
    """
    if tree is None:
        return [samples]
    is_flat = all(child is None for child in tree.children)
    if is_flat and tree.kind in ("list", "namedtuple"):
        if set(map(type, samples)) != {tree.cls}:
            raise LayoutError
        if set(map(len, samples)) != {len(tree.children)}:
            raise LayoutError
        return zip(*samples, strict=True)
    return zip(*map(compile_flatten(tree), samples), strict=True)


def _flat_reader(tree: TreeSpec) -> Callable[[Any], list[Any]]:
    kind, cls, keys, length = tree.kind, tree.cls, tree.keys, len(tree.children)

    def from_sequence(sample: Any) -> list[Any]:
        if type(sample) is not cls or len(sample) != length:
            raise LayoutError
        return list(sample)

    def from_dict(sample: Any) -> list[Any]:
        if type(sample) is not dict or len(sample) != length:
            raise LayoutError
        try:
            return [sample[key] for key in keys]
        except KeyError:
            raise LayoutError from None

    def from_dataclass(sample: Any) -> list[Any]:
        if type(sample) is not cls:
            raise LayoutError
        return [getattr(sample, name) for name in keys]

    return {"dict": from_dict, "dataclass": from_dataclass}.get(kind, from_sequence)


def _take_apart(tree: Any, value: Any, out: list[Any]) -> None:
    if tree is None:
        out.append(value)
        return
    for child, item in zip(tree.children, _flat_reader(tree)(value), strict=True):
        _take_apart(child, item, out)


def restore(tree: Any, values: list[Any]) -> Any:
    """The sample that was taken apart into ``values``: the inverse of flatten."""
    return _build(tree, iter(values), keep_tuples=True)


def assemble(tree: Any, fields: list[Any]) -> Any:
    """The batch, in the form that default_collate gives it, from one collated value per leaf."""
    return _build(tree, iter(fields))


def _build(tree: Any, fields: Any, *, keep_tuples: bool = False) -> Any:
    if tree is None:
        return next(fields)
    values = [_build(child, fields, keep_tuples=keep_tuples) for child in tree.children]
    if tree.kind in ("list", "namedtuple") and not keep_tuples:
        # default_collate transposes sequences with zip, so strings in them come as tuples.
        values = [
            tuple(value) if child is None and isinstance(value, list) else value
            for child, value in zip(tree.children, values, strict=True)
        ]
    if tree.kind == "dict":
        return dict(zip(tree.keys, values, strict=True))
    if tree.kind == "namedtuple":
        return tree.cls(*values)
    if tree.kind == "dataclass":
        return _build_dataclass(tree, values)
    if keep_tuples and tree.cls is tuple:
        return tuple(values)
    return values  # default_collate turns tuples into lists as well


def _build_dataclass(tree: TreeSpec, values: list[Any]) -> Any:
    made = object.__new__(tree.cls)
    for name, value in zip(tree.keys, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def numpy_leaf(value: Any) -> LeafSpec | None:
    """The leaf of an array or NumPy scalar; None when it is neither."""
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or not _is_plain(value.dtype):
            raise LayoutError
        if any(stride < 0 for stride in value.strides):
            raise LayoutError  # torch refuses those, with its own advice
        return LeafSpec("array", value.dtype.str, value.shape, value.nbytes)
    if isinstance(value, (np.number, np.bool_)):
        if not _is_plain(value.dtype):
            raise LayoutError
        return LeafSpec("scalar", value.dtype.str, (), value.nbytes)
    return None


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _NUMPY_KINDS and dtype.isnative
