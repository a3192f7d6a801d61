"""``penstock doctor bad.jsonl``: reports the bad samples that loaders wrote to a file.

The report changes nothing. It includes code to paste that excludes the samples or moves their files
to a separate folder. Texts in the file come from untrusted code, so control characters are escaped.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.engine.loading.bad_sample_file import BadSample, read
from penstock.errors import BadTarget
from penstock.planning.quantities import count

FOLDER = "bad-samples"
_MAX_ROWS = 10
_MAX_LITERAL = 20
"""If there are more indices, the code to paste reads them from the file."""
_MAX_CELL = 200
_REMEDY = "use the file that DataLoader(..., on_error='skip', bad_samples_file=...) wrote"


@dataclass(frozen=True, kw_only=True)
class ErrorKind:
    """Samples that failed with one type of error. ``example`` is the most frequent message."""

    error: str
    num_samples: int
    num_times: int
    example: str


@dataclass(frozen=True, kw_only=True)
class BadSampleReport:
    """The contents of a file of bad samples.

    Args:
        samples: The samples, most failures first.
        leave_out: Lines of Python that create a dataset without the samples.
        move: Lines of Python that move the files of the samples. Empty if no path is known.
        num_elsewhere: Number of files that do not exist on this machine.
        num_shared: Number of files that hold several samples. They are not moved.
    """

    file: str
    samples: list[BadSample]
    kinds: list[ErrorKind]
    num_unreadable_lines: int
    leave_out: list[str]
    move: list[str]
    num_elsewhere: int
    num_shared: int

    @property
    def num_times(self) -> int:
        return sum(sample.count for sample in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        facts = asdict(self)
        return {"num_samples": len(self.samples), "num_times": self.num_times, **facts}


def names_bad_samples(target: str) -> bool:
    """Return True if the target is a list of bad samples, not a script.

    Example:
        >>> names_bad_samples("runs/bad.jsonl"), names_bad_samples("train.py:dataset")
        (True, False)
    """
    return target.lower().endswith(".jsonl")


def examine_bad_samples(target: str) -> BadSampleReport:
    """Read the file and return a report.

    Raises:
        BadTarget: The file does not exist, cannot be read, or contains no bad samples.
    """
    path = Path(target)
    if path.exists() and not path.is_file():
        raise BadTarget(f"{target} is not a file", remedy=_REMEDY)
    try:
        found = read(path)
    except (OSError, ValueError) as error:  # a null byte in the name raises ValueError
        why = getattr(error, "strerror", None) or error
        raise BadTarget(
            f"{target} cannot be read: {why}",
            remedy=_REMEDY,
        ) from None
    if found.num_lines and not found.samples:
        lines = count(found.num_lines, "line")
        raise BadTarget(
            f"{target} is not a list of bad samples: {lines}, but no JSON object with an 'index'",
            remedy=_REMEDY,
        )
    movable, num_elsewhere, num_shared = _files(found.samples)
    return BadSampleReport(
        file=target,
        samples=sorted(found.samples, key=lambda sample: -sample.count),
        kinds=_kinds(found.samples),
        num_unreadable_lines=found.num_unreadable,
        leave_out=_lines_without(target, found.indices),
        move=[f"from {__name__} import move_files", f"move_files({target!r}, {FOLDER!r})"]
        if movable
        else [],
        num_elsewhere=num_elsewhere,
        num_shared=num_shared,
    )


def _kinds(samples: list[BadSample]) -> list[ErrorKind]:
    by_type: dict[str, list[BadSample]] = defaultdict(list)
    for sample in samples:
        by_type[sample.error.partition(": ")[0] or "unknown"].append(sample)
    kinds = [
        ErrorKind(
            error=name,
            num_samples=len(members),
            num_times=sum(sample.count for sample in members),
            example=Counter(s.error.partition(": ")[2] for s in members).most_common(1)[0][0],
        )
        for name, members in by_type.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.num_samples)


# -- lines to paste --------------------------------------------------------------------------------


def _lines_without(file: str, indices: list[int]) -> list[str]:
    if not indices:
        return []
    few = len(indices) <= _MAX_LITERAL
    literal = str(sorted(indices))[1:-1]
    named = f"sample.index for sample in BadSample.read_file({file!r})"
    return [
        "from torch.utils.data import Subset",
        *([] if few else ["from penstock import BadSample"]),
        f"bad = {{{literal if few else named}}}",
        "dataset = Subset(dataset, [i for i in range(len(dataset)) if i not in bad])",
    ]


def move_files(file: str, folder: str) -> None:
    """Move the files of bad samples into a folder. Nothing is overwritten.

    Files that hold several samples are not moved, nor are files whose name already exists in the
    folder. Called by the code that the report suggests.
    """
    os.makedirs(folder, exist_ok=True)
    for path in _files(read(file).samples)[0]:
        new_path = os.path.join(folder, os.path.basename(path))
        if not os.path.lexists(new_path):
            shutil.move(path, new_path)


def _files(samples: list[BadSample]) -> tuple[list[str], int, int]:
    """Return existing files with one bad sample, and the numbers of missing and shared files."""
    owners = Counter(sample.path for sample in samples if sample.path)
    alone = [path for path, num_samples in owners.items() if num_samples == 1]
    present = [path for path in alone if _is_there(path)]
    return present, len(alone) - len(present), len(owners) - len(alone)


def _is_there(path: str) -> bool:
    try:
        return os.path.isfile(path) or os.path.islink(path)  # includes broken links
    except ValueError:  # a null byte in the path
        return False


# -- the report ------------------------------------------------------------------------------------


def print_bad_samples(console: Console, report: BadSampleReport) -> None:
    """Print the report. In a pipe, it has the same columns without color or wrapped lines."""

    def say(text: str, style: str = "dim") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    def list_rows(title: str, thing: str, columns: Sequence[str], rows: list[list[str]]) -> None:
        say(f"\n{title}", "bold")
        _print_rows(console, columns, [[_cell(text) for text in row] for row in rows[:_MAX_ROWS]])
        if len(rows) > _MAX_ROWS:
            say(f"  and {count(len(rows) - _MAX_ROWS, f'more {thing}')} (--json lists all)")

    def paste(title: str, lines: list[str]) -> None:
        if lines:
            say(f"\n{title}", "bold")
            say("\n".join(f"  {line}" for line in lines), "green")

    samples = report.samples
    times = "once" if report.num_times == 1 else f"{report.num_times:,} times"
    told = f"{len(samples):,}, which failed {times}" if samples else "none"
    say(f"Bad samples in {escape(report.file)}: {told}", "bold")
    if report.num_unreadable_lines:
        say(f"  {count(report.num_unreadable_lines, 'line')} could not be read", "yellow")
    if not samples:
        return
    kinds = [[k.error, f"{k.num_samples:,}", f"{k.num_times:,}", k.example] for k in report.kinds]
    list_rows("Errors", "kind", ("error", "samples", "times", "example"), kinds)
    cells = [[str(s.index), f"{s.count:,}", s.end or "", s.error, s.path or ""] for s in samples]
    list_rows("Worst samples", "sample", ("index", "times", "end", "error", "path"), cells)
    paste("To exclude them in Python", report.leave_out)
    either = "Or to" if report.leave_out else "To"
    paste(f"{either} move their files in Python (indices change)", report.move)
    if report.num_elsewhere:
        say(f"  {count(report.num_elsewhere, 'file')} not found on this machine")
    if report.num_shared:
        say(f"  {count(report.num_shared, 'file')} left in place (several samples per file)")


def _print_rows(console: Console, columns: Sequence[str], rows: list[list[str]]) -> None:
    if console.is_terminal:
        table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=True)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for cells in (columns, *rows):
        line = "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True))
        console.print(Text(f"  {line.rstrip()}"), soft_wrap=True)


def _cell(text: str) -> str:
    text = escape(" ".join(text.split()))
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}..."


def escape(text: str) -> str:
    r"""Return the text with control and invisible characters escaped.

    Example:
        >>> print(escape("a\x1b[2Jb"), escape("Käse 1.jpg"))
        a\x1b[2Jb Käse 1.jpg
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
