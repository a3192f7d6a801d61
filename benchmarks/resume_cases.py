"""Cases of resume.py: the first batch after a resume half way through 20 million samples."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from measure import Case, Contender, Pace, Target

FIRST_RESUMED = Path(__file__).with_name("first_resumed.py")
THEIRS = "StatefulDataLoader"
SKIPPING = "PyTorch's loader, which loads what it skips"
LIMIT_S = 900


def _run(name: str, num_workers: int, verb: str, file: Path) -> str:
    command = [sys.executable, str(FIRST_RESUMED), name, str(num_workers), verb, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    return ended.stdout


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="penstock-resume-")


@cache
def _saved(name: str, num_workers: int) -> Path:
    """Return a state from an epoch whose first half was actually loaded. Used by all turns."""
    file = Path(_folder().name, f"{name}-{num_workers}")
    _run(name, num_workers, "save", file)
    return file


def _turn(name: str, num_workers: int) -> float:
    return float(_run(name, num_workers, "resume", _saved(name, num_workers)))


def _case(key: str, num_workers: int, bound: float) -> Case:
    has_peer = importlib.util.find_spec("torchdata") is not None
    against = THEIRS if has_peer else SKIPPING
    rows = {"penstock": "penstock", **({THEIRS: THEIRS} if has_peer else {})}
    if not num_workers or not has_peer:  # takes minutes with workers
        rows[SKIPPING] = "torch"
    return Case(
        key=key,
        title=f"first batch at 10 of 20 million samples, shuffled, {num_workers} workers",
        unit="s",
        contenders=[
            Contender(
                name=row,
                turn=partial(_turn, name, num_workers),
                against=(against,) if row == "penstock" else (),
                target=Target(bound=bound, is_ceiling=True) if row == "penstock" else None,
            )
            for row, name in rows.items()
        ],
    )


def inline(_: Pace) -> Case:
    return _case("a", 0, 0.01)


def with_workers(_: Pace) -> Case:
    return _case("b", 2, 0.1)


CASES = {"a": inline, "b": with_workers}
