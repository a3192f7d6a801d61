"""Runs a script or module in this process, as ``python`` would run it.

    argv, sys.path, __main__, exit codes and signals are the script's; tracebacks begin with it

torch is patched when the script imports it. A script that does not import torch has no overhead.

Tested by ``tests/integration/cli/test_run_training.py``.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import importlib.util
import io
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import machinery
from typing import Any, NoReturn

from penstock.errors import BadTarget

PACKAGES_WITH_TORCH = ("loader", "packing", "engine", "sources", "device", "conv", "verify")
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def run_file(script: str, arguments: Sequence[str]) -> NoReturn:
    """Run a script, or a folder or archive with a ``__main__.py``, and exit with its status.

    ``-`` means standard input, as for python.
    """
    if script == "-":
        _run_stdin(arguments)
    if not os.path.exists(script):
        raise BadTarget(
            f"script {script!r} not found (current directory: {os.getcwd()})",
            remedy="penstock run path/to/train.py, or penstock run -m package.module",
        )
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    if os.path.isdir(path) or _is_archive(path):
        folder, loader = path, _main_of(path, module)
    else:
        folder = os.path.dirname(os.path.realpath(script))
        kind = (
            machinery.SourcelessFileLoader if path.endswith(".pyc") else machinery.SourceFileLoader
        )
        loader = kind("__main__", path)
        vars(module).update(__file__=path, __loader__=loader, __cached__=None)
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    vars(module).update(__builtins__=builtins)
    sys.argv = [script, *arguments]
    _enter_folder(folder)

    def run() -> None:
        code = _code_of(loader, path)
        sys.modules["__main__"] = module
        exec(code, vars(module))

    _finish(run)


def _is_archive(path: str) -> bool:
    """Return True for a zip archive. Searches its end mark first: zipfile is slow to import."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16) - 22))
            if b"PK\5\6" not in file.read():
                return False
    except OSError:
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _run_stdin(arguments: Sequence[str]) -> NoReturn:
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.argv = ["-", *arguments]
    _enter_folder("")

    def run() -> None:
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
        sys.modules["__main__"] = module
        exec(code, vars(module))

    _finish(run)


def _main_of(folder: str, module: types.ModuleType) -> Any:
    """Set up ``module`` as the ``__main__.py`` of a folder or archive and return its loader."""
    spec = machinery.PathFinder.find_spec("__main__", [folder])
    if spec is None or spec.loader is None:
        raise BadTarget(
            f"no __main__.py found in {folder!r}", remedy="penstock run path/to/train.py"
        )
    vars(module).update(vars(importlib.util.module_from_spec(spec)))
    return spec.loader


def _code_of(loader: Any, path: str) -> Any:
    if isinstance(loader, machinery.SourceFileLoader) and loader.path == path:
        with io.open_code(path) as file:  # python does not cache the bytecode of a script
            return compile(file.read(), path, "exec", dont_inherit=True)
    return loader.get_code("__main__")


def run_module(name: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module like ``python -m name``."""
    _enter_folder(os.getcwd())
    sys.argv = ["-m", *arguments]  # visible to the parent packages
    if name.startswith(".") or not _is_module(name):
        raise BadTarget(
            f"module {name!r} not found (current directory: {os.getcwd()})",
            remedy="penstock run -m package.module, or penstock run path/to/train.py",
        )
    _finish(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def when_imported(name: str, then: Callable[[], None], needs: Sequence[str] = ()) -> None:
    """Call ``then`` once a module is imported: immediately, or after its first import.

    Args:
        needs: Penstock packages that ``then`` uses and that import the module themselves.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path[:0] = [_First(name, needs), _Watch(name, then)]


class _Watch:
    """Import hook that calls a function after the first successful import of a module.

    Libraries look the module up long before they import it, and a failed import can be retried.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._asking: int | None = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name or self._asking == threading.get_ident():
            return None
        self._asking = threading.get_ident()
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = None
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # several hooks may be nested
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _First:
    """Import hook that imports the watched module before certain packages that import it.

    The callback uses these packages, so they must not be half imported when it runs.
    """

    def __init__(self, name: str, packages: Sequence[str]) -> None:
        self._name, self._packages = name, packages
        self._spec: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        package, _, rest = fullname.partition(".")
        if package != "penstock" or rest.partition(".")[0] not in self._packages:
            return None
        importlib.import_module(self._name)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if fullname not in sys.modules:
            return None
        self._spec = sys.modules[fullname].__spec__  # the import above has loaded it
        return importlib.util.spec_from_loader(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # a parent package, or one of its dependencies. For the
        missing = str(error.name)  # latter, runpy raises again with a traceback.
        return missing != name and not name.startswith(f"{missing}.")
    except ValueError:
        return False
    except Exception:
        return True


def _enter_folder(folder: str) -> None:
    """Put the script's folder first in ``sys.path``, as python does."""
    if getattr(sys.flags, "safe_path", False):  # -P: python does not add it
        return
    sys.path[:1] = [folder]


def _finish(run: Callable[[], Any]) -> NoReturn:
    """Run to the end and exit as the interpreter would."""
    found: BaseException | None = None
    is_interrupted: list[bool] = []
    atexit.register(_end_as_interrupted, is_interrupted)  # runs after the script's own functions
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        found = error
    if found is None:
        sys.exit(0)
    _show(found)
    if isinstance(found, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # already shown; the interpreter does the rest
        is_interrupted.append(True)
        raise KeyboardInterrupt
    sys.exit(1)


def _end_as_interrupted(is_interrupted: list[bool]) -> None:
    """Let the interpreter end with SIGINT (status 130 in a shell) after an uncaught Ctrl-C.

    It remembers only how the last ``exec`` ended, and the report at exit imports modules that use
    ``exec``.
    """
    if is_interrupted:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _show(error: BaseException) -> None:
    """Print an error as the interpreter does, without Penstock's frames."""
    trace = _without_ours(error)
    if isinstance(error, SyntaxError) and trace is None:
        error.__traceback__ = None
    shown = type(error), error.with_traceback(trace), trace
    sys.last_type, sys.last_value, sys.last_traceback = shown
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(*shown)
    except SystemExit:
        raise
    except BaseException as of_hook:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(of_hook), of_hook, _without_ours(of_hook))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(*shown)


def _without_ours(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    return trace


def _is_ours(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_OWN_FOLDER) or file == "<frozen runpy>" or file == runpy.__file__
