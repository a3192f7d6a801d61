"""Columns of an Arrow record batch as the fields of samples.

    make_column(array, feature) -> Column      once for each block and field
    column.value(row)                          the field of one sample
    column.rows()                              all rows as one NumPy array, if they have one shape

=============================================  =================================================
Arrow type                                     value of a field
=============================================  =================================================
integer, float, bool                           Python number
list of numbers, of any depth                  tensor, if the row is rectangular and has no null
Image feature of Hugging Face datasets         uint8 tensor (channels, height, width), or bytes
struct                                         dict of fields
null                                           None
anything else (text, bytes, dates, ...)        as pyarrow's ``to_pylist`` returns it
=============================================  =================================================

``pyarrow`` is imported by the caller. This module only uses the arrays it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import BadImage
from penstock.images.crops import open_image

_NUMBERS = {
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "halffloat": np.float16,
    "float": np.float32,
    "double": np.float64,
}
Transform = Callable[[Any], Any]
_ENCODED = ("binary", "large_binary", "string", "large_string", "null")
_LISTS = ("ListType", "LargeListType", "FixedSizeListType")


class Column:
    """The values of one field in one block."""

    def value(self, row: int, transform: Transform | None = None) -> Any:
        """Return the value of one sample, after the transform. It shares no memory with a block."""
        found = self._get(row)
        return found if transform is None else transform(found)

    def _get(self, row: int) -> Any:
        raise NotImplementedError

    def rows(self) -> np.ndarray | None:
        """Return all rows as one array if they are numbers of one shape, otherwise None."""
        return None


def make_column(array: Any, feature: Any = None, *, decode: bool = True) -> Column:
    """Return the column of a ``pyarrow.Array``.

    Args:
        feature: The feature of Hugging Face datasets, as in its JSON. None: there is none.
        decode: Decode the images of Image features. If False, their values are bytes.
    """
    if is_image(feature):
        return _Images(array, decode=decode)
    if is_image(_item_of(feature)) and _is_list(array.type):
        return _ImageLists(array, decode=decode)
    shape = getattr(array.type, "shape", None)
    storage = getattr(array, "storage", None)
    if storage is not None:  # an extension type, such as Array3D or FixedShapeTensor
        if shape is not None and hasattr(array, "to_numpy_ndarray") and not array.null_count:
            if getattr(array.type, "permutation", None) is not None:
                return FixedRows(array.to_numpy_ndarray())
            lists = _read_lists(storage)
            if lists is not None:
                return FixedRows(lists.values.reshape(len(array), *shape))
        array = storage
    if str(array.type) in _NUMBERS:
        if array.null_count:
            return _AnyValues(array)
        return _Numbers(_read_numbers(array))
    if is_number_list(array.type):
        lists = _read_lists(array)
        if lists is None:
            return _NullableLists(array)
        fixed = lists.rows()
        return _RaggedRows(lists, array) if fixed is None else FixedRows(fixed)
    if type(array.type).__name__ == "StructType":
        features = feature if isinstance(feature, dict) and "_type" not in feature else {}
        return _Structs(array, features, decode)
    return _AnyValues(array)


def is_image(feature: Any) -> bool:
    """Return True for the Image feature of Hugging Face datasets.

    Example:
        >>> is_image({"_type": "Image"}), is_image({"_type": "Value", "dtype": "int64"})
        (True, False)
    """
    is_dict = isinstance(feature, dict)
    return is_dict and feature.get("_type") == "Image" and feature.get("decode") is not False


def holds_images(kind: Any, feature: Any) -> bool:
    """Return False if a feature says that there are images, and the Arrow type cannot hold them."""
    inner = _item_of(feature)
    if inner is not None:
        return not _is_list(kind) or holds_images(kind.value_type, inner)
    is_struct = type(kind).__name__ == "StructType"
    names = [kind[place].name for place in range(kind.num_fields)] if is_struct else [str(kind)]
    return not is_image(feature) or bool({"bytes", "path", *_ENCODED} & set(names))


def is_number_list(kind: Any) -> bool:
    """Return True for a list of numbers, of any depth."""
    if not _is_list(kind):
        return False
    inner = kind.value_type
    return str(inner) in _NUMBERS or is_number_list(inner)


def is_number(kind: Any) -> bool:
    """Return True for a type whose values are Python numbers that fit into a tensor."""
    return str(kind) in _NUMBERS and str(kind) != "uint64"


def as_tensor(array: np.ndarray) -> Any:
    """Return an array that is not shared as a tensor. An array if torch has no such dtype.

    Example:
        >>> as_tensor(np.array([1.5, 2.5], np.float32))
        tensor([1.5000, 2.5000])
    """
    import torch

    try:
        return torch.from_numpy(array)
    except TypeError:  # uint16, uint32 and uint64, before torch 2.3
        return array


def _item_of(feature: Any) -> Any:
    """Return the feature of the items of a list feature, in any of its spellings, or None."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    if isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence"):
        return feature.get("feature")
    return None


def _is_list(kind: Any) -> bool:
    return type(kind).__name__ in _LISTS


def _read_numbers(array: Any) -> np.ndarray:
    """Return the numbers of an array without nulls, as a view if possible.

    ``array.to_numpy()`` would import pandas, which takes about a second in each worker.
    """
    dtype = np.dtype(_NUMBERS[str(array.type)])
    data, first, count = array.buffers()[1], array.offset, len(array)
    if data is None or not count:
        return np.empty(0, dtype)
    if dtype == np.bool_:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[first : first + count].astype(np.bool_)
    return np.frombuffer(data, dtype, count=count, offset=first * dtype.itemsize)


class _Numbers(Column):
    """Numbers without nulls."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._rows: np.ndarray | None = None

    def _get(self, row: int) -> Any:
        return self._values[row].item()

    def rows(self) -> np.ndarray | None:
        """Return the numbers as default_collate stores Python numbers."""
        if self._rows is None:
            wide = {"b": np.bool_, "f": np.float64}.get(self._values.dtype.kind, np.int64)
            self._rows = self._values.astype(wide, copy=False)
        return self._rows


class FixedRows(Column):
    """Number lists of one shape."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def _get(self, row: int) -> Any:
        return as_tensor(self._values[row].copy())

    def rows(self) -> np.ndarray | None:
        return self._values


class _Lists:
    """Nested lists without nulls: the offsets of each level, outermost first, and the numbers."""

    def __init__(self, levels: list[np.ndarray], values: np.ndarray) -> None:
        self._levels = levels
        self.values = values

    def rows(self) -> np.ndarray | None:
        """Return all lists as one array, or None if their shapes differ."""
        shape = [len(self._levels[0]) - 1]
        for offsets in self._levels:
            size = int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0
            if (np.diff(offsets) != size).any():
                return None
            shape.append(size)
        return self.values.reshape(shape)

    def row(self, row: int) -> np.ndarray | None:
        """Return a copy of one list, or None if it is not rectangular."""
        first, last = row, row + 1
        shape = []
        for offsets in self._levels:
            bounds = offsets[first : last + 1]
            size = int(bounds[1] - bounds[0]) if len(bounds) > 1 else 0
            if (np.diff(bounds) != size).any():
                return None
            shape.append(size)
            first, last = int(bounds[0]), int(bounds[-1])
        return np.array(self.values[first:last].reshape(shape))


def _read_lists(array: Any) -> _Lists | None:
    """Return the lists of an array, or None if there is a null in any of them."""
    levels = []
    while _is_list(array.type):
        if array.null_count:
            return None
        if hasattr(array, "offsets"):
            offsets = _read_numbers(array.offsets).astype(np.int64)
            offsets = offsets if len(offsets) else np.zeros(1, np.int64)  # an array without lists
        else:
            offsets = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
        first, last = int(offsets[0]), int(offsets[-1])
        levels.append(offsets - first)
        array = array.values.slice(first, last - first)  # flatten() would import pyarrow.compute
    if array.null_count:
        return None
    return _Lists(levels, _read_numbers(array))


class _RaggedRows(Column):
    """Number lists of different shapes, without nulls."""

    def __init__(self, lists: _Lists, array: Any) -> None:
        self._lists, self._array = lists, array

    def _get(self, row: int) -> Any:
        found = self._lists.row(row)
        return self._array[row].as_py() if found is None else as_tensor(found)


class _NullableLists(Column):
    """Number lists of which some are null or contain nulls."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def _get(self, row: int) -> Any:
        if not self._array[row].is_valid:
            return None
        lists = _read_lists(self._array.slice(row, 1))
        found = None if lists is None else lists.row(0)
        return self._array[row].as_py() if found is None else as_tensor(found)


class _Structs(Column):
    """Structs: a dict for each sample."""

    def __init__(self, array: Any, features: dict[str, Any], decode: bool) -> None:
        self._array = array
        names = [array.type[number].name for number in range(array.type.num_fields)]
        self._columns = {
            name: make_column(child, features.get(name), decode=decode)
            for name, child in zip(names, array.flatten(), strict=True)
        }

    def _get(self, row: int) -> Any:
        if self._array.null_count and not self._array[row].is_valid:
            return None
        return {name: column.value(row) for name, column in self._columns.items()}


class _Images(Column):
    """Images of Hugging Face datasets: structs of the bytes of a file and its path."""

    def __init__(self, array: Any, *, decode: bool) -> None:
        self._array = array
        self._decode = decode

    def value(self, row: int, transform: Transform | None = None) -> Any:
        found = self._array[row].as_py()
        return None if found is None else self._read(found, transform)

    def _read(self, image: Any, transform: Transform | None) -> Any:
        if not isinstance(image, dict):  # a column of files or of paths
            image = {"path" if isinstance(image, str) else "bytes": image}
        content = _image_bytes(image)
        if self._decode:
            return open_image(content, transform, path=image.get("path"))
        return content if transform is None else transform(content)


class _ImageLists(_Images):
    """Lists of images. A transform is applied to the list."""

    def value(self, row: int, transform: Transform | None = None) -> Any:
        found = self._array[row].as_py()
        if found is not None:
            found = [None if one is None else self._read(one, None) for one in found]
        return found if transform is None else transform(found)


def _image_bytes(image: dict[str, Any]) -> bytes:
    """Return the bytes of an image, from its file if the set has only the path."""
    content, path = image.get("bytes"), image.get("path")
    if content is not None:
        return bytes(content)
    if path is None:
        raise BadImage("an image has neither bytes nor a path")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadImage(
            f"{path} cannot be opened: {error.strerror or error}",
            likely="the set has only the paths of its images, and the file was moved or deleted.",
            remedy="save the set with the bytes of the images: "
            "dataset.cast_column(name, Image()).save_to_disk(...) where the files are",
            path=path,
        ) from None


class _AnyValues(Column):
    """Values that only pyarrow converts."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def _get(self, row: int) -> Any:
        return self._array[row].as_py()
