"""Keeps modules that torch generates in memory, so that a killed worker leaves no folder behind.

Importing torchvision, ``torch._dynamo`` and other packages makes torch (up to at least 2.8)
generate a module for remote procedure calls. torch writes its source into a new temporary folder
and imports it from there. A normal exit of Python removes the folder, but a fork server and a
killed worker do not exit normally. This module runs the source without writing it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_NAME = "torch.distributed.nn.jit.instantiator"
_FOLDER = "<modules that torch generated>"


def keep_generated_modules_in_memory() -> None:
    """Prevent torch from writing generated modules. Call early in a process that loads samples."""
    if _NAME not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torch's module that writes generated modules, and replaces its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        make_folder = tempfile.TemporaryDirectory
        tempfile.TemporaryDirectory = _NoFolder  # type: ignore[misc,assignment]
        try:
            self._loader.exec_module(module)
        finally:
            tempfile.TemporaryDirectory = make_folder  # type: ignore[misc]
        if _FOLDER in sys.path:
            sys.path.remove(_FOLDER)
        if hasattr(module, "_write"):
            vars(module)["_write"] = _run_source
        else:  # another version of torch, left unchanged
            self._loader.exec_module(module)


class _NoFolder:
    name = _FOLDER

    def cleanup(self) -> None:
        """Do nothing, because there is no folder."""


def _run_source(path: str, text: str) -> None:
    """Create the module from its source ``text``. Replaces torch's function that writes a file."""
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)  # torch.jit reads it
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
