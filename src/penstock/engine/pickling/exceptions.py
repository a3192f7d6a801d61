"""Sends an exception of a worker to the parent, which raises it again with its own type.

    worker: describe(error) -- plain values, always picklable --> parent: rebuild(report)

PyTorch re-creates the exception from a message, which loses the type of any class whose
constructor wants more than one argument, and hangs when the exception cannot be pickled. Here the
report carries several ways to rebuild it, from best to plainest, and the parent takes the first
that works. The rebuilt exception is an instance of the original class, keeps its ``args`` and
attributes, knows ``sample_index`` and ``worker_id``, and reads as PyTorch's message does.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle

from penstock.engine.memory import payload
from penstock.errors import PenstockError


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """What a worker says about an exception; holds bytes and text only."""

    kind: str
    trace: str
    where: str
    worker: int
    index: bytes | None = None
    ours: bytes | None = None
    forms: tuple[bytes | None, ...] = ()
    """What it is rebuilt from, best first: see :func:`_forms_of`."""


class WorkerTraceback(Exception):
    """The worker's own traceback, shown as the cause of the rebuilt exception."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def describe(error: BaseException, *, worker: int, where: str, index: Any = None) -> ErrorReport:
    """Turn an exception into a report that can always be sent. Called from: the worker."""
    trace = "".join(traceback.format_exception(type(error), error, _own_frames_cut(error)))
    trace += _advice_on(error)
    own = getattr(error, "sample_index", None)
    if isinstance(own, int):  # raised while one item of ours loads many samples
        index = own
    return ErrorReport(
        kind=type(error).__name__,
        trace=trace,
        where=where,
        worker=worker,
        index=_dump(index),
        ours=_dump(error) if isinstance(error, PenstockError) else None,
        forms=_forms_of(error),
    )


def rebuild(report: ErrorReport) -> BaseException:
    """The exception to raise in the parent. Called from: the parent, when its batch is due."""
    ours: PenstockError | None = _load(report.ours)
    if ours is not None:
        ours.__cause__ = WorkerTraceback(report.trace)
        return ours
    index = _load(report.index)
    where = report.where if index is None else f"{report.where} while loading {_name(index)}"
    message = f"Caught {report.kind} {where}.\nOriginal {report.trace}"
    make = functools.partial(_with_message, message)
    error = _first_that_works(report.forms, make) or RuntimeError(message)
    error.__dict__.update(sample_index=index, worker_id=report.worker)
    error.__cause__ = WorkerTraceback(report.trace)
    return error


def _name(index: Any) -> str:
    return f"samples {index!r}" if isinstance(index, list) else f"sample {index!r}"


def _forms_of(error: BaseException) -> tuple[bytes | None, ...]:
    """Class, arguments and state; without its own state; with its text as the only argument."""
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
            continue  # SystemExit and its like are not ours to raise in the user's program
        with suppress(Exception):
            return make(*content)
    return None


def _reduce_error(error: Any) -> Any:
    """How an exception inside another one is pickled: as several forms, like the outer one.

    None for other objects, and for our own errors, which pickle themselves.
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
    """An instance of ``kind`` that keeps its arguments but whose text is ``message``."""
    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": lambda self: message,
        "__reduce__": lambda self: (_plain, (kind, args, native, own)),
    }
    try:
        return _plain(type(kind.__name__, (kind,), namespace), args, native, own)
    except Exception:  # a class that forbids subclasses, or wants arguments for them
        error = _plain(kind, args, native, own)
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(message)
        return error


def _plain(
    kind: type[Exception], args: tuple[Any, ...], native: dict[str, Any], own: dict[str, Any]
) -> Exception:
    try:
        error = kind.__new__(kind, *args)
    except Exception:  # its own __new__ wants something else
        native_kind: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        error = native_kind.__new__(kind, *args)
    error.args = args
    for name, value in native.items():
        with suppress(AttributeError, TypeError):
            setattr(error, name, value)
    error.__dict__.update(own)
    return error


def _native_state(error: BaseException) -> dict[str, Any]:
    """What built-in exceptions keep outside ``args``: a file name, an encoding, a missing name."""
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
    """The traceback from the user's first frame on; ours say nothing to the user."""
    trace = error.__traceback__
    while trace is not None and "penstock" in trace.tb_frame.f_globals.get("__name__", ""):
        trace = trace.tb_next
    return trace or error.__traceback__


def _own_state(error: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "__notes__"}


def _advice_on(error: BaseException) -> str:
    """A pool that user code starts in a worker sends functions by name, ours sends them whole."""
    if isinstance(error, pickle.PicklingError) and "__main__" in safe_text(error):
        return (
            "  Likely: a process pool inside a worker sends what stands in the script by its name, "
            "and the script is not run in workers.\n"
            "  Try: put the function in a module and import it from there.\n"
        )
    return ""


def safe_text(error: BaseException) -> str:
    """``str(error)``, whatever the class of the user's own does."""
    try:
        return str(error)
    except Exception:
        return "<the exception's own text raised>"


def _dump(value: Any) -> bytes | None:
    if value is None:
        return None
    kinds = (_ByNamePickler, _ByValuePickler) if payload.is_forked() else (_ByValuePickler,)
    for kind in kinds:
        with suppress(Exception):  # by value, or the plainer form beside it, which always works
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
