"""Ultralytics: what in its datasets depends on which process loads a sample.

Its Mosaic takes the other images of a sample from a buffer: those that this process has loaded
lately. No seed can repeat that with workers that share the samples out, or after one has died.
Ultralytics has a switch for it, which it uses itself for images in memory (``cache="ram"``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

CHANGED = (
    "Ultralytics' Mosaic takes its images from the whole dataset, not from those that this process "
    "has loaded lately: else no seed repeats it"
)
_MODULE = "ultralytics.data.augment"


def settle_mosaic(dataset: Any) -> str | None:
    """Switch Mosaic's buffer off, wherever it is in the dataset's transforms; what was changed."""
    mosaic = getattr(sys.modules.get(_MODULE), "Mosaic", None)
    if mosaic is None:  # Ultralytics is not here
        return None
    line = None
    for transform in _walk(getattr(dataset, "transforms", None)):
        if isinstance(transform, mosaic) and getattr(transform, "buffer_enabled", False):
            transform.buffer_enabled = False
            line = CHANGED
    return line


def _walk(transform: Any) -> Iterator[Any]:
    """A transform and those inside: a list of them, or one that runs before."""
    if transform is None:
        return
    yield transform
    inner = getattr(transform, "transforms", None)
    for one in inner if isinstance(inner, list) else ():
        yield from _walk(one)
    yield from _walk(getattr(transform, "pre_transform", None))
