"""A script or module, run as ``python`` would run it, in this process.

    argv, sys.path, __main__, exit codes and signals are the script's; tracebacks begin with it

torch is patched when the script imports it: a script that does not pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from penstock.errors import BadTarget

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))


def run_file(script: str, arguments: Sequence[str]) -> NoReturn:
    """Run a script, or a folder or archive with a ``__main__.py``, and exit as it does."""
    if not os.path.exists(script):
        raise BadTarget(
            f"there is no script {script!r} here ({os.getcwd()})",
            remedy="penstock run path/to/train.py, or penstock run -m package.module",
        )
    sys.argv = [script, *arguments]
    if os.path.isdir(script) or not _is_source(script):
        _finish(lambda: runpy.run_path(script, run_name="__main__"))
    _enter_folder(os.path.dirname(os.path.realpath(script)))

    path = os.path.abspath(script)

    def run() -> None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        module = types.ModuleType("__main__")
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        module.__dict__.update(
            __file__=path, __builtins__=__builtins__, __loader__=loader, __cached__=None
        )
        sys.modules["__main__"] = module
        exec(code, module.__dict__)

    _finish(run)


def run_module(name: str, arguments: Sequence[str]) -> NoReturn:
    """``python -m name``."""
    _enter_folder(os.getcwd())
    try:
        is_there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        is_there = False
    if not is_there:
        raise BadTarget(
            f"there is no module {name!r} here ({os.getcwd()})",
            remedy="penstock run -m package.module, or penstock run path/to/train.py",
        )
    sys.argv = [name, *arguments]
    _finish(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def when_torch_is_imported(then: Callable[[], None]) -> None:
    """Call ``then`` as soon as torch is there: now, or when somebody has imported it."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(then))


class _Watch(importlib.abc.MetaPathFinder):
    """Sees torch being imported, once, and steps aside."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute, then = spec.loader.exec_module, self._then

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _is_source(script: str) -> bool:
    with open(script, "rb") as file:
        return file.read(4) != b"PK\x03\x04" and not script.endswith(".pyc")


def _enter_folder(folder: str) -> None:
    """Where imports are looked for first: python puts the script's folder there, not ours."""
    if sys.path:
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _finish(run: Callable[[], Any]) -> NoReturn:
    """Run to the end and leave as the interpreter would."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and _is_ours(trace):
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and trace is None:
            error.__traceback__ = None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None  # it has been shown; the rest is the interpreter's
            raise KeyboardInterrupt from None
        sys.exit(1)
    sys.exit(0)


def _is_ours(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_OWN_FOLDER) or file == "<frozen runpy>" or file == runpy.__file__
