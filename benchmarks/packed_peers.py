"""The same samples in other formats, each used as its authors recommend, if installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

TORCH: Any = torch.utils.data.DataLoader
Maker = Callable[[], Any]


class MemmapRows:
    """np.memmap with PyTorch's loader, a batch at a time: the fastest handwritten dataset."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: Any = None

    def __len__(self) -> int:
        return len(np.load(self.path, mmap_mode="r"))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(np.take(self.rows, indices, axis=0, mode="clip"))


def as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def without_our_datasets() -> Any:
    """Import Hugging Face's package, whose name is also the name of a file in this folder."""
    here = str(Path(__file__).parent)
    before = list(sys.path)
    sys.path[:] = [path for path in sys.path if path not in ("", here)]
    try:
        yield
    finally:
        sys.path[:] = before


def make_litdata(folder: Path, images: np.ndarray, batch_size: int) -> Maker:
    writer = importlib.import_module("litdata.streaming.writer")
    lit: Any = importlib.import_module("litdata")
    chunks = writer.BinaryWriter(str(folder), chunk_bytes="64MB")
    for index, image in enumerate(images):
        chunks[index] = image
    chunks.done()
    chunks.merge()

    def make() -> Any:
        data = lit.StreamingDataset(str(folder), shuffle=True)
        return lit.StreamingDataLoader(data, batch_size=batch_size, num_workers=2)

    return make


def make_mosaic(folder: Path, images: np.ndarray, batch_size: int) -> Maker:
    streaming: Any = importlib.import_module("streaming")
    columns = {"x": f"ndarray:uint8:{','.join(map(str, images.shape[1:]))}"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for image in images:
            writer.write({"x": image})

    def make() -> Any:
        data = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=batch_size)
        return TORCH(data, batch_size=batch_size, num_workers=2)

    return make


def make_webdataset(folder: Path, images: np.ndarray, batch_size: int) -> Maker:
    wds: Any = importlib.import_module("webdataset")
    folder.mkdir()
    pattern = str(folder / "shard-%04d.tar")
    with wds.ShardWriter(pattern, maxcount=2500, verbose=0) as writer:
        for index, image in enumerate(images):
            writer.write({"__key__": f"{index:08d}", "x.npy": image})
    shards = sorted(map(str, folder.glob("*.tar")))

    def make() -> Any:
        data = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(2000).decode()
        return wds.WebLoader(data.to_tuple("x.npy"), batch_size=batch_size, num_workers=2)

    return make


def make_hugging_face(folder: Path, images: np.ndarray, batch_size: int) -> Maker:
    with without_our_datasets():
        hf: Any = importlib.import_module("datasets")
    hf.disable_progress_bars()
    features = hf.Features({"x": hf.Array3D(images.shape[1:], "uint8")})
    made = hf.Dataset.from_generator(
        lambda: ({"x": image} for image in images), features=features, cache_dir=str(folder)
    ).with_format("torch")
    return lambda: TORCH(made, batch_size=batch_size, shuffle=True, num_workers=2)


PEERS: dict[str, Callable[[Path, np.ndarray, int], Maker]] = {
    "LitData, 2 workers": make_litdata,
    "MosaicML Streaming, 2 workers": make_mosaic,
    "WebDataset, 2 workers": make_webdataset,
    "HF datasets, 2 workers": make_hugging_face,
}


def find_peers(folder: Path, images: np.ndarray, batch_size: int) -> dict[str, Maker]:
    """Return the formats that are installed and deliver a batch. Prints why others are missing."""
    found = {}
    for number, (name, prepare) in enumerate(PEERS.items()):
        try:
            make = prepare(folder / f"peer-{number}", images, batch_size)
            next(iter(make()))
            found[name] = make
        except Exception as error:  # not installed, or fails on this machine
            print(f"without {name}: {type(error).__name__}: {str(error)[:100]}")
    return found
