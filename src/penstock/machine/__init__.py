"""What is this computer?

``penstock.machine`` is this room, and ``penstock.machine()`` the answer to its question.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.machine.facts import Machine


class _Room(ModuleType):
    """A module that can be called.

    Importing any file of this room makes Python set ``penstock.machine`` to the package, over
    whatever function the front page put there. So the package itself answers the call.
    """

    def __call__(self) -> Machine:
        from penstock.machine.collect import machine  # late: most who open this room want one file

        return machine()

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle knows modules by their exact type; a script's functions may hold this one.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room
