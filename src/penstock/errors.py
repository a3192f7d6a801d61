"""What can go wrong, said in four parts: what, where, the likely cause, and what to paste.

    PenstockError
    +-- WorkerDied         [W01]  also RuntimeError: a worker process ended while it had work
    +-- WorkerTimeout      [W02]  also RuntimeError: no batch within ``timeout`` seconds
    +-- StartFailed        [W03]  also RuntimeError: the worker processes could not be started
    +-- CannotTravel       [T01]  also TypeError and pickle.PicklingError: not serialisable
    +-- MismatchedSamples  [S01]  also RuntimeError: samples of one batch differ in shape or form
    +-- BadArgument        [A01]  also ValueError: an argument of ours has a value we do not know
    +-- BadTarget          [D01]  also ValueError: there is nothing to try at ``script.py:name``
    +-- NoSuchDevice       [G01]  also RuntimeError: no GPU of that name or number here
    +-- DeviceFailed       [G02]  also what torch raised: a batch did not get to the GPU
    +-- BadTrace           [L01]  also ValueError: a file is no trace of ours, or damaged
    +-- BadState           [R01]  also ValueError: a state is none, or another loader's
    +-- BadStore           [F01]  also ValueError: no packed set, or one that cannot be opened
    +-- Damaged            [F02]  also OSError: bytes of a packed set are not those written
    +-- CannotPack         [F03]  also ValueError: a sample or field has no place in a packed set
    +-- CannotWrite        [F04]  also OSError: no room, no right, or no folder to write to
    +-- AlreadyThere       [F05]  also FileExistsError: writing would overwrite something
    +-- BadImage           [I01]  also ValueError: an image cannot be decoded, or is refused
    +-- MissingExtra       [X01]  also ImportError: a package that is needed here is not installed

Each class also derives from what PyTorch or the standard library raises in that place, so an
``except RuntimeError`` written for PyTorch's DataLoader keeps working. Every code has a page under
``docs/errors/``. An exception raised by the user's own ``dataset[i]`` is none of these: it arrives
with its own type (see :mod:`penstock.engine.pickling.exceptions`).
"""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import ClassVar


def warn_user(text: str) -> None:
    """A warning that points at the user's line: the nearest that is neither ours nor torch's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("penstock", "torch"):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


class NoStopIteration:
    """While this lasts, a StopIteration of user code is a RuntimeError that names the function.

    It would read as the end of the epoch. Python does the same inside generators.

    Args:
        function: The user's function, as in ``"collate_fn"``.

    Example:
        >>> with NoStopIteration("collate_fn"):
        ...     next(iter([]))
        Traceback (most recent call last):
        RuntimeError: collate_fn raised StopIteration
    """

    def __init__(self, function: str) -> None:
        self._function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise self.error_for(self._function) from error

    @staticmethod
    def error_for(function: str) -> RuntimeError:
        return RuntimeError(f"{function} raised StopIteration")


class PenstockError(Exception):
    """Base of every error that Penstock raises on its own account.

    Args:
        what: What happened, with values, in one sentence.
        where: The sample, worker, or line of the user's code.
        likely: The probable cause, from what is known about the machine.
        remedy: What to do, as text to paste.
        facts: Data for programs; each becomes an attribute.

    Example:
        >>> error = WorkerTimeout("no batch in 5 s", remedy="DataLoader(..., timeout=60)", worker=1)
        >>> print(error)
        WorkerTimeout [W02]: no batch in 5 s
          Try: DataLoader(..., timeout=60)
        >>> error.worker
        1
    """

    code: ClassVar[str] = ""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        likely: str | None = None,
        remedy: str | None = None,
        **facts: object,
    ) -> None:
        lines = [f"{type(self).__name__} [{self.code}]: {what}"]
        lines += [
            f"  {label}: {text}"
            for label, text in (("In", where), ("Likely", likely), ("Try", remedy))
            if text
        ]
        super().__init__("\n".join(lines))
        self.what = what
        self.likely = likely
        self.remedy = remedy
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError, which some derive from, would show it in quotes

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    cls: type[PenstockError], args: tuple[object, ...], state: dict[str, object]
) -> PenstockError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class WorkerDied(PenstockError, RuntimeError):
    """A worker process ended, by a signal or on its own, while it still had samples to load."""

    code = "W01"


class WorkerTimeout(PenstockError, RuntimeError):
    """The next batch did not arrive within the ``timeout`` that the loader was given."""

    code = "W02"


class StartFailed(PenstockError, RuntimeError):
    """The fork server or a worker process did not start."""

    code = "W03"


class SampleTimeout(PenstockError, RuntimeError):
    """A sample took longer than the ``sample_timeout_s`` that the loader was given, twice."""

    code = "W04"


class Stuck(PenstockError, RuntimeError):
    """The loader waits for something that nobody is doing: a fault of its own, with all stacks."""

    code = "W05"


class CannotTravel(PenstockError, pickle.PicklingError, TypeError):
    """Something that a worker process needs cannot be sent to another process."""

    code = "T01"


class MismatchedSamples(PenstockError, RuntimeError):
    """Samples of one batch cannot be stacked because they differ in shape, type or structure."""

    code = "S01"


class TooManyBad(PenstockError, RuntimeError):
    """More samples were bad than ``max_bad`` allows."""

    code = "S02"


class NoSubstitute(PenstockError, RuntimeError):
    """A bad sample was to be replaced, and every substitute tried was bad, too."""

    code = "S03"


class BadArgument(PenstockError, ValueError):
    """An argument that only Penstock knows has a value that it does not know."""

    code = "A01"

    @classmethod
    def unless_one_of(
        cls, name: str, value: object, known: tuple[str, ...], call: str = "DataLoader"
    ) -> None:
        """Raise unless ``value`` is one of the words that are known."""
        if value not in known:
            raise cls(
                f"{name}={value!r} is not known; it is one of {', '.join(map(repr, known))}",
                remedy=f"{call}(..., {name}={known[0]!r})",
            )


class BadTarget(PenstockError, ValueError):
    """What a command was told to try, as ``script.py:name``, cannot be found or read."""

    code = "D01"


class NoSuchDevice(PenstockError, RuntimeError):
    """The device that was asked for does not exist on this machine, or not for this torch."""

    code = "G01"


class DeviceFailed(PenstockError, RuntimeError):
    """The GPU did not take a batch: it is out of memory, lost, or does not get done."""

    code = "G02"


class BadTrace(PenstockError, ValueError):
    """A file that should hold a trace cannot be read as one."""

    code = "L01"


class BadState(PenstockError, ValueError):
    """A state cannot be loaded: it is none, of another version, or belongs to another loader."""

    code = "R01"


class BadStore(PenstockError, ValueError):
    """There is no packed set at a path, or it is unfinished, foreign, or of a newer version."""

    code = "F01"


class Damaged(PenstockError, OSError):
    """Bytes of a packed set are not the ones that were written."""

    code = "F02"


class CannotPack(PenstockError, ValueError):
    """A sample, or a field of it, cannot be written as it was declared."""

    code = "F03"


class CannotWrite(PenstockError, OSError):
    """There is no room, no permission, or no folder to write to."""

    code = "F04"


class AlreadyThere(PenstockError, FileExistsError):
    """What was to be written is there already; nothing is overwritten."""

    code = "F05"


class BadImage(PenstockError, ValueError):
    """An image cannot be decoded, or is refused because of its size."""

    code = "I01"


class MissingExtra(PenstockError, ImportError):
    """A package that only some people need is not installed."""

    code = "X01"
