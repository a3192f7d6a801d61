"""Cases of sources.py for tables and chunks: Parquet, Arrow, HF datasets, MDS, LitData and Lance.

Parquet and Arrow have no loader of their own. They are compared with pyarrow in PyTorch's loader: a
stream of row groups (Parquet), or a batch at a time from a memory map (Arrow).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock
from measure import Case, Pace, Target
from packed_peers import TORCH, Maker, as_it_is, make_litdata, make_mosaic, without_our_datasets
from source_cases import BATCH_SIZE, compare_readers, make_folder, make_images

ROWS_OF_A_BLOCK = 1000


class PyarrowRows:
    """A memory-mapped pyarrow table as a dataset, a batch at a time: the fastest by hand."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.table: Any = None

    def __len__(self) -> int:
        return int(self.read().num_rows)

    def read(self) -> Any:
        if self.table is None:
            pyarrow = importlib.import_module("pyarrow")
            self.table = pyarrow.ipc.open_file(pyarrow.memory_map(self.path)).read_all()
        return self.table

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return as_images(self.read().take(indices))


def as_images(table: Any) -> torch.Tensor:
    """Return the images of a table without a copy of each."""
    flat = table["x"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.reshape(-1, 3, 64, 64))


class ParquetStream(torch.utils.data.IterableDataset[Any]):
    """Row groups of a Parquet file in random order, each shuffled, shared out to workers."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Any:
        file = importlib.import_module("pyarrow.parquet").ParquetFile(self.path)
        worker = torch.utils.data.get_worker_info()
        groups = np.random.permutation(file.num_row_groups)
        for group in groups[worker.id :: worker.num_workers] if worker else groups:
            column = file.read_row_group(int(group))["x"].combine_chunks()
            for row in np.random.permutation(len(column)):
                yield as_pixels(column[row].as_py())


def as_pixels(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8).reshape(3, 64, 64)


class LanceRows(PyarrowRows):
    """A Lance dataset, a batch at a time by ``take``."""

    def read(self) -> Any:
        if self.table is None:
            self.table = importlib.import_module("lance").dataset(self.path)
        return self.table

    def __len__(self) -> int:
        return int(self.read().count_rows())


def make_table(images: np.ndarray) -> Any:
    pyarrow = importlib.import_module("pyarrow")
    flat = pyarrow.array(images.reshape(-1))
    size = images[0].size
    return pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(flat, size)})


def by_torch(dataset: Any, num_workers: int) -> Maker:
    def make() -> Any:
        return TORCH(
            dataset,
            batch_size=BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            collate_fn=as_it_is,
            num_workers=num_workers,
        )

    return make


def parquet(pace: Pace) -> Case:
    """Pixels as bytes: numbers in lists take pyarrow 20 ns each to decode, which hides the rest."""
    path = make_folder() / "x.parquet"
    images = make_images(pace.num_images_in_memory)
    table = importlib.import_module("pyarrow").table({"x": [one.tobytes() for one in images]})
    importlib.import_module("pyarrow.parquet").write_table(
        table, path, row_group_size=ROWS_OF_A_BLOCK
    )

    def make(num_workers: int) -> Any:
        rows = ParquetStream(str(path))
        options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        return TORCH(rows, batch_size=BATCH_SIZE, drop_last=True, **options)

    theirs: dict[str, Maker] = {
        "pyarrow, stream of row groups, 2 workers": lambda: make(2),
        "pyarrow, stream of row groups, 0 workers": lambda: make(0),
    }
    data = penstock.open_dataset(path, transforms={"x": as_pixels})
    return compare_readers("parquet", "Parquet", data, theirs, pace, Target(bound=1))


def arrow(pace: Pace) -> Case:
    pyarrow = importlib.import_module("pyarrow")
    path = make_folder() / "x.arrow"
    table = make_table(make_images(pace.num_images_in_memory))
    with pyarrow.OSFile(str(path), "wb") as sink:
        writer = pyarrow.ipc.new_file(sink, table.schema)
        writer.write_table(table, max_chunksize=ROWS_OF_A_BLOCK)
        writer.close()
    theirs = {"pyarrow, memory map, 0 workers": by_torch(PyarrowRows(str(path)), 0)}
    data = penstock.open_dataset(path)
    return compare_readers("arrow", "Arrow", data, theirs, pace, Target(bound=0.97))


def hugging_face(pace: Pace) -> Case:
    with without_our_datasets():
        hf: Any = importlib.import_module("datasets")
    hf.disable_progress_bars()
    folder = make_folder()
    images = make_images(pace.num_images_in_memory)
    features = hf.Features({"x": hf.Array3D(images.shape[1:], "uint8")})
    made = hf.Dataset.from_generator(
        lambda: ({"x": image} for image in images), features=features, cache_dir=str(folder / "c")
    )
    made.save_to_disk(str(folder / "set"))

    def make(num_workers: int) -> Any:
        data = hf.load_from_disk(str(folder / "set")).with_format("torch")
        return TORCH(
            data,
            batch_size=BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    theirs: dict[str, Maker] = {
        "HF datasets, torch format, 2 workers": lambda: make(2),
        "HF datasets, torch format, 0 workers": lambda: make(0),
    }
    data = penstock.open_dataset(folder / "set")
    target = Target(bound=3, goal=5)
    return compare_readers("hf", "Hugging Face datasets", data, theirs, pace, target)


def mds(pace: Pace) -> Case:
    folder = make_folder() / "set"
    images = make_images(pace.num_images_in_memory)
    make_mosaic(folder, images, BATCH_SIZE)

    def make() -> Any:
        own: Any = importlib.import_module("streaming")
        rows = own.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)
        options = {"num_workers": 2, "persistent_workers": True, "drop_last": True}
        return own.StreamingDataLoader(rows, batch_size=BATCH_SIZE, **options)

    theirs: dict[str, Maker] = {"MosaicML Streaming, 2 workers": make}
    data = penstock.open_dataset(folder)
    return compare_readers("mds", "MosaicML MDS", data, theirs, pace, Target(bound=1))


def litdata(pace: Pace) -> Case:
    folder: Path = make_folder() / "set"
    images = make_images(pace.num_images_in_memory)
    make_litdata(folder, images, BATCH_SIZE)

    def make() -> Any:
        own: Any = importlib.import_module("litdata")
        rows = own.StreamingDataset(str(folder), shuffle=True, drop_last=True)
        # Without persistent workers, which made it 30 times slower here.
        return own.StreamingDataLoader(rows, batch_size=BATCH_SIZE, num_workers=2, drop_last=True)

    theirs: dict[str, Maker] = {"LitData, 2 workers": make}
    data = penstock.open_dataset(folder)
    return compare_readers("litdata", "LitData", data, theirs, pace, Target(bound=1))


def lance(pace: Pace) -> Case:
    library: Any = importlib.import_module("lance")
    path = str(make_folder() / "set.lance")
    table = make_table(make_images(pace.num_images_in_memory))
    library.write_dataset(table, path, max_rows_per_file=4 * ROWS_OF_A_BLOCK)

    def stream() -> Any:
        own: Any = importlib.import_module("lance.torch.data")
        return TORCH(own.LanceDataset(path, batch_size=BATCH_SIZE), batch_size=None)

    theirs: dict[str, Maker] = {
        "Lance, its own stream, not shuffled": stream,
        "Lance, take by hand, 0 workers": by_torch(LanceRows(path), 0),
    }
    data = penstock.open_dataset(path)
    return compare_readers("lance", "Lance", data, theirs, pace, Target(bound=0.97))


SECTIONS: dict[str, tuple[str, Callable[[Pace], Case]]] = {
    "parquet": ("pyarrow", parquet),
    "arrow": ("pyarrow", arrow),
    "hf": ("datasets", hugging_face),
    "mds": ("streaming", mds),
    "litdata": ("litdata", litdata),
    "lance": ("lance", lance),
}
"""The library of each format, and its case."""


def is_installed(library: str) -> bool:
    with without_our_datasets():  # a file of this folder is also called datasets
        return importlib.util.find_spec(library) is not None


CASES = {name: case for name, (library, case) in SECTIONS.items() if is_installed(library)}
