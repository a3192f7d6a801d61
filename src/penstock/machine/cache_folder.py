"""The per-user cache folder for measurements. Files are written atomically.

Tested by ``tests/faults/conv/probing/test_probe.py``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_CACHE_DIR"


def cache_folder() -> Path:
    """Return ``PENSTOCK_CACHE_DIR``, or the platform's default folder for caches.

    Example:
        >>> cache_folder().name
        'penstock'
    """
    override = os.environ.get(VARIABLE)
    if override:
        return Path(override)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "penstock"


def read_json(name: str) -> Any:
    """Return the content stored under ``name``, or None if it is missing or unreadable."""
    try:
        return json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # missing, not JSON, nested too deeply, no home
        return None


def write_json(name: str, content: Any) -> bool:
    """Store ``content`` under ``name``. Readers see the old file or the new one, never a part.

    Returns:
        False if it could not be written. A read-only home directory is not an error: only the
        measurement is lost.
    """
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=name, suffix=".part", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(path, folder / name)
        except BaseException:
            os.unlink(path)
            raise
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return False
    return True


def remove(pattern: str) -> int:
    """Delete the files that match ``pattern``. Returns how many there were."""
    paths = list(cache_folder().glob(pattern))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
