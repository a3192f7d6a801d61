"""Cases of sources.py: one for each format, and the index of a large archive.

A case of a format writes 3x64x64 samples with the original's writer. The originals read them as
their authors recommend, with 2 workers and shuffled.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from measure import Case, Contender, Pace, Target
from packed_peers import Maker, make_webdataset
from penstock.cli.loader_timing import time_loader

BATCH_SIZE = 256
NUM_MEMBERS = 1_000_000


def make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_images(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 64, 64), dtype=np.uint8)


def rate_of(make: Maker, pace: Pace) -> Callable[[], float]:
    """Return a measurement of a loader in samples a second."""

    def turn() -> float:
        timing = time_loader(make, warm_up_s=pace.warm_up_s, window_s=pace.window_s)
        return timing.batches_per_s * BATCH_SIZE

    return turn


def ours(dataset: Any, num_workers: int) -> Maker:
    """Return a loader over our reader, shuffled in blocks."""
    return lambda: penstock.DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        sampler=dataset.block_order(seed=1),
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def compare_readers(
    key: str, title: str, dataset: Any, theirs: dict[str, Maker], pace: Pace, target: Target
) -> Case:
    """Return the case of one format. The target is for 2 workers against the original's best."""
    return Case(
        key=key,
        title=f"{title}: {pace.num_images_in_memory:,} x 3x64x64 uint8, shuffled, 2 workers",
        unit="samples/s",
        contenders=[
            Contender(
                name="Penstock, 2 workers",
                turn=rate_of(ours(dataset, 2), pace),
                against=tuple(theirs),
                target=target,
            ),
            Contender(name="Penstock, 0 workers", turn=rate_of(ours(dataset, 0), pace)),
            *(Contender(name=name, turn=rate_of(make, pace)) for name, make in theirs.items()),
        ],
    )


# WebDataset


def read_npy(sample: dict[str, bytes]) -> tuple[np.ndarray]:
    """Decode an array like NumPy, without its checks and without a copy."""
    content = sample["x.npy"]
    length = int.from_bytes(content[8:10], "little")
    header: dict[str, Any] = eval(content[10 : 10 + length].decode("latin-1"), {})
    return (np.frombuffer(content, header["descr"], offset=10 + length).reshape(header["shape"]),)


def make_tuned_webdataset(folder: Path) -> Maker:
    """Batches are made in the workers, and arrays are decoded by hand."""
    wds: Any = importlib.import_module("webdataset")
    shards = sorted(map(str, folder.glob("*.tar")))

    def make() -> Any:
        data = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(2000).map(read_npy)
        data = data.batched(BATCH_SIZE, partial=False)
        return wds.WebLoader(data, batch_size=None, num_workers=2, persistent_workers=True)

    return make


def tar(pace: Pace) -> Case:
    folder = make_folder() / "tar"
    images = make_images(pace.num_images_in_memory)
    theirs = {
        "WebDataset, decode()": make_webdataset(folder, images, BATCH_SIZE),
        "WebDataset, decoded by hand": make_tuned_webdataset(folder),
    }
    dataset = penstock.open_dataset(folder, columns=["x.npy"])
    return compare_readers("tar", "WebDataset", dataset, theirs, pace, Target(bound=3, goal=5))


def index(pace: Pace) -> Case:
    """An archive of a million files of 3,000 bytes and 1 byte."""
    folder = make_folder()
    is_quick = pace.num_images_in_memory < 10_000
    path = write_large(folder / "large.tar", NUM_MEMBERS // (20 if is_quick else 1))
    penstock.open_dataset(path)
    shown = os.path.getsize(f"{path}.penstock-index") / 1e6
    count = NUM_MEMBERS // (20 if is_quick else 1)
    return Case(
        key="index",
        title=f"An archive of {count:,} files (index: {shown:.1f} MB)",
        unit="s",
        contenders=[
            Contender(
                name="open_dataset without an index",
                turn=partial(time_opening, path, has_index=False),
                against=("tarfile, list of files",),
                target=Target(bound=0.5, is_ceiling=True),
            ),
            Contender(
                name="open_dataset with an index", turn=partial(time_opening, path, has_index=True)
            ),
            Contender(name="tarfile, list of files", turn=partial(time_tarfile, path)),
        ],
    )


def write_large(path: Path, num_members: int) -> Path:
    with open(path, "wb", 1 << 20) as file:
        for number in range(num_members // 2):
            for ending, size in (("jpg", 3000), ("cls", 1)):
                info = tarfile.TarInfo(f"train/{number:09d}.{ending}")
                info.size = size
                file.write(info.tobuf(tarfile.USTAR_FORMAT) + bytes(-(-size // 512) * 512))
        file.write(bytes(1024))
    return path


def time_opening(path: Path, *, has_index: bool) -> float:
    if not has_index:
        os.unlink(f"{path}.penstock-index")
    start_s = time.perf_counter()
    penstock.open_dataset(path)
    return time.perf_counter() - start_s


def time_tarfile(path: Path) -> float:
    start_s = time.perf_counter()
    with tarfile.open(path) as archive:
        for _ in archive:
            archive.members = []  # type: ignore[attr-defined]
    return time.perf_counter() - start_s


SECTIONS: dict[str, tuple[str, Callable[[Pace], Case]]] = {"tar": ("webdataset", tar)}
"""The library of each format, and its case."""

CASES: dict[str, Callable[[Pace], Case]] = {
    **{
        name: case
        for name, (library, case) in SECTIONS.items()
        if importlib.util.find_spec(library)
    },
    "index": index,
}
