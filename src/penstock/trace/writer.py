"""Writes a loader's trace file, during the run and at its end.

Tested by ``tests/unit/trace/test_files.py``.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from typing import Any

from penstock.errors import BadTrace
from penstock.trace.recorder import Recorder
from penstock.trace.timeline import Timeline

_claims: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Maps each trace file to the loader of this process that writes it."""


def write_trace(recorder: Recorder, path: str, loader: Any) -> None:
    """Write the records of a loader to ``path`` from now on: after epochs, and at its end."""
    _claim_file(path, loader)
    writer = TraceWriter(recorder, path)
    recorder.on_end = writer.write_sometimes
    # Runs when the loader is garbage-collected, or when the program exits.
    weakref.finalize(loader, writer.write)


def _claim_file(path: str, loader: Any) -> None:
    path = os.path.realpath(path)
    if _claims.get(path, loader) is not loader:
        text = f"two loaders write their trace to {path}, so only the last one is kept"
        warnings.warn(f"{text}\n  Try: a different trace= for each loader", stacklevel=2)
    _claims[path] = loader


class TraceWriter:
    """Writes the records of a recorder to a file. Keeps no reference to the loader."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self._recorder = recorder
        self._path = path
        self._owner = os.getpid()
        self._written_s = self._took_s = 0.0
        self._has_failed = False

    def write_sometimes(self) -> None:
        """Write the file at the end of an epoch, unless writing takes too long for short epochs."""
        if time.monotonic() - self._written_s > 20 * self._took_s:
            self.write()

    def write(self) -> None:
        if os.getpid() != self._owner:
            return
        start_s = time.monotonic()
        try:
            Timeline(self._recorder.records()).save(self._path)
        except BadTrace as error:  # for example, a full disk: do not stop the training
            if not self._has_failed:
                warnings.warn(f"{error}\n  The run continues without its trace.", stacklevel=2)
            self._has_failed = True
        self._written_s = time.monotonic()
        self._took_s = self._written_s - start_s
