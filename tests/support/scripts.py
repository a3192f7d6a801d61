"""Standalone programs, written to a file or piped in, and run to completion."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

LIMIT_S = 900.0 if sys.platform == "win32" else 240.0
"""Reached only by a hang. The windows leg runs translated code, up to ten times slower."""
Case = TypeVar("Case")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Case], Result], cases: Sequence[Case], at_once: int = 2
) -> dict[Case, Any]:
    """Run programs two at a time, because each imports torch for seconds in one thread.

    Returns, for each case, the result or the exception to raise in the test of that case.
    """

    def outcome(case: Case) -> Any:
        try:
            return function(case)
        except Exception as error:
            return error

    with ThreadPoolExecutor(at_once) as executor:
        return dict(zip(cases, executor.map(outcome, cases), strict=True))


_naming = threading.Lock()


def make_folder(factory: Any, name: str) -> Path:
    """Make a temporary folder. pytest's ``mktemp`` is not thread-safe."""
    with _naming:
        return Path(factory.mktemp(name))


def told(outcome: Any) -> Any:
    """Return the result of :func:`run_all` for a case, or raise its exception."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run(
    source: str,
    folder: Path,
    *arguments: str,
    piped: bool = False,
    stdin: str | None = None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to completion. ``piped`` uses ``python -``. ``environ`` adds variables."""
    path = folder / "program.py"
    path.write_text(source)
    command = [sys.executable, "-" if piped else str(path), *arguments]
    return subprocess.run(
        command,
        input=source if piped else stdin,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environ},
        timeout=LIMIT_S,
        check=False,
    )


@contextmanager
def running(source: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in its own process group, as a shell does."""
    path = folder / "program.py"
    path.write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-u", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        family = family_of(process.pid)
        process.kill()
        process.wait()
        for pid in family:  # only processes of this program, so that a failed test leaves none
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def family_of(pid: int) -> list[int]:
    """Return all descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def read_line(process: subprocess.Popen[str], expected: str) -> None:
    """Wait until the program prints a line. Fails with its stderr if it ends first."""
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.strip() == expected:
            return
    raise AssertionError(f"the program ended before {expected!r}:\n{process.stderr.read()}")


def wait_for_family(pid: int, count: int, limit_s: float = 120.0) -> list[int]:
    """Wait until a process has this many descendants, and return them."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        family = family_of(pid)
        if len(family) >= count:
            return family
        time.sleep(0.02)
    raise AssertionError(f"{len(family_of(pid))} of {count} processes came")
