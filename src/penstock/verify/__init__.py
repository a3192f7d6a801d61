"""Does this loader give the same bits whatever loads them?

``penstock.verify`` is this room, and ``penstock.verify(make_loader)`` the answer to its question.

::

    checking    runs the factory's loader under each setting, and compares
      settings    which settings there are, and which of them the factory takes
      stream      one run, batch after batch: delayed, or killed and resumed
      hashing     a batch and its samples as hashes
      - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - another process
      fresh       the same run in a new interpreter, with another hash seed
      - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - -
      differences the first sample and field that differ, and how
      causes      why, as found by further runs
      verdict     the answer: a table, the difference, for a person or a program
    training    without a loader: is the same small training twice equal to the last bit here?

Nothing here knows Penstock's own loader: any iterable can be convicted.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.verify.verdict import Verdict


class _Room(ModuleType):
    """A module that can be called; the reason is the one of :mod:`penstock.machine`."""

    def __call__(self, make_loader: Any, **options: Any) -> Verdict:
        from penstock.verify.comparison import verify  # late: it imports torch

        return verify(make_loader, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
