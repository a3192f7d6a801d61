"""Plan of the comparison: the questions, their jobs, and the tables of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rivals.data import Sizes


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the report.

    Args:
        job: Index of the job in its group.
        value: Key of the number in an answer, or of several with "+" for their sum. None if the
            table shows words.
        is_less_better: True for seconds and megabytes.
    """

    key: str
    title: str
    unit: str
    job: int
    value: str | None
    is_less_better: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Jobs that one turn runs one after the other, in one fresh process.

    Args:
        question: Name of a function in questions.py.
        before: Questions that run once, before the turns.
        num_turns: Number of turns. 0 means the requested number.
    """

    key: str
    kind: str
    question: str
    jobs: tuple[dict[str, Any], ...]
    tables: tuple[Table, ...]
    batch_size: int = 64
    before: tuple[str, ...] = ()
    is_few: bool = False
    num_turns: int = 0
    limit_s: float = 180.0

    def count(self, sizes: Sizes) -> int:
        return sizes.few if self.is_few else int(getattr(sizes, self.kind))


def _rate(key: str, title: str, job: int = 0) -> Table:
    return Table(key=key, title=title, unit="samples/s", job=job, value="samples_per_s")


def _words(key: str, title: str) -> Table:
    return Table(key=key, title=title, unit="", job=0, value=None)


_WAYS = tuple((smooth, floats) for smooth in (True, False) for floats in (False, True))
_JPEG = "JPEG 500x375 to random crops of 224, batch 64, 2 workers"


def _way(smooth: bool, floats: bool) -> str:
    return f"{'' if smooth else 'not '}antialiased, {'float32 normalised' if floats else 'uint8'}"


GROUPS = {
    group.key: group
    for group in (
        Group(
            key="jpeg",
            kind="jpeg",
            question="rate",
            jobs=tuple({"antialias": smooth, "is_float": floats} for smooth, floats in _WAYS),
            tables=(
                *(
                    _rate(f"jpeg-{place + 1}", f"{_JPEG}: {_way(*way)}", place)
                    for place, way in enumerate(_WAYS)
                ),
                Table(
                    key="memory",
                    title="Memory of the program and its workers while loading JPEG files (PSS)",
                    unit="MB",
                    job=0,
                    value="memory_mb",
                    is_less_better=True,
                ),
            ),
        ),
        Group(
            key="small",
            kind="small",
            question="rate",
            batch_size=256,
            jobs=({},),
            tables=(_rate("small", "Packed tensors, 3x64x64 uint8, shuffled, batch 256"),),
        ),
        Group(
            key="large",
            kind="large",
            question="rate",
            jobs=({},),
            tables=(_rate("large", "Packed tensors of 150 KB, shuffled, batch 64"),),
        ),
        Group(
            key="raw",
            kind="raw",
            question="rate",
            jobs=tuple({"antialias": True, "is_float": floats} for floats in (False, True)),
            tables=(
                _rate("raw-1", "Raw pixels 256x192 to random crops of 224, antialiased, uint8"),
                _rate(
                    "raw-2",
                    "Raw pixels 256x192 to random crops of 224, antialiased, float32 normalised",
                    1,
                ),
            ),
        ),
        Group(
            key="numbers",
            kind="numbers",
            question="rate",
            jobs=({"work": "Large"}, {"work": "Tiny"}),
            tables=(
                _rate(
                    "transport", "Transport: samples of 150 KB that take no time to make, 2 workers"
                ),
                _rate("tiny", "Tiny samples: 16 bytes each, batch 64, 2 workers", 1),
                Table(
                    key="first",
                    title="First batch of a program's first loader, import of the library included",
                    unit="s",
                    job=0,
                    value="import_s+first_s",
                    is_less_better=True,
                ),
                Table(
                    key="later",
                    title="First batch of a later loader of the same program",
                    unit="s",
                    job=1,
                    value="first_s",
                    is_less_better=True,
                ),
                Table(
                    key="memory-plain",
                    title="Memory of the program and 2 workers with samples of 150 KB (PSS)",
                    unit="MB",
                    job=0,
                    value="memory_mb",
                    is_less_better=True,
                ),
            ),
        ),
        Group(
            key="strings",
            kind="strings",
            question="strings",
            jobs=({},),
            batch_size=1024,
            tables=(
                Table(
                    key="strings",
                    title="Memory of a program with a list of 500,000 names and 4 workers (PSS)",
                    unit="MB",
                    job=0,
                    value="memory_mb",
                    is_less_better=True,
                ),
            ),
        ),
        Group(
            key="kill",
            kind="numbers",
            question="kill",
            jobs=({"work": "Killed"},),
            is_few=True,
            num_turns=1,
            limit_s=40.0,
            tables=(_words("kill", "Complete epoch although one of 2 workers is killed once"),),
        ),
        Group(
            key="resume",
            kind="numbers",
            question="resume",
            before=("save",),
            jobs=({"work": "Sleepy", "seed": 0},),
            is_few=True,
            num_turns=1,
            limit_s=60.0,
            tables=(_words("resume", "Resume half way through an epoch, at the next batch"),),
        ),
        Group(
            key="bits",
            kind="numbers",
            question="bits",
            jobs=({"work": "Random", "seed": 0},),
            is_few=True,
            num_turns=1,
            limit_s=90.0,
            tables=(
                _words("bits", "Same order and augmentation with 1, 2 and 4 workers and one seed"),
            ),
        ),
    )
}
