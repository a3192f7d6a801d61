"""Exceptions of Penstock, each with a code and a message in four parts.

The four parts are what happened, where, the likely cause, and a remedy to paste.

    PenstockError
    +-- WorkerDied         [W01]  also RuntimeError: a worker process exited with samples to load
    +-- WorkerTimeout      [W02]  also RuntimeError: no batch within ``timeout`` seconds
    +-- StartFailed        [W03]  also RuntimeError: the worker processes could not be started
    +-- SampleTimeout      [W04]  also RuntimeError: a sample exceeded ``sample_timeout_s`` twice
    +-- Stuck              [W05]  also RuntimeError: the loader makes no progress
    +-- CannotTravel       [T01]  also TypeError and pickle.PicklingError: cannot be pickled
    +-- MismatchedSamples  [S01]  also RuntimeError: samples of a batch differ in shape or structure
    +-- TooManyBad         [S02]  also RuntimeError: more bad samples than ``max_bad`` allows
    +-- NoSubstitute       [S03]  also RuntimeError: all substitutes for a bad sample are bad
    +-- SharedDraw         [S04]  also RuntimeError: an async sample drew from a shared generator
    +-- BadArgument        [A01]  also ValueError: invalid value for a Penstock option
    +-- BadTarget          [D01]  also ValueError: ``script.py:name`` cannot be found or read
    +-- NoSuchDevice       [G01]  also RuntimeError: the device does not exist on this machine
    +-- DeviceFailed       [G02]  also the type torch raised: a batch was not copied to the GPU
    +-- BadTrace           [L01]  also ValueError: a file is not a Penstock trace, or is damaged
    +-- BadState           [R01]  also ValueError: not a loader state, or from a different loader
    +-- BadStore           [F01]  also ValueError: not a dataset, or one that cannot be opened
    +-- Damaged            [F02]  also OSError: bytes of a dataset have changed, or are invalid
    +-- CannotPack         [F03]  also ValueError: a sample or field cannot be stored when packing
    +-- CannotWrite        [F04]  also OSError: disk full, no permission, or no such folder
    +-- AlreadyThere       [F05]  also FileExistsError: writing would overwrite existing data
    +-- StorageFailed      [F06]  also OSError: an object in remote storage could not be read
    +-- BadImage           [I01]  also ValueError: an image cannot be decoded, or is too large
    +-- MissingExtra       [X01]  also ImportError: an optional package is not installed

Each class also derives from the exception that PyTorch or the standard library raises in the same
situation, so an ``except RuntimeError`` written for PyTorch's DataLoader keeps working. Every code
has a page in ``docs/errors/``. An exception raised by the user's ``dataset[i]`` keeps its own type
and does not derive from these classes (see :mod:`penstock.engine.pickling.exceptions`).
"""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import ClassVar


def warn_user(text: str) -> None:
    """Warn with the location of the nearest caller outside Penstock and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("penstock", "torch"):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


class NoStopIteration:
    """Context manager that turns a StopIteration from user code into a RuntimeError.

    Otherwise it would end the epoch silently. Python does the same inside generators.

    Args:
        function: Name of the user's function for the message, such as ``"collate_fn"``.

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
    """Base class of all Penstock errors.

    Args:
        what: What happened, with values, in one sentence.
        where: The sample, the worker, or the line of the user's code.
        likely: The likely cause, based on facts about the machine.
        remedy: What to do, as text to paste.
        facts: Data for programs. Each becomes an attribute of the error.

    Example:
        >>> error = WorkerTimeout("no batch in 5 s", remedy="DataLoader(..., timeout=60)", worker=1)
        >>> print(error)
        [W02] no batch in 5 s
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
        lines = [f"[{self.code}] {what}"]  # Python writes the name of the class before it
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
        return str(self.args[0])  # KeyError, a base of some subclasses, would add quotes

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
    """A worker process was killed or exited while it still had samples to load."""

    code = "W01"


class WorkerTimeout(PenstockError, RuntimeError):
    """The next batch did not arrive within the loader's ``timeout``."""

    code = "W02"


class StartFailed(PenstockError, RuntimeError):
    """The fork server or a worker process did not start."""

    code = "W03"


class SampleTimeout(PenstockError, RuntimeError):
    """A sample took longer than the loader's ``sample_timeout_s`` twice."""

    code = "W04"


class Stuck(PenstockError, RuntimeError):
    """The loader makes no progress. The message includes the stacks of all workers and threads."""

    code = "W05"


class CannotTravel(PenstockError, pickle.PicklingError, TypeError):
    """An object that the workers need cannot be sent to another process."""

    code = "T01"


class MismatchedSamples(PenstockError, RuntimeError):
    """The samples of a batch cannot be stacked. They differ in shape, type or structure."""

    code = "S01"


class TooManyBad(PenstockError, RuntimeError):
    """There are more bad samples than ``max_bad`` allows."""

    code = "S02"


class NoSubstitute(PenstockError, RuntimeError):
    """A bad sample could not be replaced because every substitute tried was also bad."""

    code = "S03"


class SharedDraw(PenstockError, RuntimeError):
    """An async sample drew from a generator that it shares with the other samples in flight."""

    code = "S04"


class BadArgument(PenstockError, ValueError):
    """Invalid value for a Penstock option."""

    code = "A01"

    @classmethod
    def unless_one_of(
        cls,
        name: str,
        value: object,
        known: tuple[str, ...],
        call: str = "DataLoader",
        likely: str | None = None,
    ) -> None:
        """Raise unless ``value`` is in ``known``. Without a similar one, suggest ``likely``."""
        if value not in known:
            import difflib

            near = [*difflib.get_close_matches(str(value), known, n=1), likely or known[0]]
            raise cls(
                f"{name}={value!r} must be one of {', '.join(map(repr, known))}",
                remedy=f"{call}(..., {name}={near[0]!r})",
            )


class BadTarget(PenstockError, ValueError):
    """The target of a command, such as ``script.py:name``, cannot be found or read."""

    code = "D01"


class NoSuchDevice(PenstockError, RuntimeError):
    """The requested device does not exist on this machine, or torch does not support it."""

    code = "G01"


class DeviceFailed(PenstockError, RuntimeError):
    """A batch was not copied to the GPU: it is out of memory, lost, or does not finish."""

    code = "G02"


class BadTrace(PenstockError, ValueError):
    """A file cannot be read as a trace."""

    code = "L01"


class BadState(PenstockError, ValueError):
    """A state cannot be loaded: it is invalid, or from a different version or loader."""

    code = "R01"


class BadStore(PenstockError, ValueError):
    """A path has no dataset, or one that is unfinished, invalid, or of a newer version."""

    code = "F01"


class Damaged(PenstockError, OSError):
    """Bytes of a dataset have changed since it was written or opened, or are invalid."""

    code = "F02"


class CannotPack(PenstockError, ValueError):
    """A sample, or one of its fields, cannot be stored as declared."""

    code = "F03"


class CannotWrite(PenstockError, OSError):
    """Data cannot be written: disk full, permission denied, or the folder does not exist."""

    code = "F04"


class AlreadyThere(PenstockError, FileExistsError):
    """The output already exists. Nothing is overwritten."""

    code = "F05"


class StorageFailed(PenstockError, OSError):
    """An object in remote storage could not be read."""

    code = "F06"


class BadImage(PenstockError, ValueError):
    """An image cannot be decoded, or is rejected because of its size."""

    code = "I01"


class MissingExtra(PenstockError, ImportError):
    """An optional package is not installed."""

    code = "X01"
    requirements: ClassVar[dict[str, tuple[str, ...]]] = {  # as in pyproject.toml; a test compares
        "arrow": ("pyarrow>=16.1",),
        "images": ("opencv-python-headless>=4.5", "pillow>=9.1", "simplejpeg>=1.6"),
        "lance": ("pylance>=0.20",),
        "prometheus": ("prometheus-client>=0.17",),
        "ray": ("ray>=2.9",),
        "remote": ("obstore>=0.8",),
    }

    @classmethod
    def named(cls, extra: str, what: str) -> MissingExtra:
        """Return the error for a missing extra. The remedy does not need Penstock's sources.

        Example:
            >>> print(MissingExtra.named("ray", "Ray is not installed").remedy)
            pip install "ray>=2.9"
        """
        quoted = " ".join(f'"{one}"' for one in cls.requirements[extra])
        return cls(what, remedy=f"pip install {quoted}", extra=extra)
