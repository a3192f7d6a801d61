"""The bad-samples file: one line of JSON for each failure of a sample.

    {"index": 17, "path": "/data/a.jpg", "error": "OSError: image file is truncated", "count": 2,
     "epoch": 0, "position": 341, "time": "2026-11-15T08:00:00+00:00", "end": "skip"}

The loader appends to the file, and ``penstock doctor bad.jsonl`` reads it. A line can be invalid,
because a process was killed during a write or because the file was edited by hand. The reader skips
invalid lines. Neither side imports torch.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, BinaryIO, TypeVar

_T = TypeVar("_T")
_MAX_LINE_BYTES = 1 << 16
_MAX_TEXT = 2000
"""Maximum length of an error text, so that lines stay far below the limit above."""


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A bad sample, with everything that the file contains about it.

    Args:
        index: The index from the sampler. Stored as its ``repr`` unless it is a number or a string.
        error: Type and text of the last error.
        count: Number of failures.
        epoch, position, time, end: Details of the last failure. ``end`` is the action taken.
    """

    index: int | str
    error: str = ""
    path: str | None = None
    count: int = 1
    epoch: int | None = None
    position: int | None = None
    time: str | None = None
    end: str | None = None

    @staticmethod
    def read_file(path: str | os.PathLike[str]) -> list[BadSample]:
        """Return the samples in a ``bad_samples_file``, in order of their first failure.

        Raises:
            OSError: The file does not exist or cannot be read.

        Example:
            >>> import pathlib, tempfile, penstock
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     file = pathlib.Path(folder, "bad.jsonl")
            ...     _ = file.write_text('{"index": 17}\\n{"index": 4}\\n')
            ...     [sample.index for sample in penstock.BadSample.read_file(file)]
            [17, 4]
        """
        return read(path).samples


@dataclass(frozen=True, kw_only=True)
class BadSampleFile:
    """The result of :func:`read`. Samples are in order of their first failure."""

    samples: list[BadSample]
    num_lines: int
    num_unreadable: int

    @property
    def indices(self) -> list[int]:
        """The integer indices, for ``torch.utils.data.Subset``."""
        return [sample.index for sample in self.samples if isinstance(sample.index, int)]


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Append one line. Several processes can append to one file.

    If the last line of the file is incomplete, the new line starts after it.

    Args:
        record: Fields as in the example of this module. ``index`` is required. ``time`` defaults to
            the current time.

    Raises:
        OSError: The file cannot be written, for example because the disk is full or the folder does
            not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "bad.jsonl")
        ...     append(file, {"index": 17, "error": "OSError: image file is truncated"})
        ...     append(file, {"index": 17, "error": "OSError: image file is truncated", "count": 2})
        ...     [(sample.index, sample.count) for sample in read(file).samples]
        [(17, 2)]
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    fields = {"time": now, **record, "index": plain_index(record["index"])}
    if "error" in fields:
        fields["error"] = str(fields["error"])[:_MAX_TEXT]
    line = json.dumps(fields, default=lambda value: repr(value)[:_MAX_TEXT]).encode("ascii") + b"\n"
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = b"\n" + line
        rest = memoryview(line)
        while rest.nbytes:  # a nearly full disk may accept only a part
            rest = rest[file.write(rest) :]


def read(path: str | os.PathLike[str]) -> BadSampleFile:
    """Read the file and merge its lines by sample. Reads line by line, in bounded memory.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    found: dict[int | str, BadSample] = {}
    num_lines = num_unreadable = 0
    with open(path, "rb") as file:
        for line in _lines(file):
            num_lines += 1
            sample = None if line is None else _parse(line)
            if sample is None:
                num_unreadable += 1
                continue
            earlier = found.get(sample.index)
            found[sample.index] = sample if earlier is None else _merge(earlier, sample)
    return BadSampleFile(
        samples=list(found.values()), num_lines=num_lines, num_unreadable=num_unreadable
    )


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the non-blank lines, and None for each line that is too long."""
    is_first = True
    while line := file.readline(_MAX_LINE_BYTES):
        if is_first:
            is_first, line = False, line.removeprefix(b"\xef\xbb\xbf")  # a BOM of some editors
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        elif line.strip():
            yield line


def _parse(line: bytes) -> BadSample | None:
    try:
        fields = json.loads(line.decode("utf-8"))
        index = fields["index"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(index) not in (int, str):
        return None
    return BadSample(
        index=index,
        error=_if_type(str, fields.get("error")) or "",
        path=_if_type(str, fields.get("path")),
        count=max(1, _if_type(int, fields.get("count")) or 1),
        epoch=_if_type(int, fields.get("epoch")),
        position=_if_type(int, fields.get("position")),
        time=_if_type(str, fields.get("time")),
        end=_if_type(str, fields.get("end")),
    )


def _if_type(kind: type[_T], value: Any) -> _T | None:
    return value if type(value) is kind else None


def _merge(earlier: BadSample, later: BadSample) -> BadSample:
    """Merge two lines of one sample. Fields missing from the later line keep the earlier value.

    The count in a line covers one run. If several runs share a file, lines are counted instead.
    """
    return replace(
        later,
        error=later.error or earlier.error,
        path=later.path if later.path is not None else earlier.path,
        count=max(later.count, earlier.count + 1),
        time=later.time or earlier.time,
        end=later.end or earlier.end,
    )


def plain_index(index: Any) -> int | str:
    """Return an index in the form used by the file and ``loader.bad_samples``."""
    if isinstance(index, str):
        return index
    try:
        return operator.index(index)
    except TypeError:
        return repr(index)[:_MAX_TEXT]
