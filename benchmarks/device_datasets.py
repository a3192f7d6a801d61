"""What the GPU questions load. In a module of its own, for workers that import it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from datasets import ENDLESS

PHOTOGRAPHS = 2_048


class Stacked(Dataset[Any]):
    """150 KB a sample, in memory already: what is left is the way to the GPU."""

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (64, 3, 224, 224), dtype=np.uint8)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index % 64]  # type: ignore[no-any-return]


class Mapped(Dataset[Any]):
    """Images in a file that is mapped into memory."""

    def __init__(self, path: Path, shape: tuple[int, ...], labels: torch.Tensor) -> None:
        self.path, self.shape, self.labels = path, shape, labels
        self.images: np.ndarray | None = None

    @classmethod
    def of(cls, images: torch.Tensor, labels: torch.Tensor) -> Mapped:
        path = Path(tempfile.mkdtemp(prefix="penstock-bench-")) / "images.bin"
        images.numpy().tofile(path)
        return cls(path, tuple(images.shape), labels)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> tuple[np.ndarray, torch.Tensor]:
        if self.images is None:
            self.images = np.memmap(self.path, dtype=np.uint8, mode="r", shape=self.shape)
        return np.asarray(self.images[index]), self.labels[index]


class Photographs(Dataset[Any]):
    """Decoded by torchvision and cropped to 224, as people do it."""

    def __init__(self, files: list[str]) -> None:
        from torchvision.transforms import v2

        self.files = files
        self.crop = v2.RandomResizedCrop(224, antialias=True)

    def __len__(self) -> int:
        return 10 * len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        image = decode_jpeg(read_file(self.files[index % len(self.files)]), ImageReadMode.RGB)
        return self.crop(image), index % 1000


def make_photographs() -> list[str]:
    """JPEG files of 500 x 375, about 60 KB each: smooth shapes and grain, as in photographs."""
    from torchvision.io import write_jpeg

    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    generator = torch.Generator().manual_seed(0)
    files = []
    for number in range(PHOTOGRAPHS):
        coarse = torch.rand(1, 3, 12, 16, generator=generator)
        fine = torch.rand(1, 3, 94, 125, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic")
        grain = torch.nn.functional.interpolate(fine, (375, 500), mode="bilinear")
        image = (smooth * 0.7 + grain * 0.3).clamp(0, 1).mul(255).to(torch.uint8)[0]
        path = folder / f"{number:05d}.jpg"
        write_jpeg(image, str(path), quality=92)
        files.append(str(path))
    return files
