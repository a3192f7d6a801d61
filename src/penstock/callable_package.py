"""Makes a package callable, as ``penstock.machine()`` and ``penstock.verify(make_loader)``.

Importing any module of a package makes Python set ``penstock.<package>`` to the package, over a
function of that name. So the package itself takes the call.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package whose call is that of a function in one of its modules, imported when called."""

    _module: str
    _function: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._function)(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle knows modules by their exact type; a script's functions may hold this one.
        return importlib.import_module, (self.__name__,)


def make_callable(package: str, module: str, function: str) -> None:
    """Calling ``package`` calls ``function`` of ``module`` from now on."""
    made: Any = sys.modules[package]
    made.__class__ = CallablePackage
    made._module, made._function = module, function
