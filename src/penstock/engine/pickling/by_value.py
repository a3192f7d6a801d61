"""Registers modules that workers cannot import, so that cloudpickle pickles them by value.

Plugin loaders, config systems and ``runpy`` execute files under names that cannot be imported.

Tested by ``tests/integration/engine/pickling/test_scripts.py``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import cloudpickle

_KNOWN = (
    frozenset(("__main__", "__mp_main__", "penstock", "torch", "numpy")) | sys.stdlib_module_names
)


class ByValueModules:
    """Registers modules with cloudpickle. A context manager that unregisters them on exit."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> ByValueModules:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names & set(cloudpickle.list_registry_pickle_by_value()):
            if name in sys.modules:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def check(self, name: str) -> None:
        """Register the module if needed. Called before any of its objects is pickled."""
        module = sys.modules.get(name)
        if module is None or name.partition(".")[0] in _KNOWN or _is_found(name, module):
            return
        if name not in cloudpickle.list_registry_pickle_by_value():  # not registered by the user
            cloudpickle.register_pickle_by_value(module)
            self.names.add(name)


def _is_found(name: str, module: Any) -> bool:
    """Return True if an import finds this file. Anything but Python source counts as found."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return True
    spec = _spec_of(name)
    return spec is not None and (not spec.has_location or _is_same(str(spec.origin), file))


def _spec_of(name: str) -> Any:
    """Return the spec that an import in a new process would find, or None."""
    path = None
    parent = name.rpartition(".")[0]
    if parent:
        path = getattr(sys.modules.get(parent), "__path__", None)
        if path is None or _spec_of(parent) is None:
            return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None


def _is_same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)
