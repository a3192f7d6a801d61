"""Datasets of device.py, in a separate module that workers can import."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from datasets import ENDLESS

BATCH_SIZE = 64
NUM_WORKERS = max(1, (os.cpu_count() or 2) - 1)
PHOTOGRAPHS, CLASSES = 2_048, 8


class Stacked(Dataset[Any]):
    """Samples of 150 KB in memory, to measure the transport to the GPU."""

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (64, 3, 224, 224), dtype=np.uint8)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index % 64]  # type: ignore[no-any-return]


class Mapped(Dataset[Any]):
    """Images in a memory-mapped file, as typical user code reads them."""

    def __init__(self, path: Path, labels: torch.Tensor) -> None:
        self.path, self.labels = path, labels
        self.images: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, torch.Tensor]:
        if self.images is None:
            self.images = np.load(self.path, mmap_mode="r")
        return np.asarray(self.images[index]), self.labels[index]


def make_arrays(images: torch.Tensor, labels: torch.Tensor) -> tuple[Path, Path]:
    """Write two files that NumPy can map."""
    folder = _folder()
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "labels.npy", labels.numpy())
    return folder / "images.npy", folder / "labels.npy"


class Photographs(Dataset[Any]):
    """JPEGs decoded by torchvision and cropped to 224, as in typical user code."""

    def __init__(self, folder: Path) -> None:
        from torchvision.transforms import v2

        self.files = sorted(str(path) for path in folder.rglob("*.jpg"))
        self.crop = v2.RandomResizedCrop(224, antialias=True)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        image = decode_jpeg(read_file(self.files[index]), ImageReadMode.RGB)
        return self.crop(image), index % 1000


def make_photographs() -> Path:
    """Write JPEG files of 500 x 375, about 60 KB each, with photo-like shapes and grain."""
    from torchvision.io import write_jpeg

    folder = _folder()
    for number in range(CLASSES):
        (folder / f"{number}").mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(PHOTOGRAPHS):
        coarse = torch.rand(1, 3, 12, 16, generator=generator)
        fine = torch.rand(1, 3, 94, 125, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")
        grain = torch.nn.functional.interpolate(fine, (375, 500), mode="bilinear")
        image = (smooth * 0.7 + grain * 0.3).clamp(0, 1).mul(255).to(torch.uint8)[0]
        write_jpeg(image, str(folder / f"{number % CLASSES}" / f"{number:05d}.jpg"), quality=92)
    return folder


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
