"""The common data: images that decode like photographs, and tensors. Created once per home."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.generated_images import encode, make_pixels

NUM_CLASSES = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amounts of data."""

    jpeg: int = 2048
    small: int = 20_000
    large: int = 1_024
    raw: int = 1_024
    numbers: int = 65_536
    strings: int = 500_000
    few: int = 4_096
    """Numbers in an epoch that is loaded completely."""
    num_images: int = 256
    """Number of different images. The others are the same files under different names."""

    def for_workers(self, num_workers: int) -> Sizes:
        """Return sizes with at least as many batches per worker as 2 workers have.

        Loaders that fill their queues again in each epoch would otherwise lose to endless ones.
        """
        factor = max(1, num_workers // 2)
        longer = {name: getattr(self, name) * factor for name in ("jpeg", "small", "large", "raw")}
        return replace(self, **longer)


TINY = Sizes(
    jpeg=128,
    small=1_024,
    large=128,
    raw=128,
    numbers=4_096,
    strings=10_000,
    few=2_048,
    num_images=8,
)


def make_data(folder: Path, sizes: Sizes, kinds: set[str]) -> None:
    """Write the data of the given kinds, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if "jpeg" in kinds and not (folder / "jpeg").exists():
        _make_jpegs(folder, sizes)
    random = np.random.default_rng(0)
    for kind, shape in (("small", (3, 64, 64)), ("large", (3, 224, 224))):
        if kind in kinds and not (folder / f"{kind}.npy").exists():
            count = getattr(sizes, kind)
            np.save(folder / f"{kind}.npy", random.integers(0, 256, (count, *shape), np.uint8))
    if "raw" in kinds and not (folder / "raw.npy").exists():
        images = [make_pixels(192, 256, seed=number) for number in range(sizes.num_images)]
        repeats = -(-sizes.raw // len(images))
        np.save(folder / "raw.npy", np.stack((images * repeats)[: sizes.raw]))


def _make_jpegs(folder: Path, sizes: Sizes) -> None:
    partial = folder / "jpeg.partial"
    for number in range(NUM_CLASSES):
        (partial / str(number)).mkdir(parents=True, exist_ok=True)
    first: list[Path] = []
    for number in range(sizes.jpeg):
        path = partial / str(number % NUM_CLASSES) / f"{number:06d}.jpg"
        if number < sizes.num_images:
            path.write_bytes(encode(make_pixels(seed=number)))
            first.append(path)
        else:
            os.link(first[number % len(first)], path)
    partial.rename(folder / "jpeg")
