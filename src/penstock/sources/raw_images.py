"""Pillow images stored as raw pixels, as MDS and LitData store them.

uint32 width | uint32 height | uint32 length of the mode | mode | pixels

Tested by ``tests/unit/sources/test_mds_dataset.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from penstock.errors import MissingExtra
from penstock.images.pixels import from_pillow, to_tensor

_CHANNELS = {"L": 1, "RGB": 3}


def decode_raw_image(data: memoryview) -> Any:
    """Return the image as a uint8 tensor of shape (3, height, width).

    Example:
        >>> data = np.array([2, 1, 1], "<u4").tobytes() + b"L" + bytes([5, 9])
        >>> decode_raw_image(memoryview(data)).tolist()
        [[[5, 9]], [[5, 9]], [[5, 9]]]
    """
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    mode, pixels = bytes(data[12 : 12 + length]).decode("utf-8"), data[12 + length :]
    channels = _CHANNELS.get(mode)
    if channels is None:
        return to_tensor(from_pillow(_make_pillow(mode, (width, height), bytes(pixels))))
    array = np.frombuffer(pixels, np.uint8).reshape(height, width, channels)
    return to_tensor(np.repeat(array, 3, axis=2) if channels == 1 else array)


def _make_pillow(mode: str, size: tuple[int, int], pixels: bytes) -> Any:
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError:
        raise MissingExtra.named(
            "images", f"an image of mode {mode} needs Pillow, which is not installed"
        ) from None
    return pillow.frombytes(mode, size, pixels)
