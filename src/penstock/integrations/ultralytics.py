"""Ultralytics: makes its Mosaic independent of the process that loads a sample.

Mosaic takes its additional images from a buffer of images that this process loaded recently. No
seed can reproduce that when workers divide the samples, or after a worker has died. Ultralytics has
a switch for it, which it uses itself for images in memory (``cache="ram"``).

Tested by ``tests/unit/integrations/test_ultralytics_mosaic.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from penstock.user_objects import probe

CHANGED = (
    "Ultralytics' Mosaic takes its images from the whole dataset, not from a buffer of recently "
    "loaded images, because a seed cannot reproduce the buffer"
)
_MODULE = "ultralytics.data.augment"
_MAX_DEPTH = 20


def settle_mosaic(dataset: Any) -> str | None:
    """Disable Mosaic's buffer in all transforms of a dataset. Returns a message if it did."""
    mosaic = getattr(sys.modules.get(_MODULE), "Mosaic", None)
    if mosaic is None:  # Ultralytics is not imported
        return None
    line = None
    for transform in _walk(probe(dataset, "transforms")):
        if isinstance(transform, mosaic) and getattr(transform, "buffer_enabled", False):
            transform.buffer_enabled = False
            line = CHANGED
    return line


def _walk(transform: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a transform and all nested ones: those in its list, and its ``pre_transform``."""
    if transform is None or depth > _MAX_DEPTH:  # an object that has every attribute is endless
        return
    yield transform
    inner = probe(transform, "transforms")
    for one in inner if isinstance(inner, list) else ():
        yield from _walk(one, depth + 1)
    yield from _walk(probe(transform, "pre_transform"), depth + 1)
