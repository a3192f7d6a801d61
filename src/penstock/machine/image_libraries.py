"""Finds the installed libraries that decode JPEG."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

KNOWN = (
    "simplejpeg",
    "turbojpeg",
    "cv2",
    "torchvision",
    "imagecodecs",
    "pyvips",
    "kornia_rs",
    "imageio",
    "PIL",
)


def find_decoders(known: Iterable[str] = KNOWN) -> tuple[str, ...]:
    """Return the JPEG decoders that are installed, without importing them.

    Example:
        >>> set(find_decoders()) <= set(KNOWN)
        True
    """
    return tuple(name for name in known if _is_importable(name))


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # blocked, or a stub module without a spec
        return False


@functools.cache
def opencv() -> Any:
    """Import and return OpenCV.

    Returns None if it is missing, if its build does not load here, or if an uninstalled version
    left an empty folder behind.
    """
    try:
        cv2 = importlib.import_module("cv2")
    except Exception:
        return None
    return cv2 if hasattr(cv2, "LUT") else None


def has_turbo() -> bool | None:
    """Return True if Pillow was built with libjpeg-turbo, or None if unknown."""
    if not _is_importable("PIL"):
        return None
    try:
        answer = importlib.import_module("PIL.features").check_feature("libjpeg_turbo")
    except Exception:  # a broken third-party build can raise anything
        return None
    return None if answer is None else bool(answer)
