"""Interface of a contender, so that all of them run the same measurements.

    peers.py (any environment)  --job as JSON-->  turn.py (the contender's own environment)
                                <--one line of JSON--

A contender is a class. It writes the common data in its own format once (``prepare``) and creates a
loader for it (``open``). For a missing feature it raises :class:`NotOffered` with the reason, which
is shown in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SIZE = 224
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class NotOffered(Exception):
    """The contender does not support this. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Data to load, and settings.

    Args:
        kind: "jpeg", "small" and "large" (tensors), "raw" (pixels), "numbers", "strings".
        data: Folder of the common data: ``KIND.npy``, or a folder of classes for JPEGs.
        home: Folder with the data in the contender's own format.
        count: Number of samples.
        work: For numbers, the class in work.py that converts a number to a sample.
        is_endless: Allows one endless epoch, for peers that restart their workers in each epoch.
        seed: None if the run need not be reproducible.
    """

    kind: str
    data: Path
    home: Path
    count: int
    batch_size: int
    num_workers: int = 2
    antialias: bool = True
    is_float: bool = False
    work: Any = None
    is_endless: bool = False
    seed: int | None = None

    @property
    def folder(self) -> Path:
        """Path of the contender's own copy of the data."""
        return self.home / f"{self.kind}-{self.count}"

    def with_workers(self, num_workers: int) -> Job:
        return replace(self, num_workers=num_workers)


class Feed:
    """Common wrapper of a loader. Iterate over it once per epoch.

    Args:
        adapt: Converts the loader's batch to a tensor, or to a tuple that begins with one.
        state: Returns the state for resuming after the last batch. None if not supported.
        restore: Restores a state, before the first batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        adapt: Callable[[Any], Any] | None = None,
        state: Callable[[], Any] | None = None,
        restore: Callable[[Any], Any] | None = None,
    ) -> None:
        self.loader, self.adapt, self.state, self.restore = loader, adapt, state, restore

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        return batches if self.adapt is None else map(self.adapt, batches)


class Contender:
    """One row of a table."""

    name = ""
    """Name in the table."""
    kinds: tuple[str, ...] = ("jpeg", "small", "large", "raw", "numbers")
    """Kinds of data that it can load."""
    formats: tuple[str, ...] = ()
    """Kinds of data that it first converts to its own format."""
    antialias: tuple[bool, ...] = (True, False)
    without_state = "no state to save"
    """Reason shown if it cannot be resumed."""
    has_processes = True
    """True if samples are loaded in worker processes."""

    def prepare(self, job: Job) -> None:
        """Write the data in this peer's format. Does nothing if it reads the common files."""

    def open(self, job: Job) -> Feed:
        """Return a shuffling loader."""
        raise NotOffered("no loader for this")


def make_names(job: Job) -> list[str]:
    """Return the paths of a dataset of files, one per sample."""
    return [f"train/n{number % 1000:08d}/image-{number:09d}.JPEG" for number in range(job.count)]


def jpeg_files(job: Job) -> list[tuple[str, int]]:
    """Return paths and classes, sorted by name."""
    return [
        (str(path), int(path.parent.name)) for path in sorted((job.data / "jpeg").glob("*/*.jpg"))
    ][: job.count]
