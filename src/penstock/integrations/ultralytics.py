"""Ultralytics: what in its datasets depends on which process loads a sample.

Its Mosaic takes the other images of a sample from a buffer: those that this process has loaded
lately. No seed can repeat that with workers that share the samples out, or after one has died.
Ultralytics has a switch for it, which it uses itself for images in memory (``cache="ram"``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from penstock.user_objects import probe

CHANGED = (
    "Ultralytics' Mosaic takes its images from the whole dataset, not from those that this process "
    "has loaded lately: else no seed repeats it"
)
_MODULE = "ultralytics.data.augment"
_MAX_DEPTH = 20


def settle_mosaic(dataset: Any) -> str | None:
    """Switch Mosaic's buffer off, wherever it is in the dataset's transforms; what was changed."""
    mosaic = getattr(sys.modules.get(_MODULE), "Mosaic", None)
    if mosaic is None:  # Ultralytics is not here
        return None
    line = None
    for transform in _walk(probe(dataset, "transforms")):
        if isinstance(transform, mosaic) and getattr(transform, "buffer_enabled", False):
            transform.buffer_enabled = False
            line = CHANGED
    return line


def _walk(transform: Any, depth: int = 0) -> Iterator[Any]:
    """A transform and those inside: a list of them, or one that runs before."""
    if transform is None or depth > _MAX_DEPTH:  # one that answers every name has no end
        return
    yield transform
    inner = probe(transform, "transforms")
    for one in inner if isinstance(inner, list) else ():
        yield from _walk(one, depth + 1)
    yield from _walk(probe(transform, "pre_transform"), depth + 1)
