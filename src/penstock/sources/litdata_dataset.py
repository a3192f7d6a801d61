"""LitData: a folder of chunks with an ``index.json``. A chunk is a block.

Three kinds of chunks are read:

    items     sizes of the leaves of a sample (uint32), and their bytes, as its serializers wrote it
    tokens    one sequence of numbers for the whole chunk; a sample is ``block_size`` of them
    rows      samples of text and numbers, kept as an Arrow file at the end of the chunk (pyarrow)

The index says which serializer wrote each leaf, and how leaves form a sample. Values have the types
that ``litdata`` returns.
"""

from __future__ import annotations

import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import BadArgument, BadStore
from penstock.images.crops import open_image
from penstock.options import check_count
from penstock.sources.arrow_columns import as_tensor
from penstock.sources.blocks import ReadOptions
from penstock.sources.chunk_reader import Chunk, ChunkReader, read_index, refuse_pickle
from penstock.sources.litdata_leaves import is_encoded_image, make_decoder, token_dtype
from penstock.sources.parquet_dataset import import_pyarrow

Builder = Callable[[list[memoryview]], Any]
_FOOTER = b"LDARW01\0"
_CONTAINERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "builtins.dict": lambda keys, values: dict(zip(keys, values, strict=True)),
    "collections.OrderedDict": lambda keys, values: OrderedDict(zip(keys, values, strict=True)),
    "builtins.list": lambda _, values: values,
    "builtins.tuple": lambda _, values: tuple(values),
}


class LitDataDataset(ChunkReader):
    """Samples of a LitData set. See :func:`penstock.open_dataset`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        formats: Sequence[str],
        tree: Any,
        fields: Sequence[str] | None,
        options: ReadOptions,
    ) -> None:
        super().__init__(chunks, fields or (), transforms=options.transforms)
        self.fields = None if fields is None else tuple(fields)
        """The names of the fields, if samples are dicts."""
        self._formats = list(formats)
        self._tree = tree
        self._decode_images = options.decode
        self._sizes = struct.Struct(f"<{len(self._formats)}I")
        self._build: Builder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_build": None, "_sizes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sizes = struct.Struct(f"<{len(self._formats)}I")

    def _read_block(self, block: int) -> Any:
        chunk = self._chunks[block]
        end = self._files.read(block, max(0, chunk.num_bytes - 12), min(12, chunk.num_bytes))
        if end[4:] != _FOOTER:
            return super()._read_block(block)
        num_bytes = int.from_bytes(end[:4], "little")
        start = chunk.num_bytes - 12 - num_bytes
        if start < 0:
            raise self._damaged(block, "its Arrow table is longer than the file")
        return _ArrowRows(self, block, start, num_bytes)

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        content = self._block(block)
        if not isinstance(content, _ArrowRows):
            return super()._take(block, rows)
        self._files.check(block)  # reading from the map of a truncated file ends the process
        samples = [content.row(row, self.fields) for row in rows]
        self._files.check(block)
        for name, transform in self._transforms.items():
            for sample in samples:
                sample[name] = transform(sample[name])
        return samples

    def _decode(self, item: memoryview) -> Any:
        if self._build is None:
            self._build = self._make_builder()
        sizes = self._sizes.unpack_from(item)
        place = self._sizes.size
        leaves = []
        for size in sizes:
            leaves.append(item[place : place + size])
            place += size
        if place != len(item):
            raise ValueError("the sizes of its leaves do not match its bytes")
        return self._build(leaves)

    def _make_builder(self) -> Builder:
        """Return a function from the bytes of all leaves to the sample."""
        numbers = iter(range(len(self._formats)))
        if self.fields is None:
            return self._compile(self._tree, numbers)
        found = {}
        for name, child in zip(self._tree[1], self._tree[2], strict=True):
            mine = [next(numbers) for _ in range(_count_leaves(child))]
            if name in self.fields:
                found[name] = self._compile_field(name, child, mine)
        pairs = [(name, found[name]) for name in self.fields]
        return lambda leaves: {name: build(leaves) for name, build in pairs}

    def _compile_field(self, name: str, tree: Any, mine: list[int]) -> Builder:
        transform = self._transforms.get(name)
        if transform is None:
            return self._compile(tree, iter(mine))
        first = mine[0]
        if tree is None and is_encoded_image(self._formats[first]) and self._decode_images:
            return lambda leaves: open_image(bytes(leaves[first]), transform)
        build = self._compile(tree, iter(mine))
        return lambda leaves: transform(build(leaves))

    def _compile(self, tree: Any, numbers: Iterator[int]) -> Builder:
        if tree is None:
            number = next(numbers)
            decode = make_decoder(self._formats[number], self._decode_images)
            return lambda leaves: decode(leaves[number])
        kind, keys, children = tree
        parts = [self._compile(child, numbers) for child in children]
        join = _CONTAINERS[kind]
        return lambda leaves: join(keys, [part(leaves) for part in parts])


class _ArrowRows:
    """The rows of a chunk in an Arrow file at its end."""

    def __init__(self, dataset: LitDataDataset, block: int, start: int, num_bytes: int) -> None:
        pyarrow = import_pyarrow()
        chunk = dataset._chunks[block]
        try:
            source = pyarrow.memory_map(chunk.path)
            source.seek(start)
            table = pyarrow.ipc.open_file(source.read_buffer(num_bytes)).read_all()
            table.validate(full=True)
        except Exception as error:
            raise dataset._damaged(block, f"its Arrow table: {error}") from None
        if table.num_rows != chunk.num_samples:
            raise dataset._damaged(block, f"its Arrow table has {table.num_rows} rows")
        self._columns = dict(zip(table.column_names, table.columns, strict=True))
        self.nbytes = 4096  # the columns are views of the file

    def row(self, row: int, fields: Sequence[str] | None) -> dict[str, Any]:
        return {name: self._columns[name][row].as_py() for name in fields or self._columns}


class LitDataTokens(ChunkReader):
    """Sequences of ``block_size`` tokens. See :func:`penstock.open_dataset`."""

    def __init__(
        self, chunks: Sequence[Chunk], heads: Sequence[int], form: str, block_size: int
    ) -> None:
        super().__init__(chunks, ())
        self._heads = list(heads)
        self._form = form
        self._block_size = block_size

    def _read_block(self, block: int) -> np.ndarray:
        width = self._block_size * token_dtype(self._form).itemsize
        return self._heads[block] + width * np.arange(self._chunks[block].num_samples + 1)

    def _decode(self, item: memoryview) -> Any:
        values = np.frombuffer(item, token_dtype(self._form)).copy()
        return as_tensor(values) if self._form.startswith("no_header_tensor") else values


def open_litdata(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    block_size: int | None = None,
) -> LitDataDataset | LitDataTokens:
    """Open a folder that ``litdata.optimize`` wrote. Called by :func:`penstock.open_dataset`.

    Args:
        block_size: Number of tokens of a sample, for a set that was written with TokensLoader.

    Raises:
        BadStore: The folder is incomplete, compressed or encrypted, has a leaf that cannot be read,
            or a pickled one and ``allow_pickle`` is False.
    """
    folder = paths[0]
    index = read_index(folder, "chunks")
    config, chunks = index.get("config"), index["chunks"]
    if not isinstance(config, dict) or not isinstance(config.get("data_format"), list):
        raise BadStore(f"index.json of {folder} has no data_format", path=folder)
    _check_config(config, folder)
    formats: list[str] = config["data_format"]
    if config.get("item_loader") == "TokensLoader":
        return _open_tokens(folder, chunks, formats, block_size)
    if block_size is not None:
        raise BadArgument(f"block_size= is for sets of tokens, and {folder} has samples")
    tree = _read_tree(config.get("data_spec"), folder)
    fields = _choose_fields(tree, options, folder)
    for number, name in enumerate(_leaf_names(tree)):
        if fields is not None and name not in fields:
            continue
        if formats[number].partition(":")[0] == "pickle" and not options.allow_pickle:
            raise refuse_pickle(name, folder)
        make_decoder(formats[number], options.decode, where=f"field {name!r} of {folder}")
    found = [_read_chunk(folder, chunk) for chunk in chunks]
    return LitDataDataset(found, formats, tree, fields, options)


def _check_config(config: Mapping[str, Any], folder: str) -> None:
    loader = config.get("item_loader") or "PyTreeLoader"
    remedy = "litdata.optimize(..., compression=None)"
    why = None
    if config.get("compression") or config.get("ipc_compression"):
        why = f"compressed ({config.get('compression') or config.get('ipc_compression')})"
    elif config.get("encryption"):
        why, remedy = "encrypted", "litdata.optimize(...) without encryption"
    elif loader not in ("PyTreeLoader", "TokensLoader"):
        why, remedy = f"for {loader}", "open the Parquet files themselves, or use litdata"
    if why is not None:
        raise BadStore(
            f"the chunks of {folder} are {why}, so their samples cannot be read by offset",
            remedy=remedy,
            path=folder,
        )


def _read_chunk(folder: str, chunk: Any) -> Chunk:
    try:
        path = os.path.join(folder, chunk["filename"])
        found = Chunk(path, int(chunk["chunk_size"]), int(chunk["chunk_bytes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadStore(f"index.json of {folder} is invalid: {error!r}", path=folder) from None
    # Old versions do not count the table of offsets.
    without_table = found.num_bytes + 4 * (found.num_samples + 2)
    is_old = os.path.exists(path) and os.path.getsize(path) == without_table
    return found._replace(num_bytes=without_table) if is_old else found


def _open_tokens(
    folder: str, chunks: list[Any], formats: list[str], block_size: int | None
) -> LitDataTokens:
    if block_size is None:
        raise BadArgument(
            f"{folder} has tokens, so the length of a sample must be given",
            remedy="open_dataset(path, block_size=2048)",
        )
    block_size = check_count("block_size", block_size, 1)
    dtype = token_dtype(formats[0])
    found, heads = [], []
    for entry in chunks:
        chunk = _read_chunk(folder, entry)
        num_items, num_samples = chunk.num_samples, int(entry.get("dim") or 0) // block_size
        head = 4 * (num_items + 2)
        if head + num_samples * block_size * dtype.itemsize > chunk.num_bytes:
            raise BadStore(f"{chunk.path} is too short for {entry.get('dim')} tokens", path=folder)
        if num_samples:
            found.append(chunk._replace(num_samples=num_samples))
            heads.append(head)
    return LitDataTokens(found, heads, formats[0], block_size)


# -- form of a sample ------------------------------------------------------------------------------


def _read_tree(text: Any, folder: str) -> Any:
    """Return the form of a sample: None for a leaf, or (type, keys, children)."""
    try:
        protocol, spec = json.loads(text)
        if protocol != 1:
            raise ValueError(f"protocol {protocol}")
        return _parse_tree(spec)
    except (KeyError, TypeError, ValueError) as error:
        raise BadStore(
            f"the form of the samples of {folder} cannot be read: {error}",
            likely="samples contain a class of your own, or were written by a newer version.",
            path=folder,
        ) from None


def _parse_tree(spec: Any) -> Any:
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return None
    if kind not in _CONTAINERS:
        raise ValueError(f"{kind} is not supported")
    keys = json.loads(spec["context"]) if kind.endswith("ict") else None
    return kind, keys, [_parse_tree(child) for child in children]


def _count_leaves(tree: Any) -> int:
    return 1 if tree is None else sum(map(_count_leaves, tree[2]))


def _leaf_names(tree: Any) -> list[str]:
    """Return the top-level name of each leaf."""
    if tree is None:
        return ["value"]
    _, keys, children = tree
    names = keys if keys is not None else [str(number) for number in range(len(children))]
    pairs = zip(names, children, strict=True)
    return [str(name) for name, child in pairs for _ in range(_count_leaves(child))]


def _choose_fields(tree: Any, options: ReadOptions, folder: str) -> list[str] | None:
    """Return the fields to load if samples are dicts, otherwise None."""
    is_dict = tree is not None and tree[1] is not None and tree[0] == "builtins.dict"
    if not is_dict:
        if options.columns is not None:
            raise BadArgument(f"the samples of {folder} are not dicts, so they have no columns")
        return None
    return options.choose(tree[1], folder)
