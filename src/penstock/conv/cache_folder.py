"""The folder where measurements stay between runs: one for each user, files written whole."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_CACHE_DIR"


def cache_folder() -> Path:
    """The folder: what ``PENSTOCK_CACHE_DIR`` says, or this system's place for such files.

    Example:
        >>> cache_folder().name
        'penstock'
    """
    told = os.environ.get(VARIABLE)
    if told:
        return Path(told)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "penstock"


def read_json(name: str) -> Any:
    """What is kept under ``name``; None if nothing is, or nothing that can be read."""
    try:
        return json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # not there, not JSON, or nested too deeply
        return None


def write_json(name: str, content: Any) -> bool:
    """Keep ``content`` under ``name``; a reader sees the old file or the new one, never a part.

    Returns:
        Whether it could be written: a home that is read-only costs the measurement, not the run.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=name, suffix=".part", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(path, folder / name)
        except BaseException:
            os.unlink(path)
            raise
    except OSError:
        return False
    return True


def remove(pattern: str) -> int:
    """Delete the files that match; how many there were."""
    paths = list(cache_folder().glob(pattern))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)
