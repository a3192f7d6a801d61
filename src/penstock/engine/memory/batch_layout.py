"""The layout of a batch: the nesting of its samples and, for each leaf, dtype, shape and place.

A layout describes what default_collate would make of such samples, field by field: tensors, arrays
and numbers become one tensor each at a fixed place in the slot; strings and bytes stay a list.
Workers read it from a batch's first sample; the parent builds views from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

_FIELD_GRAIN = 64
"""Fields start on cache lines, which also satisfies every dtype's alignment."""

_NUMPY_KINDS = "biufc"
_DTYPE_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
)
_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
}


class LayoutError(Exception):
    """A sample that the layout at hand (or any layout) cannot hold; torch's own collate decides."""


class LeafSpec(NamedTuple):
    """One leaf: ``kind`` is tensor, array, int, float, bool, scalar or object."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def is_array(self) -> bool:
        """Is it copied by itself, where samples are large?"""
        return self.kind in ("tensor", "array")


class TreeSpec(NamedTuple):
    """One container: its class, its keys or field names, and its children (None: a leaf).

    ``kind`` is dict, list (also of a tuple), namedtuple or dataclass.
    """

    kind: str
    cls: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]

    @property
    def is_flat(self) -> bool:
        return all(child is None for child in self.children)


class Layout(NamedTuple):
    """The whole layout. Equal layouts compare equal, so parts of a batch can be checked."""

    tree: Any
    leaves: tuple[LeafSpec, ...]

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """The byte offset of each leaf's field for ``rows`` samples, and the end of the last."""
        offsets, end = [], 0
        for leaf in self.leaves:
            offsets.append(end)
            end = -(-(end + leaf.item_bytes * rows) // _FIELD_GRAIN) * _FIELD_GRAIN
        return offsets, end

    @property
    def has_objects(self) -> bool:
        return any(leaf.kind == "object" for leaf in self.leaves)

    @property
    def sample_bytes(self) -> int:
        return sum(leaf.item_bytes for leaf in self.leaves)


# -- reading ---------------------------------------------------------------------------------------


def read_layout(sample: Any) -> Layout:
    """The layout of one sample.

    Raises:
        LayoutError: It holds something that only torch's own collate treats, or nothing does.
    """
    leaves: list[LeafSpec] = []
    tree = _read_tree(sample, leaves)
    return Layout(tree, tuple(leaves))


def _read_tree(value: Any, leaves: list[LeafSpec]) -> TreeSpec | None:
    cls, children = type(value), value
    keys: tuple[Any, ...] = ()
    if cls is dict:
        kind, keys, children = "dict", tuple(value), value.values()
    elif cls is list or cls is tuple:
        kind = "list"
    elif isinstance(value, tuple) and hasattr(type(value), "_fields"):
        kind = "namedtuple"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind, keys = "dataclass", tuple(field.name for field in dataclasses.fields(value))
        children = [getattr(value, name) for name in keys]
    else:
        leaves.append(read_leaf(value))
        return None
    return TreeSpec(kind, cls, keys, tuple(_read_tree(child, leaves) for child in children))


def is_plain_tensor(tensor: Any) -> bool:
    """Is it a CPU tensor whose bytes, dtype and strides are all there is to it?"""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def read_leaf(value: Any) -> LeafSpec:
    """What a leaf is and how default_collate would store it.

    Raises:
        LayoutError: Only torch knows.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        value = plain_tensor(value)
        dtype = str(value.dtype)
        if not is_plain_tensor(value) or dtype not in _DTYPES:
            raise LayoutError
        num_bytes = value.numel() * value.element_size()
        return LeafSpec("tensor", dtype, tuple(value.shape), num_bytes)
    if kind is bool:
        return LeafSpec("bool", "torch.bool", (), 1)
    if kind is int:
        return LeafSpec("int", "torch.int64", (), 8)
    if kind is float:
        return LeafSpec("float", "torch.float64", (), 8)
    if kind is str or kind is bytes:
        return LeafSpec("object", "", (), 0)
    if kind is np.ndarray:
        if any(stride < 0 for stride in value.strides):
            raise LayoutError  # torch refuses those, with its own advice
        return LeafSpec("array", _torch_dtype(value.dtype), value.shape, value.nbytes)
    if isinstance(value, (np.number, np.bool_)):
        return LeafSpec("scalar", _scalar_dtype(value.dtype), (), value.nbytes)
    raise LayoutError


@functools.lru_cache(maxsize=256)
def _torch_dtype(dtype: np.dtype[Any]) -> str:
    """The name of torch's dtype for one of NumPy's."""
    if dtype.kind not in _NUMPY_KINDS or not dtype.isnative:
        raise LayoutError
    try:
        return str(torch.as_tensor(np.empty(0, dtype=dtype)).dtype)
    except TypeError:
        raise LayoutError from None


@functools.lru_cache(maxsize=256)
def _scalar_dtype(dtype: np.dtype[Any]) -> str:
    """The name of torch's dtype for a scalar of NumPy's. Of uint64, torch takes arrays only."""
    if dtype.kind == "u":
        try:
            torch.as_tensor([dtype.type(0)])
        except TypeError:
            raise LayoutError from None
    return _torch_dtype(dtype)


def plain_tensor(value: Any) -> torch.Tensor:
    """The value as a plain tensor.

    Raises:
        LayoutError: It is not a tensor, or default_collate would keep its class.
    """
    if type(value) is torch.Tensor:
        return value
    if isinstance(value, torch.Tensor) and _stacks_to_plain(type(value)):
        return value.as_subclass(torch.Tensor)
    raise LayoutError


@functools.lru_cache(maxsize=256)
def _stacks_to_plain(kind: type) -> bool:
    """Do tensors of this subclass (torchvision's images, say) collate to plain tensors?"""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return False  # it may have no memory of its own
    try:
        example: torch.Tensor = torch.zeros(1).as_subclass(kind)
        return type(torch.stack([example, example])) is torch.Tensor
    except Exception:
        return False


# -- taking samples apart --------------------------------------------------------------------------


def compile_flatten(tree: TreeSpec | None) -> Callable[[Any], list[Any]]:
    """A function from a sample of this form to its leaves; raises LayoutError for another form."""
    if tree is None:
        return lambda sample: [sample]
    children_of = _compile_children(tree)
    if tree.is_flat:
        return children_of
    flattens = [compile_flatten(child) for child in tree.children]

    def flatten(sample: Any) -> list[Any]:
        leaves: list[Any] = []
        for flatten_child, child in zip(flattens, children_of(sample), strict=True):
            leaves += flatten_child(child)
        return leaves

    return flatten


def _compile_children(tree: TreeSpec) -> Callable[[Any], list[Any]]:
    cls, keys, length = tree.cls, tree.keys, len(tree.children)

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

    return {"dict": from_dict, "dataclass": from_dataclass}.get(tree.kind, from_sequence)


def split_columns(tree: TreeSpec | None, samples: list[Any]) -> Iterable[Any]:
    """One sequence of values per leaf, for samples that all have this form.

    Raises:
        LayoutError: One has not.
    """
    if tree is None:
        return [samples]
    if tree.is_flat and tree.kind in ("list", "namedtuple"):
        if set(map(type, samples)) != {tree.cls}:
            raise LayoutError
        if set(map(len, samples)) != {len(tree.children)}:
            raise LayoutError
        return zip(*samples, strict=True)
    return zip(*map(compile_flatten(tree), samples), strict=True)


# -- putting samples and batches together ----------------------------------------------------------


def field_view(buffer: Any, leaf: LeafSpec, offset: int, rows: int) -> torch.Tensor:
    """One field of a slot, as a tensor over ``buffer``."""
    shape, dtype = (rows, *leaf.shape), _DTYPES[leaf.dtype]
    if leaf.item_bytes == 0 or rows == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    count = rows * math.prod(leaf.shape)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
    return flat.view(shape) if leaf.shape else flat


def restore(tree: TreeSpec | None, values: list[Any]) -> Any:
    """The sample that was taken apart into ``values``: the inverse of flatten."""
    return _build(tree, iter(values), is_batch=False)


def assemble(tree: TreeSpec | None, fields: list[Any]) -> Any:
    """The batch, in the form that default_collate gives it, from one collated value per leaf."""
    return _build(tree, iter(fields), is_batch=True)


def _build(tree: TreeSpec | None, fields: Iterator[Any], *, is_batch: bool) -> Any:
    if tree is None:
        return next(fields)
    values = [_build(child, fields, is_batch=is_batch) for child in tree.children]
    if is_batch and tree.kind in ("list", "namedtuple"):
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
        return make_dataclass(tree.cls, dict(zip(tree.keys, values, strict=True)))
    if tree.cls is tuple and not is_batch:
        return tuple(values)
    return values  # default_collate turns tuples into lists as well


def make_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    """An instance with these fields, made without its constructor."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def view_batch(
    layout: Layout, root: np.ndarray | memoryview, rows: int, filled: int, objects: list[list[Any]]
) -> Any:
    """The batch as views of ``root``. Called from: the parent, when the batch is complete."""
    offsets, _ = layout.offsets(rows)
    columns = iter(objects)
    fields: list[Any] = [
        next(columns) if leaf.kind == "object" else field_view(root, leaf, offset, filled)
        for leaf, offset in zip(layout.leaves, offsets, strict=True)
    ]
    return assemble(layout.tree, fields)
