"""Sends an exception from a worker to the parent, which raises it with its original type.

    worker: describe(error) -- plain values, always picklable --> parent: rebuild(report)

PyTorch rebuilds the exception from its message. That loses the type of any class whose constructor
takes more than one argument, and hangs if the exception cannot be pickled. Here, the report
contains several forms of the exception, from the most complete to the simplest, and the parent uses
the first that works. The rebuilt exception is an instance of the original class. It keeps ``args``
and attributes, has ``sample_index`` and ``worker_id``, and its message has PyTorch's format.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle

from penstock.engine.memory import payload
from penstock.errors import PenstockError
from penstock.named_tuple import NamedTuple


class ErrorReport(NamedTuple):
    """A worker's report of an exception. Contains only bytes, text and numbers."""

    kind: str
    trace: str
    where: str
    worker: int
    index_pickle: bytes | None = None
    ours: bytes | None = None
    forms: tuple[bytes | None, ...] = ()
    """Pickled forms of the exception, best first. See :func:`_forms_of`."""
    path: str | None = None
    """The file of the sample, if it is known."""


class WorkerTraceback(Exception):
    """The worker's own traceback, shown as the cause of the rebuilt exception."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def describe(
    error: BaseException, *, worker: int, where: str, index: Any = None, path: str | None = None
) -> ErrorReport:
    """Convert an exception to a report that can always be sent. Called by the worker."""
    trace = "".join(traceback.format_exception(type(error), error, _own_frames_cut(error)))
    trace += _advice_on(error)
    own = getattr(error, "sample_index", None)
    if isinstance(own, int):  # raised while one Penstock item loads many samples
        index, path = own, None
    return ErrorReport(
        kind=type(error).__name__,
        trace=trace,
        where=where,
        worker=worker,
        index_pickle=_dump(index),
        ours=_dump(error) if isinstance(error, PenstockError) else None,
        forms=_forms_of(error),
        path=path,
    )


def rebuild(report: ErrorReport) -> BaseException:
    """Return the exception to raise. Called by the parent when the batch is due."""
    ours: PenstockError | None = _load(report.ours)
    if ours is not None:
        ours.__cause__ = WorkerTraceback(report.trace)
        return ours
    index = _load(report.index_pickle)
    where = report.where
    if index is not None:
        where += f" while loading {_name(index)}{f' ({report.path})' if report.path else ''}"
    message = f"Caught {report.kind} {where}.\nOriginal {report.trace}"
    make = functools.partial(_with_message, message)
    error = _first_that_works(report.forms, make) or RuntimeError(message)
    error.__dict__.update(sample_index=index, worker_id=report.worker)
    error.__cause__ = WorkerTraceback(report.trace)
    return error


def _name(index: Any) -> str:
    return f"samples {index!r}" if isinstance(index, list) else f"sample {index!r}"


def _forms_of(error: BaseException) -> tuple[bytes | None, ...]:
    """Return three pickled forms: complete, without instance attributes, and with text only."""
    kind, native, own = type(error), _native_state(error), _own_state(error)
    return (
        _dump((kind, error.args, native, own)),
        _dump((kind, error.args, native, {})) if own else None,
        _dump((kind, (safe_text(error),), {}, {})),
    )


def _first_that_works(
    forms: tuple[bytes | None, ...], make: Callable[..., Exception]
) -> Exception | None:
    for packed in forms:
        content = _load(packed)
        if content is None or not issubclass(content[0], Exception):
            continue  # do not raise SystemExit and similar in the user's program
        with suppress(Exception):
            return make(*content)
    return None


def _reduce_error(error: Any) -> Any:
    """Reduce a nested exception to several forms, like the outer one.

    Returns None for other objects and for Penstock errors, which have their own pickling.
    """
    if not isinstance(error, BaseException) or isinstance(error, PenstockError):
        return None
    return _member, (type(error).__name__, safe_text(error), _forms_of(error))


def _member(kind: str, text: str, forms: tuple[bytes | None, ...]) -> Exception:
    return _first_that_works(forms, _plain) or RuntimeError(f"{kind}: {text}")


def _with_message(
    message: str,
    kind: type[Exception],
    args: tuple[Any, ...],
    native: dict[str, Any],
    own: dict[str, Any],
) -> Exception:
    """Create an instance of ``kind`` with its arguments but with ``message`` as its text."""
    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": lambda self: message,
        "__reduce__": lambda self: (_plain, (kind, args, native, own)),
    }
    try:
        return _plain(type(kind.__name__, (kind,), namespace), args, native, own)
    except Exception:  # the class forbids subclasses or needs class arguments
        error = _plain(kind, args, native, own)
        if hasattr(error, "add_note"):  # Python 3.11 and later
            error.add_note(message)
        return error


def _plain(
    kind: type[Exception], args: tuple[Any, ...], native: dict[str, Any], own: dict[str, Any]
) -> Exception:
    try:
        error = kind.__new__(kind, *args)
    except Exception:  # its own __new__ has different arguments
        native_kind: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        error = native_kind.__new__(kind, *args)
    error.args = args
    for name, value in native.items():
        with suppress(AttributeError, TypeError):
            setattr(error, name, value)
    error.__dict__.update(own)
    return error


def _native_state(error: BaseException) -> dict[str, Any]:
    """Return fields of built-in exceptions outside ``args``, such as a file name or encoding."""
    state = {}
    for base in type(error).__mro__:
        if base.__module__ != "builtins" or base is BaseException:
            continue
        for name, member in vars(base).items():
            if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member):
                value = getattr(error, name, None)
                # The members of a group are in its args already.
                if value is not None and not name.startswith("__") and name != "exceptions":
                    state[name] = value
    return state


def _own_frames_cut(error: BaseException) -> Any:
    """Return the traceback from the first user frame on, without Penstock's frames."""
    trace = error.__traceback__
    while trace is not None and "penstock" in trace.tb_frame.f_globals.get("__name__", ""):
        trace = trace.tb_next
    return trace or error.__traceback__


def _own_state(error: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "__notes__"}


def _advice_on(error: BaseException) -> str:
    """Return advice if a process pool in user code cannot pickle a function of the script."""
    if isinstance(error, pickle.PicklingError) and "__main__" in safe_text(error):
        return (
            "  Likely: a process pool inside a worker pickles functions of the script by name, and "
            "workers do not run the script.\n"
            "  Try: put the function in a module and import it from there.\n"
        )
    return ""


def safe_text(error: BaseException) -> str:
    """Return ``str(error)``. Never raises."""
    try:
        return str(error)
    except Exception:
        return "<str() of the exception failed>"


def _dump(value: Any) -> bytes | None:
    if value is None:
        return None
    kinds = (_ByNamePickler, _ByValuePickler) if payload.is_forked() else (_ByValuePickler,)
    for kind in kinds:
        with suppress(Exception):  # the next pickler or a simpler form is tried instead
            stream = io.BytesIO()
            kind(stream, protocol=5).dump(value)
            return stream.getvalue()
    return None


class _ByNamePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return _reduce_error(obj) or NotImplemented


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        return _reduce_error(obj) or super().reducer_override(obj)


def _load(data: bytes | None) -> Any:
    with suppress(Exception):
        return None if data is None else pickle.loads(data)
    return None
