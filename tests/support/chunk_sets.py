"""MDS and LitData sets written by hand, from the descriptions of the formats."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import numpy as np


def make_chunk(items: list[bytes], extra: bytes = b"") -> bytes:
    """Return a chunk: the count, the offsets, ``extra`` bytes, and the items."""
    start = 4 * (len(items) + 2) + len(extra)
    offsets = np.cumsum([start, *map(len, items)]).astype("<u4")
    return struct.pack("<I", len(items)) + offsets.tobytes() + extra + b"".join(items)


def write_mds(
    folder: str, columns: dict[str, tuple[str, int | None]], shards: list[list[dict[str, bytes]]]
) -> None:
    """Write an MDS set. Columns have an encoding, and a fixed size or None. Values are bytes."""
    os.makedirs(folder)
    entries = []
    for number, samples in enumerate(shards):
        items = []
        for sample in samples:
            values = [sample[name] for name in columns]
            sizes = [
                len(value)
                for value, (_, size) in zip(values, columns.values(), strict=True)
                if size is None
            ]
            items.append(np.array(sizes, "<u4").tobytes() + b"".join(values))
        data = make_chunk(items, extra=b'{"version": 2}')
        name = f"shard.{number:05}.mds"
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
        entries.append(
            {
                "version": 2,
                "format": "mds",
                "compression": None,
                "hashes": [],
                "samples": len(samples),
                "column_names": list(columns),
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "zip_data": None,
            }
        )
    write_json(folder, {"version": 2, "shards": entries})


def write_litdata(
    folder: str, formats: list[str], spec: Any, chunks: list[list[list[bytes]]], **config: Any
) -> None:
    """Write a LitData set. A sample is the list of the bytes of its leaves."""
    os.makedirs(folder)
    entries = []
    for number, samples in enumerate(chunks):
        items = [
            np.array([len(leaf) for leaf in leaves], "<u4").tobytes() + b"".join(leaves)
            for leaves in samples
        ]
        data, name = make_chunk(items), f"chunk-0-{number}.bin"
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
        entry = {"chunk_bytes": len(data), "chunk_size": len(items), "dim": None, "filename": name}
        entries.append(entry)
    known = {
        "compression": None,
        "encryption": None,
        "data_format": formats,
        "data_spec": json.dumps([1, spec]),
        "item_loader": "PyTreeLoader",
    }
    write_json(folder, {"chunks": entries, "config": {**known, **config}})


def dict_spec(*names: str) -> dict[str, Any]:
    """Return the form of a dict of leaves."""
    leaf = {"type": None, "context": None, "children_spec": []}
    return {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf for _ in names],
    }


def write_json(folder: str, content: Any) -> None:
    """Write the ``index.json`` of a folder."""
    with open(os.path.join(folder, "index.json"), "w", encoding="utf-8") as file:
        json.dump(content, file)


def read_json(folder: str) -> Any:
    with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
        return json.load(file)
