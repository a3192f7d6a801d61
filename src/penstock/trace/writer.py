"""Writes the trace of a loader to its file while the run goes on, and at its end."""

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
"""Which loader of this process writes to which file."""


def claim_file(path: str, loader: Any) -> None:
    path = os.path.realpath(path)
    if _claims.get(path, loader) is not loader:
        text = f"two loaders write their trace to {path}: only that of the last one stays there"
        warnings.warn(f"{text}\n  Try: a trace= of its own for each", stacklevel=2)
    _claims[path] = loader


class TraceWriter:
    """Writes what a recorder holds to a file; knows the loader no longer."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self._recorder = recorder
        self._path = path
        self._owner = os.getpid()
        self._written_s = self._took_s = 0.0
        self._has_failed = False

    def write_sometimes(self) -> None:
        """At the end of an epoch; not of each, where epochs are short and the file is long."""
        if time.monotonic() - self._written_s > 20 * self._took_s:
            self.write()

    def write(self) -> None:
        if os.getpid() != self._owner:
            return
        start_s = time.monotonic()
        try:
            Timeline(self._recorder.records()).save(self._path)
        except BadTrace as error:  # a full disk, say: no reason to lose the training as well
            if not self._has_failed:
                warnings.warn(f"{error}\n  The run goes on without its trace.", stacklevel=2)
            self._has_failed = True
        self._written_s = time.monotonic()
        self._took_s = self._written_s - start_s
