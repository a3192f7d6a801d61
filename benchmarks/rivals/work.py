"""Common work on a sample, for contenders without their own implementation.

Input and output are NumPy arrays. Everything is picklable, because some peers use processes.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from contract import MEAN, SIZE, STD


def draw_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width, drawn like torchvision's RandomResizedCrop."""
    area = height * width
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        target = area * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


class CropPixels:
    """Crop with OpenCV, the fastest handwritten implementation.

    Antialiased means OpenCV's area filter if the crop shrinks. It is not the triangle filter of
    Pillow and torchvision, but it also reads every pixel.
    """

    def __init__(self, antialias: bool) -> None:
        self.antialias = antialias

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        import cv2

        top, left, height, width = draw_crop(*pixels.shape[:2])
        part = pixels[top : top + height, left : left + width]
        is_shrunk = height > SIZE or width > SIZE
        filter_ = cv2.INTER_AREA if self.antialias and is_shrunk else cv2.INTER_LINEAR
        made = cv2.resize(part, (SIZE, SIZE), interpolation=filter_)
        return cv2.flip(made, 1) if random.random() < 0.5 else made


class CropJpeg(CropPixels):
    """Decode a JPEG with simplejpeg, then crop it with OpenCV."""

    def __call__(self, content: bytes) -> np.ndarray:
        import simplejpeg

        return super().__call__(simplejpeg.decode_jpeg(content))


def normalise(images: Any) -> Any:
    """Convert a batch of bytes (N, H, W, C or N, C, H, W) to normalised floats, in the consumer."""
    import torch

    shape = (3,) if images.shape[-1] == 3 else (3, 1, 1)
    mean, scale = (torch.tensor(v).view(shape) for v in (MEAN, [1 / value for value in STD]))
    return images.float().sub_(mean).mul_(scale)


class Tiny:
    """Samples of 16 bytes, to measure the overhead per sample and per batch."""

    def __call__(self, number: int) -> np.ndarray:
        return np.full(4, number, np.float32)


class Large:
    """Samples of 150 KB with little work, to measure the transport of bytes."""

    def __call__(self, number: int) -> np.ndarray:
        return np.full((3, SIZE, SIZE), number % 256, np.uint8)


class Sleepy:
    """Samples that take a millisecond, so that loading skipped samples is visible."""

    def __call__(self, number: int) -> np.ndarray:
        time.sleep(0.001)
        return np.full(1, number, np.int64)


class Random:
    """Draws from all global generators, like typical user code."""

    def __call__(self, number: int) -> np.ndarray:
        import torch

        drawn = (random.random(), np.random.random(), float(torch.rand(())))
        return np.array([number, *drawn], np.float64)


class Killed:
    """One sample kills its worker, once."""

    victim = 1000

    def __init__(self, marker: str = "") -> None:
        self.marker, self.parent = marker, os.getpid()

    def __call__(self, number: int) -> np.ndarray:
        if number == self.victim and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(1, number, np.int64)


WORKS = {work.__name__: work for work in (Tiny, Large, Sleepy, Random, Killed)}


def digest(arrays: Any) -> str:
    """Return a short digest of some arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
