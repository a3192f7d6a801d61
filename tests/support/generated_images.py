"""Images with natural statistics, generated without a network: smooth shapes, edges and noise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np


def make_pixels(height: int = 375, width: int = 500, seed: int = 0) -> np.ndarray:
    """Return gradients, ellipses and grain, which decode like a photograph."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    channels = [
        127 + 80 * np.sin(x / generator.uniform(20, 90) + c) * np.cos(y / generator.uniform(20, 90))
        for c in range(3)
    ]
    image = np.stack(channels, axis=2)
    for _ in range(12):
        cy, cx = generator.uniform(0, height), generator.uniform(0, width)
        ry, rx = generator.uniform(8, height / 3), generator.uniform(8, width / 3)
        inside = ((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 < 1
        image[inside] = generator.uniform(0, 255, 3)
    image += generator.normal(0, 6, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "JPEG", **keywords: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    if kind == "JPEG":
        keywords.setdefault("quality", 90)
    Image.fromarray(pixels).save(file, kind, **keywords)
    return file.getvalue()


def make_folder(root: Path, num_images: int = 12, **size: int) -> Path:
    """Write a folder with two classes of JPEGs."""
    for number in range(num_images):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        data = encode(make_pixels(seed=number, **size))
        (folder / f"{number:03d}.jpg").write_bytes(data)
    return root
