"""Makes packages callable: ``penstock.machine()`` and ``penstock.verify(make_loader)``.

Importing any module of a package makes Python set ``penstock.<package>`` to the package, which
replaces a function of the same name. So the package itself is made callable.

Tested by ``tests/integration/verify/test_comparison.py``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that forwards calls to a function in one of its modules, imported on first call."""

    _module: str
    _function: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self._module), self._function)(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle recognizes modules by their exact type, so this subclass needs its own reducer
        # (functions in the user's script may reference the package).
        return importlib.import_module, (self.__name__,)


def make_callable(package: str, module: str, function: str) -> None:
    """Make ``package`` callable: a call is forwarded to ``function`` in ``module``."""
    made: Any = sys.modules[package]
    made.__class__ = CallablePackage
    made._module, made._function = module, function
