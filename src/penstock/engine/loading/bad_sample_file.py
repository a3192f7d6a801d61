"""The file of bad samples: one line of JSON for each time that a sample failed.

    {"index": 17, "path": "/data/a.jpg", "error": "OSError: image file is truncated", "count": 2,
     "epoch": 0, "position": 341, "time": "2026-11-15T08:00:00+00:00", "end": "skip"}

The loader appends, ``penstock doctor bad.jsonl`` reads. A program may be killed while it writes,
and people edit files: a line that is none costs that line. Neither side imports torch.
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
"""Of an error's text this much is kept, so that a line stays far below the limit above."""


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """All that the file says about one sample.

    Args:
        index: As the sampler gave it; anything but a number or a text is its ``repr``.
        error: Type and text of the last error.
        count: How often it failed.
        epoch, position, time, end: Of the last time; ``end`` is what was done about it.
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
        """The samples that a ``bad_samples_file`` names, in the order in which they failed first.

        Raises:
            OSError: There is no such file, or it cannot be read.

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
    """What :func:`read` found, in the order in which samples failed first."""

    samples: list[BadSample]
    num_lines: int
    num_unreadable: int

    @property
    def indices(self) -> list[int]:
        """The indices that are numbers, for ``torch.utils.data.Subset``."""
        return [sample.index for sample in self.samples if isinstance(sample.index, int)]


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add one line. Several processes may add to one file; a torn line of before is closed first.

    Args:
        record: As in the module's example; ``index`` must be there, ``time`` is now if it is not.

    Raises:
        OSError: The file cannot be written to: a full disk, a folder that is not there.

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
        while rest.nbytes:  # a nearly full disk takes the first part, and refuses the second
            rest = rest[file.write(rest) :]


def read(path: str | os.PathLike[str]) -> BadSampleFile:
    """What the file says, sample by sample. It is never held whole.

    Raises:
        OSError: There is no such file, or it cannot be read.
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
    """The lines that are not blank; None for one that is too long to be ours."""
    is_first = True
    while line := file.readline(_MAX_LINE_BYTES):
        if is_first:
            is_first, line = False, line.removeprefix(b"\xef\xbb\xbf")  # what some editors add
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
    """The later line counts; what it leaves out is taken from the earlier one.

    A line has the count of its run. Where runs share a file, the lines themselves are counted.
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
    """An index as the file and ``loader.bad_samples`` hold it."""
    if isinstance(index, str):
        return index
    try:
        return operator.index(index)
    except TypeError:
        return repr(index)[:_MAX_TEXT]
