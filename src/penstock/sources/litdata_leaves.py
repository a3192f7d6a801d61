"""Leaves of LitData's samples: from the bytes that a serializer wrote to the value.

Tested by ``tests/unit/sources/test_litdata_dataset.py``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import BadStore
from penstock.images.crops import open_image
from penstock.sources.mds_dataset import split_list
from penstock.sources.raw_images import decode_raw_image

Decoder = Callable[[memoryview], Any]
# fmt: off
_TORCH_DTYPES = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128",
    "complex128", "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32",
    "int32", "int64", "int64", "bool", "uint16",
)
"""Dtypes of tensors by their number in a format. Some have two."""
_NUMPY_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128", "bool",
)
"""Dtypes of arrays by their number. Larger numbers are objects, which are not read."""
# fmt: on
_IMAGES = ("jpeg", "image", "pil", "jpeg_array")
_MEDIA = ("video", "audio", "nifti", "mesh", "pdf", "tifffile", "tiff")


def make_decoder(form: str, decode_images: bool, where: str = "the set") -> Decoder:
    """Return a function from the bytes of a leaf to its value.

    Args:
        form: The serializer, such as "int" or "no_header_tensor:17".
        decode_images: If False, images and other media are bytes.

    Raises:
        BadStore: The serializer is not known, or its values need a library of its own.

    Example:
        >>> make_decoder("str", True)(memoryview(b"text"))
        'text'
    """
    name = form.partition(":")[0]
    if name in _IMAGES:
        return _IMAGE_DECODERS[name] if decode_images else bytes
    if name in ("no_header_numpy", "no_header_tensor"):
        return _Numbers(form)
    if name in _PLAIN:
        return _PLAIN[name]
    if name in _MEDIA and not decode_images:
        return bytes
    raise BadStore(
        f"{where} was written by the serializer {form!r}, which is not read",
        likely="it needs a library of its own, or is a serializer of yours.",
        remedy="open_dataset(path, decode=False), which gives its bytes, or columns=[...] without "
        "this field"
        if name in _MEDIA
        else "columns=[...] without this field",
    )


def is_encoded_image(form: str) -> bool:
    """Return True for an image file, which a transform can decode in part."""
    return form.partition(":")[0] in ("jpeg", "image")


def token_dtype(form: str) -> np.dtype[Any]:
    """Return the dtype of a format such as "no_header_tensor:17".

    Example:
        >>> token_dtype("no_header_tensor:17")
        dtype('int64')
    """
    name, _, number = form.partition(":")
    names = _NUMPY_DTYPES if name == "no_header_numpy" else _TORCH_DTYPES
    if not name.startswith("no_header_") or not number.isdigit() or int(number) >= len(names):
        raise BadStore(f"the serializer {form!r} is not known, or it holds Python objects")
    if names[int(number)] == "bfloat16":
        raise BadStore("tokens of bfloat16 are not supported")
    return np.dtype(names[int(number)])


def _read_tensor(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind: Any = getattr(torch, dtype)
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


class _Numbers:
    """A sequence of numbers, whose dtype is in the format."""

    def __init__(self, form: str) -> None:
        self._is_tensor = form.startswith("no_header_tensor")
        self._name = "bfloat16"
        if form != "no_header_tensor:10":
            self._name = token_dtype(form).name

    def __call__(self, data: memoryview) -> Any:
        if self._is_tensor:
            return _read_tensor(data, self._name, (-1,) if len(data) else (0,))
        return np.frombuffer(data, self._name).copy()


def _tensor(data: memoryview) -> Any:
    number, rank = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{rank}I", data, 8)
    return _read_tensor(data[8 + 4 * rank :], _TORCH_DTYPES[number], shape)


def _array(data: memoryview) -> np.ndarray:
    number, rank = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{rank}I", data, 8)
    values = np.frombuffer(data, _NUMPY_DTYPES[number], offset=8 + 4 * rank)
    return np.array(values.reshape(shape))


def _text(data: memoryview) -> str:
    return bytes(data).decode("utf-8")


def _bool(data: memoryview) -> bool:
    return data[0] != 0


def _int(data: memoryview) -> int:
    (value,) = struct.unpack("<q", data)
    return int(value)


def _float(data: memoryview) -> float:
    (value,) = struct.unpack("<d", data)
    return float(value)


def _unpickle(data: memoryview) -> Any:
    import pickle

    return pickle.loads(data)


def _decode_file(data: memoryview) -> Any:
    return open_image(bytes(data), None)


_IMAGE_DECODERS: dict[str, Decoder] = {
    "jpeg": _decode_file,
    "image": _decode_file,
    "pil": decode_raw_image,
    "jpeg_array": lambda data: [_decode_file(one) for one in split_list(data, 0)],
}


class _Nested:
    """Reads lists and dicts in LitData's binary form: a tag, then counts, sizes and values."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._data, self._place)
        self._place += struct.calcsize(form)
        return found

    def _bytes(self, num_bytes: int) -> bytes:
        found = self._data[self._place : self._place + num_bytes]
        if len(found) != num_bytes:
            raise ValueError("a nested value is truncated")
        self._place += num_bytes
        return found

    def _text(self) -> str:
        return self._bytes(self._number("<I")).decode("utf-8")

    def value(self) -> Any:
        tag = self._number("<B")
        if tag == 0:
            return json.loads(self._bytes(self._number("<I")))
        if tag in (1, 2, 3, 4):
            return self._list(tag, self._number("<I"))
        if tag == 5:
            return {self._text(): self.value() for _ in range(self._number("<I"))}
        if tag == 6:
            return self._records(self._number("<I"))
        return self._scalar(tag - 7)

    def _list(self, tag: int, count: int) -> list[Any]:
        if tag == 1:
            return [self._text() for _ in range(count)]
        if tag == 4:
            return [bool(one) for one in self._bytes(count)]
        values = np.frombuffer(self._bytes(8 * count), "<i8" if tag == 2 else "<f8")
        return list(values.tolist())

    def _records(self, count: int) -> list[dict[str, Any]]:
        keys = [self._text() for _ in range(self._number("<I"))]
        order = (4, 0, 1, 2, 3)  # their tags begin with null
        return [
            {key: self._scalar(order[self._number("<B") - 0x10]) for key in keys}
            for _ in range(count)
        ]

    def _scalar(self, kind: int) -> Any:
        """Return a text, integer, float, bool or null (0 to 4)."""
        if kind == 0:
            return self._text()
        if kind == 4:
            return None
        if kind not in (1, 2, 3):
            raise ValueError("a nested value has an unknown type")
        found = self._number({1: "<q", 2: "<d", 3: "<B"}[kind])
        return bool(found) if kind == 3 else found


def read_nested(data: memoryview) -> Any:
    """Return a list or dict.

    Example:
        >>> read_nested(memoryview(b'{"a": [1]}'))
        {'a': [1]}
        >>> read_nested(memoryview(bytes([4, 1, 0, 0, 0, 1])))
        [True]
    """
    content = bytes(data)
    if not content or content[0] > 0x20:
        return json.loads(content)
    return _Nested(content).value()


_PLAIN: dict[str, Decoder] = {
    "str": _text,
    "text": _text,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "bytes": bytes,
    "file": bytes,
    "numpy": _array,
    "tensor": _tensor,
    "json": read_nested,
    "pickle": _unpickle,
}
