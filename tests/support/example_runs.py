"""Runs the scripts in examples/ as a user would, and disturbs them halfway."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.paths import EXAMPLES

LIMIT_S = 400.0
QUIET = {
    "YOLO_OFFLINE": "true",
    "HF_HUB_OFFLINE": "1",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Network access is disabled. One thread, because two programs run at a time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of training."""

    example: str
    options: tuple[str, ...] = ("--seed", "0")
    launcher: tuple[str, ...] = ()
    """Command before ``-m penstock run``, as in ``torchrun -m penstock run``."""
    arguments: tuple[str, ...] = ()
    is_plain: bool = False
    """True to run without Penstock."""
    kill_at: str = ""
    """A worker is killed when the output matches this pattern."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Result of a training run."""

    status: int
    out: str
    err: str

    def told(self, word: str) -> list[str]:
        """Return the lines that the script printed under this word."""
        return [line for line in self.out.splitlines() if line.startswith(f"{word} ")]


def train(run: Run, folder: Path) -> End:
    """Run the script to completion, in its own folder."""
    ours = () if run.is_plain else ("-m", "penstock", "run", *run.options)
    command = [sys.executable, *run.launcher, *ours]
    process = subprocess.Popen(
        [*command, str(EXAMPLES / f"{run.example}.py"), *run.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, **QUIET, "YOLO_CONFIG_DIR": str(folder), "HF_HOME": str(folder)},
    )
    chunks: list[bytes] = []
    errors: list[bytes] = []
    threads = [
        threading.Thread(target=_read, args=(process.stdout, chunks)),
        threading.Thread(target=_read, args=(process.stderr, errors)),
    ]
    for thread in threads:
        thread.start()
    try:
        if run.kill_at:
            _kill_at(run.kill_at, process, chunks)
        process.wait(LIMIT_S)
    finally:
        process.kill()
        for thread in threads:
            thread.join()
        process.wait()
    out, err = (b"".join(parts).decode(errors="replace") for parts in (chunks, errors))
    return End(status=process.returncode, out=out, err=err)


def _read(stream: object, chunks: list[bytes]) -> None:
    with stream:  # type: ignore[attr-defined]
        while chunk := os.read(stream.fileno(), 65536):  # type: ignore[attr-defined]
            chunks.append(chunk)


def _kill_at(pattern: str, process: subprocess.Popen[bytes], chunks: list[bytes]) -> None:
    limit = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        workers = workers_of(process.pid)
        if workers and re.search(pattern, b"".join(chunks).decode(errors="replace")):
            os.kill(workers[0], signal.SIGKILL)
            return
        time.sleep(0.02)


def workers_of(pid: int) -> list[int]:
    """Return the workers among the descendants of a process.

    These are spawned processes or children of a fork server.
    """
    found = []
    try:
        for child in psutil.Process(pid).children(recursive=True):
            command, parent = _command(child), child.parent()
            above = "" if parent is None else _command(parent)
            is_forked = all(
                "fork_server_main.fork_server_main" in text for text in (command, above)
            )
            if is_forked or "main.spawned_main" in command:
                found.append(child.pid)
    except psutil.NoSuchProcess:
        pass
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
