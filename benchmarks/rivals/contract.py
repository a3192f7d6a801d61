"""What a contender must be able to do, so that all of them can be asked the same questions.

    peers.py (any environment)  --job as JSON-->  turn.py (the contender's own environment)
                                <--one line of JSON--

A contender is a class. It writes the common data in its own format once (``prepare``) and makes a
loader over it (``open``). What it does not offer it says by raising :class:`NotOffered`, with the
reason: that becomes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SIZE = 224
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class NotOffered(Exception):
    """This contender has no such thing; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to load, and how.

    Args:
        kind: "jpeg", "small" and "large" (tensors), "raw" (pixels), "numbers", "strings".
        data: Where the common data lie: ``KIND.npy``, or a folder of classes for JPEGs.
        home: Where this contender keeps them in its own format.
        count: Number of samples.
        work: For numbers, a class of work.py: what becomes of a number.
        is_endless: Whether epochs may follow each other without an end, where a peer starts its
            workers anew for each.
        seed: None where nobody asks for the same run twice.
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
        """This contender's own copy of the data."""
        return self.home / f"{self.kind}-{self.count}"

    def with_workers(self, num_workers: int) -> Job:
        return replace(self, num_workers=num_workers)


class Feed:
    """A loader as the questions see it: iterate over it once for each epoch.

    Args:
        adapt: From the loader's batch to a tensor, or to a tuple that begins with one.
        state: What must be saved to go on after the last batch; None if there is no such thing.
        restore: Takes it, before the first batch.
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
    """As the table shows it."""
    kinds: tuple[str, ...] = ("jpeg", "small", "large", "raw", "numbers")
    """What it can load at all."""
    formats: tuple[str, ...] = ()
    """What it writes in a form of its own before it loads it."""
    antialias: tuple[bool, ...] = (True, False)
    without_state = "no state to save"
    """Why it cannot be resumed, where that is so."""
    has_processes = True
    """Whether samples are loaded in worker processes."""

    def prepare(self, job: Job) -> None:
        """Write the data in the format of this peer; nothing where the common files are read."""

    def open(self, job: Job) -> Feed:
        """A loader that shuffles."""
        raise NotOffered("no loader for this")


def make_names(job: Job) -> list[str]:
    """What a dataset of files holds: a path for each sample."""
    return [f"train/n{number % 1000:08d}/image-{number:09d}.JPEG" for number in range(job.count)]


def jpeg_files(job: Job) -> list[tuple[str, int]]:
    """Paths and classes, in the order of their names."""
    return [
        (str(path), int(path.parent.name)) for path in sorted((job.data / "jpeg").glob("*/*.jpg"))
    ][: job.count]
