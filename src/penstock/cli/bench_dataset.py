"""Opens the dataset of ``penstock bench``: SCRIPT:NAME, a folder of images, or generated images.

Tested by ``tests/integration/cli/test_bench.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.script_loading import load_dataset
from penstock.errors import BadTarget
from penstock.user_objects import probe

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PIXELS, NUM_MADE, BATCH_SIZE = 224, 256, 32


@dataclass(frozen=True, kw_only=True)
class BenchDataset:
    """A dataset, with the batch size and ``collate_fn`` of its loader."""

    name: str
    dataset: Any
    batch_size: int = BATCH_SIZE
    collate_fn: Any = None

    @property
    def is_script(self) -> bool:
        """Whether ``name`` is SCRIPT:NAME."""
        return ".py:" in self.name


class FolderImages:
    """The images in a folder, decoded by Pillow and resized to the same size."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        with importlib.import_module("PIL.Image").open(self.files[index]) as image:
            # A copy, because torch warns of arrays that are read-only.
            return np.array(image.convert("RGB").resize((PIXELS, PIXELS)))


@contextmanager
def open_dataset(target: str | None, arguments: Sequence[str] = ()) -> Iterator[BenchDataset]:
    """Open the dataset that ``target`` names. If None, images are generated.

    Raises:
        BadTarget: There is nothing to load.
    """
    if target is None:
        from penstock.cli.demo_images import GeneratedImages

        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            images = GeneratedImages(Path(folder), NUM_MADE)
            yield BenchDataset(name="generated images", dataset=images)
    elif Path(target).is_dir():
        yield BenchDataset(name=target, dataset=_images_in(Path(target)))
    else:
        yield _from_script(target, arguments)


def _images_in(folder: Path) -> FolderImages:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        kinds = ", ".join(IMAGE_SUFFIXES)
        raise BadTarget(f"{folder} contains no images ({kinds})", remedy="penstock bench")
    if importlib.util.find_spec("PIL") is None:
        raise BadTarget(
            "Pillow decodes the images in a folder, but it is not installed",
            remedy="pip install pillow",
        )
    return FolderImages(files)


def _from_script(target: str, arguments: Sequence[str]) -> BenchDataset:
    if ":" not in target and not Path(target).exists():
        raise BadTarget(
            f"{target!r} is neither a folder nor a script",
            remedy="penstock bench train.py:dataset, or a folder of images",
        )
    value = load_dataset(target, "bench", arguments)
    has_samples = hasattr(type(value), "__getitem__")
    if not has_samples and probe(value, "dataset") is not None:  # a loader, not a wrapper
        return BenchDataset(
            name=target,
            dataset=value.dataset,
            batch_size=getattr(value, "batch_size", None) or BATCH_SIZE,
            collate_fn=getattr(value, "collate_fn", None),
        )
    missing = [name for name in ("__getitem__", "__len__") if not hasattr(type(value), name)]
    if missing:
        raise BadTarget(
            f"{target} is of type {type(value).__name__}, which has no {' and '.join(missing)}",
            remedy="penstock bench train.py:dataset",
        )
    return BenchDataset(name=target, dataset=value)
