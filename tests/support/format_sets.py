"""Small sets in other people's formats, written by the libraries of the formats, and their readers.

Every set has ``NUM_SAMPLES`` samples with an ``id``, a ``text`` and a 2 x 3 array ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

NUM_SAMPLES = 230
CHUNK = 40


def text_of(number: int) -> str:
    return f"sample {number}"


def array_of(number: int) -> Any:
    return np.arange(6, dtype=np.int32).reshape(2, 3) * number


def make_table() -> Any:
    pa = pytest.importorskip("pyarrow")
    numbers = range(NUM_SAMPLES)
    x = pa.array([array_of(n).tolist() for n in numbers], pa.list_(pa.list_(pa.int32(), 3), 2))
    return pa.table({"id": list(numbers), "text": [text_of(n) for n in numbers], "x": x})


def write_parquet(folder: Any) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = make_table()
    for first in range(0, NUM_SAMPLES, 100):
        part = table.slice(first, 100)
        pq.write_table(part, folder / f"{first:03}.parquet", row_group_size=CHUNK)


def read_parquet(folder: Any) -> Any:
    return pytest.importorskip("pyarrow.parquet").read_table(folder).to_pylist()


def write_arrow(folder: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    table = make_table()
    path, schema = str(folder / "a.arrow"), table.schema
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table, max_chunksize=CHUNK)


def read_arrow(folder: Any) -> Any:
    pa = pytest.importorskip("pyarrow")
    with pa.memory_map(str(folder / "a.arrow")) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()


def write_hugging_face(folder: Any) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "text": datasets.Value("string"),
            "x": datasets.Array2D((2, 3), "int32"),
        }
    )
    samples = {
        "id": list(range(NUM_SAMPLES)),
        "text": [text_of(n) for n in range(NUM_SAMPLES)],
        "x": [array_of(n) for n in range(NUM_SAMPLES)],
    }
    made = datasets.Dataset.from_dict(samples, features=features)
    made.save_to_disk(str(folder / "set"), num_shards=3)


def read_hugging_face(folder: Any) -> Any:
    return pytest.importorskip("datasets").load_from_disk(str(folder / "set"))


def write_mds(folder: Any) -> None:
    streaming = pytest.importorskip("streaming")
    columns = {"id": "int", "text": "str", "x": "ndarray:int32"}
    path = str(folder / "set")
    with streaming.MDSWriter(out=path, columns=columns, size_limit=60 * CHUNK) as writer:
        for n in range(NUM_SAMPLES):
            writer.write({"id": n, "text": text_of(n), "x": array_of(n)})


def read_mds(folder: Any) -> Any:
    """Return the samples by the reader of single shards, which needs no shared memory."""
    import json

    from streaming.base.format import reader_from_json

    path = folder / "set"
    index = json.loads((path / "index.json").read_text(encoding="utf-8"))
    shards = [reader_from_json(str(path), "", shard) for shard in index["shards"]]
    return [shard[n] for shard in shards for n in range(len(shard))]


def write_litdata(folder: Any) -> None:
    pytest.importorskip("litdata")
    from litdata.streaming import Cache

    path = folder / "set"
    path.mkdir()
    cache = Cache(str(path), chunk_size=CHUNK)
    for n in range(NUM_SAMPLES):
        cache[n] = {"id": n, "text": text_of(n), "x": array_of(n)}
    cache.done()
    cache.merge()


def read_litdata(folder: Any) -> Any:
    from litdata import StreamingDataset

    found = StreamingDataset(str(folder / "set"))
    return [found[n] for n in range(len(found))]


def write_lance(folder: Any) -> None:
    lance = pytest.importorskip("lance")
    lance.write_dataset(make_table(), str(folder / "set.lance"), max_rows_per_file=CHUNK)


def read_lance(folder: Any) -> Any:
    lance = pytest.importorskip("lance")
    return lance.dataset(str(folder / "set.lance")).to_table().to_pylist()


class FormatCase(NamedTuple):
    """A format: its library, its writer and reader, and the path below the folder."""

    library: str
    write: Callable[[Any], None]
    read: Callable[[Any], Any]
    path: str = "set"


FORMAT_CASES = {
    "parquet": FormatCase("pyarrow", write_parquet, read_parquet, "."),
    "arrow": FormatCase("pyarrow", write_arrow, read_arrow, "a.arrow"),
    "hf": FormatCase("datasets", write_hugging_face, read_hugging_face),
    "mds": FormatCase("streaming", write_mds, read_mds),
    "litdata": FormatCase("litdata", write_litdata, read_litdata),
    "lance": FormatCase("lance", write_lance, read_lance, "set.lance"),
}
