"""The layout of a batch: the nesting of its samples and the dtype, shape and offset of each leaf.

A layout describes the result of default_collate field by field. Tensors, arrays and numbers become
one tensor each, at a fixed offset in the slot. Strings and bytes become a list. Workers derive the
layout from a batch's first sample, and the parent builds views from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.named_tuple import NamedTuple

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
    """The layout cannot hold a sample. The caller falls back to torch's own collate."""


class LeafSpec(NamedTuple):
    """One leaf: ``kind`` is tensor, array, int, float, bool, scalar or object.

    An image with ``is_channels_last`` has the shape (channels, height, width), and its bytes are in
    the order height, width, channels.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    is_channels_last: bool = False

    @property
    def is_array(self) -> bool:
        """True for tensors and arrays, which are copied one by one when samples are large."""
        return self.kind in ("tensor", "array")


class TreeSpec(NamedTuple):
    """One container: its class, its keys or field names, and its children (None for a leaf).

    ``kind`` is dict, list (also used for tuples), namedtuple or dataclass.
    """

    kind: str
    cls: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]

    @property
    def is_flat(self) -> bool:
        return all(child is None for child in self.children)


class Layout(NamedTuple):
    """The whole layout. Layouts compare by value, which is how parts of a batch are checked."""

    tree: Any
    leaves: tuple[LeafSpec, ...]

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """Return the byte offset of each field for ``rows`` samples, and the total size."""
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


def read_layout(sample: Any, *, keeps_channels_last: bool = False) -> Layout:
    """Return the layout of one sample.

    Args:
        keeps_channels_last: Images that are channels_last stay so in the batch. If False, all
            tensors of the batch are contiguous, as from default_collate.

    Raises:
        LayoutError: The sample contains a value that no layout can hold.
    """
    leaves: list[LeafSpec] = []
    tree = _read_tree(sample, leaves, keeps_channels_last)
    return Layout(tree, tuple(leaves))


def _read_tree(value: Any, leaves: list[LeafSpec], keeps_channels_last: bool) -> TreeSpec | None:
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
        leaf = read_leaf(value)
        if keeps_channels_last and is_channels_last(value):
            leaf = leaf._replace(is_channels_last=True)
        leaves.append(leaf)
        return None
    trees = tuple(_read_tree(child, leaves, keeps_channels_last) for child in children)
    return TreeSpec(kind, cls, keys, trees)


def is_channels_last(value: Any) -> bool:
    """Return True for a tensor (channels, height, width) with the channels innermost in memory.

    Example:
        >>> pixels = torch.zeros(4, 5, 3)
        >>> is_channels_last(pixels.permute(2, 0, 1)), is_channels_last(pixels)
        (True, False)
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.ndim != 3:
        return False
    return not value.is_contiguous() and value.permute(1, 2, 0).is_contiguous()


def is_plain_tensor(tensor: Any) -> bool:
    """Return True for a CPU tensor fully described by its bytes, dtype, shape and strides."""
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
    """Return the kind of a leaf and how default_collate stores it.

    Raises:
        LayoutError: No layout can hold the value.
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
            raise LayoutError  # torch rejects these with its own error message
        return LeafSpec("array", _torch_dtype(value.dtype), value.shape, value.nbytes)
    if isinstance(value, (np.number, np.bool_)):
        return LeafSpec("scalar", _scalar_dtype(value.dtype), (), value.nbytes)
    raise LayoutError


@functools.lru_cache(maxsize=256)
def _torch_dtype(dtype: np.dtype[Any]) -> str:
    """Return the name of the torch dtype that matches a NumPy dtype."""
    if dtype.kind not in _NUMPY_KINDS or not dtype.isnative:
        raise LayoutError
    try:
        return str(torch.as_tensor(np.empty(0, dtype=dtype)).dtype)
    except TypeError:
        raise LayoutError from None


@functools.lru_cache(maxsize=256)
def _scalar_dtype(dtype: np.dtype[Any]) -> str:
    """Like :func:`_torch_dtype`, for NumPy scalars. torch accepts uint64 only as an array."""
    if dtype.kind == "u":
        try:
            torch.as_tensor([dtype.type(0)])
        except TypeError:
            raise LayoutError from None
    return _torch_dtype(dtype)


def plain_tensor(value: Any) -> torch.Tensor:
    """Return the value as a plain tensor.

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
    """Return True if tensors of this subclass (torchvision images) collate to plain tensors."""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return False  # may not own any memory
    try:
        example: torch.Tensor = torch.zeros(1).as_subclass(kind)
        return type(torch.stack([example, example])) is torch.Tensor
    except Exception:
        return False


# -- flattening samples ----------------------------------------------------------------------------


def compile_flatten(tree: TreeSpec | None) -> Callable[[Any], list[Any]]:
    """Return a function that maps a sample to its leaves. It raises LayoutError on a mismatch."""
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
    """Return one sequence of values per leaf. All samples must have this structure.

    Raises:
        LayoutError: A sample has a different structure.
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


# -- building samples and batches ------------------------------------------------------------------


def field_view(buffer: Any, leaf: LeafSpec, offset: int, rows: int) -> torch.Tensor:
    """Return one field of a slot, as a tensor over ``buffer``."""
    shape, dtype = (rows, *leaf.shape), _DTYPES[leaf.dtype]
    if leaf.item_bytes == 0 or rows == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    count = rows * math.prod(leaf.shape)
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
    if leaf.is_channels_last:
        channels, height, width = leaf.shape
        return flat.view(rows, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape) if leaf.shape else flat


def restore(tree: TreeSpec | None, values: list[Any]) -> Any:
    """Rebuild a sample from its leaves. The inverse of flatten."""
    return _build(tree, iter(values), is_batch=False)


def assemble(tree: TreeSpec | None, fields: list[Any]) -> Any:
    """Build a batch from one collated value per leaf, with the structure of default_collate."""
    return _build(tree, iter(fields), is_batch=True)


def _build(tree: TreeSpec | None, fields: Iterator[Any], *, is_batch: bool) -> Any:
    if tree is None:
        return next(fields)
    values = [_build(child, fields, is_batch=is_batch) for child in tree.children]
    if is_batch and tree.kind in ("list", "namedtuple"):
        # default_collate transposes sequences with zip, so strings in them become tuples.
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
    return values  # default_collate also turns tuples into lists


def make_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    """Create an instance with these fields without calling its constructor."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def view_batch(
    layout: Layout, root: np.ndarray | memoryview, rows: int, filled: int, objects: list[list[Any]]
) -> Any:
    """Return the batch as views of ``root``. Called by the parent when the batch is complete."""
    offsets, _ = layout.offsets(rows)
    columns = iter(objects)
    fields: list[Any] = [
        next(columns) if leaf.kind == "object" else field_view(root, leaf, offset, filled)
        for leaf, offset in zip(layout.leaves, offsets, strict=True)
    ]
    return assemble(layout.tree, fields)
