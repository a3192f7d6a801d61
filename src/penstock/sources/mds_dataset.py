"""MosaicML MDS: a folder of shards with an ``index.json``. A shard is a block.

A sample is the sizes of its variable fields (uint32), followed by the bytes of all fields. The
encoding of a field says what its bytes are. Values have the types that ``streaming`` returns,
except that images are uint8 tensors (channels, height, width).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from penstock.errors import BadStore
from penstock.images.crops import open_image
from penstock.sources.blocks import ReadOptions
from penstock.sources.chunk_reader import Chunk, ChunkReader, read_index, refuse_pickle
from penstock.sources.raw_images import decode_raw_image

Decoder = Callable[[memoryview], Any]
# fmt: off
_SCALARS = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
    "float64",
)
# fmt: on
_DTYPE_CODES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_IMAGES = ("jpeg", "png", "pil")


class MdsDataset(ChunkReader):
    """Samples of an MDS set. See :func:`penstock.open_dataset`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        columns: Mapping[str, tuple[str, int]],
        fields: Sequence[str],
        options: ReadOptions,
    ) -> None:
        super().__init__(chunks, fields, transforms=options.transforms)
        self._columns = dict(columns)
        self.fields = tuple(fields)
        """The names of the fields of a sample."""
        self._decode_images = options.decode
        self._prepare()

    def _prepare(self) -> None:
        """Make what does not travel to other processes."""
        self._sizes = [size for _, size in self._columns.values()]
        self._head = struct.Struct(f"<{self._sizes.count(0)}I")
        self._plan = [
            (name, list(self._columns).index(name), self._make_value(name)) for name in self.fields
        ]

    def __repr__(self) -> str:
        return f"MdsDataset({len(self)} samples of {', '.join(self.fields)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_head": None, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _decode(self, item: memoryview) -> dict[str, Any]:
        stored = iter(self._head.unpack_from(item))
        place, spans = self._head.size, []
        for size in self._sizes:
            end = place + (size or next(stored))
            spans.append(item[place:end])
            place = end
        if place != len(item):
            raise ValueError(f"its fields have {place} bytes, and the sample {len(item)}")
        return {name: value(spans[number]) for name, number, value in self._plan}

    def _make_value(self, name: str) -> Decoder:
        """Return a function from the bytes of a field to its value, after the transform."""
        encoding = self._columns[name][0]
        decoder = make_decoder(encoding, self._decode_images)
        transform = self._transforms.get(name)
        if transform is None:
            return decoder
        if encoding in ("jpeg", "png") and self._decode_images:
            return lambda data: open_image(bytes(data), transform)
        return lambda data: transform(decoder(data))


def open_mds(paths: Sequence[str], options: ReadOptions) -> MdsDataset:
    """Open a folder that ``streaming.MDSWriter`` wrote. Called by :func:`penstock.open_dataset`.

    Raises:
        BadStore: The folder is incomplete, its shards differ in their fields, are compressed or
            are not MDS, or a field is pickled and ``allow_pickle`` is False.
    """
    folder = paths[0]
    shards = read_index(folder, "shards")["shards"]
    known: dict[str, tuple[str, int]] | None = None
    chunks = []
    for shard in shards:
        chunk, found = _read_shard(folder, shard)
        if known is not None and found != known:
            raise BadStore(
                f"the schema changes between shards: {chunk.path} has {_describe(found)}, the "
                f"first shard {_describe(known)}",
                remedy="write the set again with one set of columns, or open it as several sets",
                path=folder,
            )
        known = found
        chunks.append(chunk)
    if known is None:
        raise BadStore(f"{folder} has no shards", path=folder)
    fields = options.choose(list(known), folder)
    for name in fields:
        encoding = known[name][0]
        if encoding == "pkl" and not options.allow_pickle:
            raise refuse_pickle(name, folder)
        make_decoder(encoding, options.decode, where=f"field {name!r} of {folder}")
    return MdsDataset(chunks, known, fields, options)


def _read_shard(folder: str, shard: Any) -> tuple[Chunk, dict[str, tuple[str, int]]]:
    """Return a shard of the index, and the encoding and fixed size (or 0) of its columns."""
    try:
        kind, version, raw = shard["format"], shard["version"], shard["raw_data"]
        path = os.path.join(folder, raw["basename"])
        chunk = Chunk(path, int(shard["samples"]), int(raw["bytes"]))
        if kind == "mds":
            names = shard["column_names"]
            pairs = zip(shard["column_encodings"], shard["column_sizes"], strict=True)
            columns = {
                name: (encoding, int(size or 0))
                for name, (encoding, size) in zip(names, pairs, strict=True)
            }
    except (KeyError, TypeError, ValueError) as error:
        raise BadStore(f"index.json of {folder} is invalid: {error!r}", path=folder) from None
    if kind != "mds" or version != 2:
        raise BadStore(
            f"{path} has the format {kind!r}, version {version}; only MDS version 2 is read",
            remedy="streaming.MDSWriter",
            path=folder,
        )
    zipped = shard.get("zip_data")
    if zipped and not os.path.exists(path):
        name = os.path.join(folder, zipped["basename"])
        raise BadStore(
            f"{name} is compressed ({shard.get('compression')}), so its samples have no offsets",
            likely="the set was written with MDSWriter(compression=...).",
            remedy=f"decompress each shard beside it, such as zstd -d {name} -o {path}",
            path=folder,
        )
    return chunk, columns


def _describe(columns: Mapping[str, tuple[str, int]]) -> str:
    return ", ".join(f"{name}: {encoding}" for name, (encoding, _) in columns.items())


# -- encodings -------------------------------------------------------------------------------------


def make_decoder(encoding: str, decode_images: bool, where: str = "the set") -> Decoder:
    """Return a function from the bytes of a field to its value.

    Raises:
        BadStore: The encoding is not known.

    Example:
        >>> make_decoder("int", True)(memoryview(bytes([7, 0, 0, 0, 0, 0, 0, 0])))
        7
    """
    if encoding in _IMAGES:
        return image_decoder(encoding) if decode_images else bytes
    if encoding in ("jpeg_array", "jpegarray"):
        return _ImageList("jpeg", 0, decode_images)
    if encoding.startswith("list[") and encoding[5:-1] in _IMAGES:
        return _ImageList(encoding[5:-1], 4, decode_images)
    if encoding in _SCALARS:
        return _Scalar(encoding)
    if encoding == "ndarray" or encoding.startswith("ndarray:"):
        return _Array(encoding)
    if encoding in _PLAIN:
        return _PLAIN[encoding]
    raise BadStore(
        f"{where} has the encoding {encoding!r}, which is not known",
        likely="it was written by a newer version of streaming, or with an encoding of your own.",
        remedy="columns=[...] without this field",
    )


def image_decoder(kind: str) -> Decoder:
    """Return a function from the bytes of an image to a tensor."""
    return decode_raw_image if kind == "pil" else _decode_file


def _decode_file(data: memoryview) -> Any:
    return open_image(bytes(data), None)


def _text(data: memoryview) -> str:
    return bytes(data).decode("utf-8")


def _unpickle(data: memoryview) -> Any:
    import pickle

    return pickle.loads(data)


def _json(data: memoryview) -> Any:
    return json.loads(bytes(data))


def _int(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


_PLAIN: dict[str, Decoder] = {
    "bytes": bytes,
    "str": _text,
    "int": _int,
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
    "json": _json,
    "pkl": _unpickle,
}


class _Scalar:
    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __call__(self, data: memoryview) -> Any:
        (value,) = np.frombuffer(data, self._dtype)
        return value


class _Array:
    """Arrays. What the encoding does not fix (``ndarray:float32:3,4``) precedes the numbers."""

    def __init__(self, encoding: str) -> None:
        parts = encoding.split(":")[1:]
        self._dtype = np.dtype(parts[0]).newbyteorder("<") if parts else None
        self._shape = tuple(map(int, parts[1].split(","))) if len(parts) > 1 else None

    def __call__(self, data: memoryview) -> np.ndarray:
        place, dtype, shape = 0, self._dtype, self._shape
        if dtype is None:
            dtype, place = np.dtype(_DTYPE_CODES[data[0]]).newbyteorder("<"), 1
        if shape is None:
            num_dims, width = data[place] >> 2, 1 << (data[place] & 3)
            end = place + 1 + num_dims * width
            shape = tuple(np.frombuffer(data[place + 1 : end], f"<u{width}").tolist())
            place = end
        return np.array(np.frombuffer(data, dtype, offset=place).reshape(shape))


class _ImageList:
    """Lists of images: unused bytes, a count, the size of each, and the images."""

    def __init__(self, kind: str, num_unused: int, decode_images: bool) -> None:
        self._first = num_unused
        self._decode = image_decoder(kind) if decode_images else bytes

    def __call__(self, data: memoryview) -> list[Any]:
        return [self._decode(one) for one in split_list(data, self._first)]


def split_list(data: memoryview, first: int) -> list[memoryview]:
    """Return the parts of a list: a count, the size of each part, and the parts.

    Example:
        >>> data = np.array([2, 1, 3], "<u4").tobytes() + b"abcd"
        >>> [bytes(part) for part in split_list(memoryview(data), 0)]
        [b'a', b'bcd']
    """
    (count,) = np.frombuffer(data[first : first + 4], "<u4").tolist()
    place = first + 4 + 4 * count
    sizes = np.frombuffer(data[first + 4 : place], "<u4").tolist()
    if len(sizes) != count or place + sum(sizes) != len(data):
        raise ValueError("the sizes in a list do not match its bytes")
    parts = []
    for size in sizes:
        parts.append(data[place : place + size])
        place += size
    return parts
