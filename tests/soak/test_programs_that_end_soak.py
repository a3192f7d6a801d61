"""A thousand programs with a loader end in eight ways. None of them leaves anything behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.soak

NUM_PROGRAMS = 1000
PROGRAM = """
import os, sys, tempfile, time
import torch
from penstock import DataLoader
from penstock.engine.parent import fork_server

class Numbers:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((2048,), i)

kind, end = sys.argv[1:]
kept = tempfile.TemporaryDirectory() if kind == "fresh" else None
file = open(os.path.join(kept.name, "open"), "wb") if kept else None  # not clean
loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
server = fork_server.current_fork_server()
assert (server.why_fresh is None) == (kind == "forked"), server.why_fresh
batches = iter(loader)
if end != "before a batch":
    held = next(batches)
print("ready", flush=True)
if end == "exception":
    raise LookupError("on purpose")
if end == "sys.exit":
    sys.exit(3)
if end == "os._exit":
    os._exit(4)
if end in ("SIGKILL", "SIGINT", "SIGTERM"):
    time.sleep(600)
if end == "whole epoch":
    assert [int(batch[0, 0]) for batch in batches] == list(range(4, 64, 4))
"""
ENDS = {
    "whole epoch": 0,
    "before a batch": 0,
    "exception": 1,
    "sys.exit": 3,
    "os._exit": 4,
    "SIGKILL": -signal.SIGKILL,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
}
"""Ways to end, and the exit status of each."""
KINDS = ("forked", "fresh")


def test_programs_that_end_leave_nothing(tmp_path: Path, note: Callable[[str], None]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cases = list(itertools.islice(itertools.cycle(itertools.product(KINDS, ENDS)), NUM_PROGRAMS))

    def run(number: int) -> list[str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        problems = run_one(program, folder, *cases[number])
        return [f"{cases[number]}: {problem}" for problem in problems]

    segments = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        problems = list(itertools.chain(*executor.map(run, range(len(cases)))))
    assert set(os.listdir("/dev/shm")) <= segments
    assert not problems, Counter(problems).most_common(20)
    note(f"programs: {len(cases)} started and ended in {len(ENDS)} ways, nothing left behind")


def run_one(program: Path, folder: Path, kind: str, end: str) -> list[str]:
    """Run a program to its end and return what is wrong afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(program), kind, end],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    is_ready = process.stdout.readline() == "ready\n"
    if is_ready and end.startswith("SIG"):
        process.send_signal(signal.Signals[end])
    _, errors = process.communicate(timeout=240)
    problems = [] if is_ready else [f"did not start: {errors[-500:]}"]
    if process.returncode != ENDS[end]:
        problems.append(f"ended with {process.returncode}: {errors[-500:]}")
    if "Exception ignored" in errors or errors.count("Traceback") > (
        end in ("exception", "SIGINT")
    ):
        problems.append(f"printed {errors[-500:]}")
    left = members_of(process.pid)
    limit = time.monotonic() + 30.0
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left = members_of(process.pid)
    if left:
        problems.append(f"{len(left)} processes left")
    can_tidy_up = end not in ("os._exit", "SIGKILL", "SIGTERM")
    if can_tidy_up and any(folder.iterdir()):
        problems.append(f"files left: {sorted(path.name for path in folder.iterdir())}")
    return problems


def members_of(session: int) -> list[int]:
    """Return the processes of a session: the program, and all that it started."""
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members
