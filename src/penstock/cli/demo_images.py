"""Generated images for ``penstock demo`` and ``bench``: files, augmented at each load.

The code is plain Python and NumPy. It draws from their global generators, like most datasets.

Tested by ``tests/integration/cli/test_demo.py``.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

KINDS = ("flat ellipse", "upright ellipse", "disc", "ring")
STORED_PIXELS = 160
LOADED_PIXELS = 64


class GeneratedImages:
    """Images of ellipses on noise. The label is the kind of ellipse.

    Args:
        folder: An empty folder for the files. The caller removes it.
        num_images: Number of images to generate.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     image, kind = GeneratedImages(Path(folder), num_images=4)[2]
        >>> tuple(image.shape), KINDS[kind]
        ((3, 64, 64), 'disc')
    """

    def __init__(self, folder: Path, num_images: int) -> None:
        rng = np.random.default_rng(0)
        self.files = [folder / f"{place}.z" for place in range(num_images)]
        for place, file in enumerate(self.files):
            file.write_bytes(_draw(rng, place % len(KINDS)))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch

        stored = np.frombuffer(zlib.decompress(self.files[index].read_bytes()), dtype=np.uint8)
        image = stored.reshape(STORED_PIXELS, STORED_PIXELS, 3)
        return torch.from_numpy(_augment(image)), index % len(KINDS)


def _draw(rng: np.random.Generator, kind: int) -> bytes:
    """Return one compressed image."""
    long, short = rng.uniform(40, 60), rng.uniform(15, 28)
    height, width = ((short, long), (long, short), (long, long), (long, long))[kind]
    y, x = np.ogrid[:STORED_PIXELS, :STORED_PIXELS]
    middle = rng.uniform(-12, 12, 2) + STORED_PIXELS / 2
    distance = ((y - middle[0]) / height) ** 2 + ((x - middle[1]) / width) ** 2
    is_inside = distance < 1
    if KINDS[kind] == "ring":
        is_inside &= distance > 0.4
    colours = np.stack((rng.integers(0, 100, 3), rng.integers(100, 200, 3))).astype(np.uint8)
    noise = rng.integers(0, 48, (STORED_PIXELS, STORED_PIXELS, 3), dtype=np.uint8)
    return zlib.compress((colours[is_inside.astype(np.intp)] + noise).tobytes(), 1)


def _augment(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Apply a random view, flips, blur, brightness, contrast and noise."""
    pixels = _view(
        image, angle=random.uniform(-0.3, 0.3), zoom=random.uniform(0.75, 1.0), shift=_shift()
    )
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    if random.random() < 0.5:
        pixels = pixels[::-1]
    pixels = _blur(pixels, random.uniform(0.0, 0.3))
    contrast, brightness = random.uniform(0.7, 1.3), random.uniform(-0.2, 0.2)
    noise = np.random.normal(brightness, 0.05, pixels.shape)
    finished = (pixels / 255 - 0.5) * contrast + noise
    return np.ascontiguousarray(finished.transpose(2, 0, 1), dtype=np.float32)


def _shift() -> tuple[float, float]:
    return random.uniform(-8, 8), random.uniform(-8, 8)


def _view(
    image: NDArray[np.uint8], *, angle: float, zoom: float, shift: tuple[float, float]
) -> NDArray[np.float32]:
    """Rotate, zoom and shift the image, and scale it to the loaded size with bilinear sampling."""
    reach = zoom * STORED_PIXELS / 2
    place = np.linspace(-reach, reach, LOADED_PIXELS)
    y, x = place[:, None], place[None, :]
    middle, last = STORED_PIXELS / 2, STORED_PIXELS - 1.001
    row = np.clip(np.cos(angle) * y - np.sin(angle) * x + middle + shift[0], 0, last)
    column = np.clip(np.sin(angle) * y + np.cos(angle) * x + middle + shift[1], 0, last)
    top, left = row.astype(np.intp), column.astype(np.intp)
    down = (row - top)[..., None].astype(np.float32)
    right = (column - left)[..., None].astype(np.float32)
    upper = image[top, left] * (1 - right) + image[top, left + 1] * right
    lower = image[top + 1, left] * (1 - right) + image[top + 1, left + 1] * right
    seen: NDArray[np.float32] = upper * (1 - down) + lower * down
    return seen


def _blur(pixels: NDArray[np.float32], strength: float) -> NDArray[np.float32]:
    """Mix each pixel with its four neighbors."""
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    blurred: NDArray[np.float32] = pixels * (1 - strength) + around * (strength / 4)
    return blurred
