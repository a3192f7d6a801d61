"""Cases of store.py: shuffled rows from mapped files, small and large."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import penstock
from measure import Case, Contender, Pace, Target
from packed_peers import TORCH, Maker, MemmapRows, as_it_is, find_peers
from penstock.cli.loader_timing import time_loader

OURS: Any = penstock.DataLoader


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _images(count: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def _lap(make: Maker, pace: Pace, scale: float) -> Callable[[], float]:
    def turn() -> float:
        timing = time_loader(make, warm_up_s=pace.warm_up_s, window_s=pace.window_s)
        return timing.batches_per_s * scale

    return turn


def _take(path: Path, batch_size: int, pace: Pace) -> Callable[[], float]:
    """Measure the lower bound: one thread, a fixed buffer, precomputed indices."""
    rows = np.load(path, mmap_mode="r")
    out = np.empty((batch_size, *rows.shape[1:]), rows.dtype)

    def turn() -> float:
        order = np.random.default_rng(1).permutation(len(rows))
        batches = order[: len(rows) // batch_size * batch_size].reshape(-1, batch_size)
        for chosen in batches:  # map every page, as after a first epoch
            np.take(rows, chosen, axis=0, out=out, mode="clip")
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < pace.window_s:
            np.take(rows, batches[count % len(batches)], axis=0, out=out, mode="clip")
            count += 1
        return count * batch_size / (time.perf_counter() - start_s)

    return turn


def _copy(images: np.ndarray, batch_size: int, pace: Pace) -> Callable[[], float]:
    """Measure the copy bandwidth: contiguous batches, one thread."""
    out = np.empty_like(images[:batch_size])

    def turn() -> float:
        starts = range(0, len(images) - batch_size + 1, batch_size)
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < pace.window_s:
            first = starts[count % len(starts)]
            np.copyto(out, images[first : first + batch_size])
            count += 1
        return count * batch_size / (time.perf_counter() - start_s)

    return turn


def _pack(images: np.ndarray, folder: Path, name: str, **keywords: Any) -> Any:
    return penstock.pack(list(images), folder / name, workers=0, **keywords)


def _ours(packed: Any, batch_size: int, num_workers: int) -> Maker:
    return partial(
        OURS,
        packed,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def small(pace: Pace) -> Case:
    """(a) 3x64x64 uint8, shuffled, batches of 256."""
    batch_size, folder = 256, _folder()
    images = _images(pace.num_images_in_memory, (3, 64, 64))
    np.save(folder / "images.npy", images)
    rows = MemmapRows(str(folder / "images.npy"))
    keywords: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
    many = {**keywords, "num_workers": 2, "persistent_workers": True, "collate_fn": as_it_is}
    tensors = TensorDataset(torch.from_numpy(images))
    theirs: dict[str, Maker] = {
        "PyTorch over np.memmap, __getitems__": partial(
            TORCH, rows, **keywords, collate_fn=as_it_is
        ),
        "PyTorch over np.memmap, 2 workers": partial(TORCH, rows, **many),
        "PyTorch over a TensorDataset": partial(TORCH, tensors, **keywords),
        **find_peers(folder, images, batch_size),
    }
    shards = _pack(images, folder, "shards")
    one = _pack(images, folder, "one", shard_bytes=1 << 40)
    ours = {
        "Penstock, 0 workers": _ours(shards, batch_size, 0),
        "Penstock, one shard, 0 workers": _ours(one, batch_size, 0),
        "Penstock, 1 worker": _ours(shards, batch_size, 1),
        "Penstock, 2 workers": _ours(shards, batch_size, 2),
    }
    floor = "bare np.take, one thread"
    rate = partial(_lap, pace=pace, scale=batch_size)
    first = next(iter(ours))
    return Case(
        key="a",
        title=f"{pace.num_images_in_memory:,} x 3x64x64 uint8, shuffled, batch {batch_size}",
        unit="samples/s",
        contenders=[
            Contender(name=floor, turn=_take(folder / "images.npy", batch_size, pace)),
            *(
                Contender(name=name, turn=rate(make), against=(floor,), target=_floor(name, first))
                for name, make in ours.items()
            ),
            # Measured next to the nearest peer. Others leave processes that take a while to end.
            Contender(
                name="Penstock, 0 workers, again",
                turn=rate(ours[first]),
                against=tuple(theirs),
                target=Target(bound=1.0),
            ),
            *(Contender(name=name, turn=rate(make)) for name, make in theirs.items()),
        ],
    )


def _floor(name: str, first: str) -> Target | None:
    return Target(bound=0.8) if name == first else None


def large(pace: Pace) -> Case:
    """(b) Samples of 150 KB, shuffled, batches of 64."""
    batch_size, folder = 64, _folder()
    images = _images(pace.num_images_in_memory // 10, (3, 224, 224))
    np.save(folder / "images.npy", images)
    rows = MemmapRows(str(folder / "images.npy"))
    packed = _pack(images, folder, "packed")
    rate = partial(_lap, pace=pace, scale=batch_size)
    keywords: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
    copied = "copy of whole batches, one thread"
    theirs = "PyTorch over np.memmap, __getitems__"
    return Case(
        key="b",
        title=f"{len(images):,} x 150 KB uint8, shuffled, batch {batch_size}",
        unit="samples/s",
        contenders=[
            Contender(name=copied, turn=_copy(images, batch_size, pace)),
            Contender(
                name="Penstock, 0 workers",
                turn=rate(_ours(packed, batch_size, 0)),
                against=(copied,),
                target=Target(bound=0.8),
            ),
            *(
                Contender(
                    name=f"Penstock, {count} worker{'s' if count > 1 else ''}",
                    turn=rate(_ours(packed, batch_size, count)),
                    against=(copied,),
                )
                for count in (1, 2)
            ),
            Contender(
                name=theirs, turn=rate(partial(TORCH, rows, **keywords, collate_fn=as_it_is))
            ),
        ],
    )


CASES = {"a": small, "b": large}
