"""Detects ``accelerator.prepare(loader)`` by an attribute that accelerate reads.

:mod:`penstock.integrations.accelerate` is imported only if accelerate reads it.

Tested by ``tests/compat/test_accelerate.py``.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from penstock.loader import DataLoader

_MODULE = "accelerate.data_loader"


def watch() -> None:
    """Install the attribute. Called when DataLoader is first accessed."""
    DataLoader._is_accelerate_prepared = _PreparedFlag()  # type: ignore[attr-defined]


class _PreparedFlag:
    """``loader._is_accelerate_prepared``, which accelerate reads before it creates its loader."""

    def __get__(self, loader: Any, kind: Any = None) -> bool:
        library = sys.modules.get(_MODULE)
        if loader is not None and library is not None:
            from penstock.integrations.accelerate import asked, hook

            if hook(library):
                asked.loader = weakref.ref(loader)
        return False
