"""Synthetic photographs for jpeg_workers.py, with the size and detail of camera images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from PIL import Image, ImageDraw
except ImportError as error:  # the core environment has no image decoder
    raise SystemExit("this needs Pillow: pip install pillow") from error

SIZE = (500, 375)
"""The most common size in ImageNet."""
CROP = 224


def draw_photographs(folder: Path, count: int) -> list[str]:
    """Write JPEG files with a sky, ellipses of many sizes, and sensor noise."""
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        width, height = SIZE
        sky = np.linspace(rng.integers(60, 200, 3), rng.integers(60, 200, 3), height)
        picture = Image.fromarray(np.repeat(sky[:, None], width, 1).astype(np.uint8))
        canvas = ImageDraw.Draw(picture)
        for _ in range(60):
            x, y = rng.integers(0, width), rng.integers(0, height)
            a, b = rng.integers(5, 120, 2)
            colour = tuple(int(value) for value in rng.integers(0, 255, 3))
            canvas.ellipse((int(x - a), int(y - b), int(x + a), int(y + b)), fill=colour)
        noisy = np.asarray(picture, np.int16) + rng.normal(0, 6, (height, width, 3)).astype(
            np.int16
        )
        path = folder / f"{number:04}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(str(path))
    return paths


class Photographs(torch.utils.data.Dataset[Any]):
    """Decodes, crops and mirrors at random, as in training on ImageNet."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as file:
            picture = file.convert("RGB")
        width, height = picture.size
        side = random.randint(CROP, min(width, height))
        left, top = random.randint(0, width - side), random.randint(0, height - side)
        picture = picture.resize((CROP, CROP), box=(left, top, left + side, top + side))
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1), index % 10
