"""What is in a file of bad samples, and how does one get rid of them?

Nothing is changed here: the lines to paste leave the samples out, or move their files into a
folder beside. Texts in the file were written by anybody's code, so they are shown and quoted as if
they meant harm.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
_MAX_WORST = 10
_MAX_KINDS = 10
_MAX_LITERAL = 20
"""More indices than this are read from the file, by the lines to paste."""
_MAX_MOVED_PER_LINE = 50
_MAX_MOVES_SHOWN = 4
_MAX_CELL = 200
_SINGLE_QUOTES = "'\u2018\u2019\u201a\u201b"
"""PowerShell takes any of them for the end of a text in single quotes."""


@dataclass(frozen=True, kw_only=True)
class ErrorKind:
    """Samples that failed with one type of error; ``example`` is its most frequent text."""

    error: str
    num_samples: int
    num_times: int
    example: str


@dataclass(frozen=True, kw_only=True)
class BadReport:
    """A file of bad samples, looked through.

    Args:
        samples: The worst first.
        leave_out: Lines of Python: a dataset without them.
        move: Lines for a shell, each complete: their files moved away. Empty where no path is
            known.
        num_elsewhere: Files that cannot be seen from here.
        num_shared: Files that hold several of the samples, which should stay where they are.
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
        """All of it as a program reads it."""
        facts = asdict(self)
        return {"num_samples": len(self.samples), "num_times": self.num_times, **facts}


def names_bad_samples(target: str) -> bool:
    """Is this a list of bad samples, and not a script?

    Example:
        >>> names_bad_samples("runs/bad.jsonl"), names_bad_samples("train.py:dataset")
        (True, False)
    """
    return target.lower().endswith(".jsonl")


def examine_bad_samples(target: str, *, is_windows: bool = sys.platform == "win32") -> BadReport:
    """Look through the file.

    Raises:
        BadTarget: It is not there, cannot be read, or holds nothing of the kind.
    """
    path = Path(target)
    if path.exists() and not path.is_file():
        raise BadTarget(f"{target} is not a file", remedy="penstock doctor bad.jsonl")
    try:
        found = read(path)
    except (OSError, ValueError) as error:  # a name with a zero byte in it is a ValueError
        why = getattr(error, "strerror", None) or error
        raise BadTarget(f"{target} cannot be read: {why}", remedy=_meant(path)) from None
    if found.num_lines and not found.samples:
        lines = count(found.num_lines, "line")
        raise BadTarget(
            f"{target} is no list of bad samples: {lines}, none of them an object with an 'index'",
            remedy="the file that DataLoader(..., on_error='skip') wrote",
        )
    samples = sorted(found.samples, key=lambda sample: -sample.count)
    present, num_elsewhere, num_shared = _files(samples)
    return BadReport(
        file=target,
        samples=samples,
        kinds=_kinds(samples),
        num_unreadable_lines=found.num_unreadable,
        leave_out=_lines_without(target, found.indices),
        move=[_move_line(*part, is_windows=is_windows) for part in _loads(present)],
        num_elsewhere=num_elsewhere,
        num_shared=num_shared,
    )


def _meant(path: Path) -> str:
    try:
        beside = [name for name in os.listdir(path.parent) if names_bad_samples(name)]
    except (OSError, ValueError):
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"penstock doctor {path.with_name(near[0]) if near else 'bad.jsonl'}"


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
    bad = str(sorted(indices))[1:-1]
    return [
        "from torch.utils.data import Subset",
        *([] if few else ["from penstock.engine.loading.bad_sample_file import read"]),
        f"bad = {{{bad}}}" if few else f"bad = set(read({file!r}).indices)",
        "dataset = Subset(dataset, [i for i in range(len(dataset)) if i not in bad])",
    ]


def _files(samples: list[BadSample]) -> tuple[list[str], int, int]:
    """Files that one bad sample each came from; how many are not here, and how many are shared."""
    owners: Counter[str] = Counter(sample.path for sample in samples if sample.path)
    alone = [path for path, num_samples in owners.items() if num_samples == 1]
    present = [path for path in alone if _is_there(path)]
    return present, len(alone) - len(present), len(owners) - len(alone)


def _is_there(path: str) -> bool:
    try:
        return os.path.isfile(path) or os.path.islink(path)  # a link to nothing is bad, too
    except ValueError:  # a zero byte, which no file's name has
        return False


def _loads(paths: list[str]) -> Iterator[tuple[list[str], str]]:
    """Files to move together, and where: two of one name never go into one folder."""
    rounds: list[list[str]] = []
    seen: Counter[str] = Counter()
    for path in paths:
        name = os.path.basename(path).casefold()  # some disks do not tell A from a
        if seen[name] == len(rounds):
            rounds.append([])
        rounds[seen[name]].append(path)
        seen[name] += 1
    for number, members in enumerate(rounds):
        folder = f"{FOLDER}/{number + 1}" if number else FOLDER
        for first in range(0, len(members), _MAX_MOVED_PER_LINE):
            yield members[first : first + _MAX_MOVED_PER_LINE], folder


def _move_line(paths: list[str], folder: str, *, is_windows: bool) -> str:
    if is_windows:
        sources = ", ".join(quote_for_powershell(path) for path in paths)
        make = f"New-Item -ItemType Directory -Force {folder} | Out-Null"
        return f"{make}; Move-Item -LiteralPath {sources} -Destination {folder}"
    sources = " ".join(quote_for_shell(path) for path in paths)
    return f"mkdir -p {folder} && mv -n -- {sources} {folder}/"


def quote_for_shell(path: str) -> str:
    r"""One word for a POSIX shell, all in one line and visible.

    Example:
        >>> print(quote_for_shell("/data/it's $HOME.jpg"), quote_for_shell("a\nb"))
        '/data/it'"'"'s $HOME.jpg' $'a\012b'
    """
    if path.isprintable():
        return shlex.quote(path)
    plain = set(range(0x20, 0x7F)) - set(b"'\\")
    octal = (chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"$'{''.join(octal)}'"


def quote_for_powershell(path: str) -> str:
    """One text for PowerShell.

    Example:
        >>> print(quote_for_powershell("C:/it's.jpg"))
        'C:/it''s.jpg'
    """
    doubled = "".join(letter * 2 if letter in _SINGLE_QUOTES else letter for letter in path)
    return f"'{doubled}'"


# -- the report ------------------------------------------------------------------------------------


def print_bad_samples(console: Console, report: BadReport) -> None:
    """Tables for a person; in a pipe the same columns, without colour or broken lines."""
    samples = report.samples
    times = "once" if report.num_times == 1 else f"{report.num_times:,} times"
    title = f"Bad samples in {visible(report.file)}: {len(samples):,}, failed {times}"
    _say(console, title if samples else f"Bad samples in {visible(report.file)}: none", "bold")
    if report.num_unreadable_lines:
        _say(console, f"  {count(report.num_unreadable_lines, 'line')} could not be read", "yellow")
    if not samples:
        return
    kinds = report.kinds[:_MAX_KINDS]
    rows = [(k.error, f"{k.num_samples:,}", f"{k.num_times:,}", k.example) for k in kinds]
    _table(console, "Errors", ("error", "samples", "times", "for example"), rows)
    _more(console, len(report.kinds) - len(kinds), "kind")
    worst = samples[:_MAX_WORST]
    cells = [(str(s.index), f"{s.count:,}", s.end or "", s.error, s.path or "") for s in worst]
    _table(console, "The worst", ("index", "times", "end", "error", "path"), cells)
    _more(console, len(samples) - len(worst), "sample")
    _print_cleanup(console, report)


def _print_cleanup(console: Console, report: BadReport) -> None:
    if report.leave_out:
        _paste(console, "To leave them out, in Python", report.leave_out)
    moves = report.move[:_MAX_MOVES_SHOWN]
    if moves:
        either = "Or to" if report.leave_out else "To"
        _paste(console, f"{either} move their files away, in a shell (indices change)", moves)
        _more(console, len(report.move) - len(moves), "line")
    if report.num_elsewhere:
        _say(console, f"  {count(report.num_elsewhere, 'file')} cannot be seen from here", "dim")
    if report.num_shared:
        text = f"  {count(report.num_shared, 'file')} with several of the samples: not to be moved"
        _say(console, text, "dim")


def _paste(console: Console, title: str, lines: Iterable[str]) -> None:
    console.print()
    _say(console, title, "bold")
    for line in lines:
        _say(console, f"  {line}", "green")


def _more(console: Console, number: int, thing: str) -> None:
    if number > 0:
        _say(console, f"  and {count(number, f'more {thing}')}: --json has all", "dim")


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    console.print()
    _say(console, title, "bold")
    shown = [[_cell(text) for text in row] for row in rows]
    if console.is_terminal:
        table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=True)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in shown:
            table.add_row(*(Text(text) for text in row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    for cells in (columns, *shown):
        line = "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True))
        _say(console, f"  {line.rstrip()}", "")


def _cell(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}..."


def visible(text: str) -> str:
    r"""A text in which nothing can move a terminal's cursor or hide.

    Example:
        >>> print(visible("a\x1b[2Jb"), visible("Käse 1.jpg"))
        a\x1b[2Jb Käse 1.jpg
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _say(console: Console, text: str, style: str) -> None:
    console.print(Text(text, style=style), soft_wrap=True)
