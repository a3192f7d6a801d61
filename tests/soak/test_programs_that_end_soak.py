"""A thousand programs with a loader end in eight ways. None of them leaves anything behind.

Importing torch takes 2 s, and all else 0.2 s. So most programs are forks of a Python that has
imported torch, and run their own code from there to the end of the interpreter. Every fifth one is
a new Python.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.soak

NUM_PROGRAMS = int(os.environ.get("SOAK_PROGRAMS", 1000))
NEW_EVERY = 5
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
TEMPLATE = """
import os, sys, tempfile
import torch

while True:
    request = sys.stdin.readline().split("\\t")
    if len(request) < 2:
        sys.exit()
    program, folder, output, *arguments = request[:-1]
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os.setsid()
os.environ["TMPDIR"], tempfile.tempdir = folder, None
for number, path in enumerate((os.devnull, output + ".out", output + ".err")):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(fd, number)
    os.close(fd)
sys.argv = [program, *arguments]
del number, path, fd, request, folder, output, pid
exec(compile(open(program).read(), program, "exec"))
"""
"""Runs programs one after the other: reads a line for each, prints its pid and its exit status."""
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
KINDS = ("forked", "forked", "fresh")


def test_programs_that_end_leave_nothing(tmp_path: Path, note: Callable[[str], None]) -> None:
    program, template = tmp_path / "program.py", tmp_path / "template.py"
    program.write_text(PROGRAM)
    template.write_text(TEMPLATE)
    cases = list(itertools.islice(itertools.cycle(itertools.product(ENDS, KINDS)), NUM_PROGRAMS))
    num_threads = 2 * (os.cpu_count() or 1)
    templates: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    for _ in range(num_threads):
        templates.put(start(template, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def run(number: int) -> list[str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        kind, end = cases[number][::-1]
        if number % NEW_EVERY == 0:
            problems = run_new(program, folder, kind, end)
        else:
            process = templates.get()
            problems = run_forked(process, program, folder, kind, end)
            templates.put(process)
        return [f"{cases[number]}: {problem}" for problem in problems]

    segments = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(num_threads) as executor:
        problems = list(itertools.chain(*executor.map(run, range(len(cases)))))
    for _ in range(num_threads):
        templates.get().communicate(timeout=240)
    assert set(os.listdir("/dev/shm")) <= segments
    assert not problems, Counter(problems).most_common(20)
    note(f"programs: {len(cases)} started and ended in {len(ENDS)} ways, nothing left behind")


def start(program: Path, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [sys.executable, str(program), *arguments], start_new_session=True, **options
    )


def run_new(program: Path, folder: Path, kind: str, end: str) -> list[str]:
    """Run a program in a new Python to its end and return what is wrong afterwards."""
    environ = {**os.environ, "TMPDIR": str(folder)}
    output = folder.with_suffix(".out"), folder.with_suffix(".err")
    with output[0].open("wb") as out, output[1].open("wb") as err:
        process = start(program, kind, end, env=environ, stdout=out, stderr=err)
    send_signal(process.pid, output[0], end, lambda: process.poll() is not None)
    return find_problems(process.pid, process.wait(timeout=240), folder, end)


def run_forked(
    template: subprocess.Popen[str], program: Path, folder: Path, kind: str, end: str
) -> list[str]:
    """Run a program in a fork of the template to its end and return what is wrong afterwards."""
    assert template.stdin is not None
    assert template.stdout is not None
    template.stdin.write("\t".join([str(program), str(folder), str(folder), kind, end, "\n"]))
    template.stdin.flush()
    pid = int(template.stdout.readline())
    send_signal(pid, folder.with_suffix(".out"), end, lambda: not psutil.pid_exists(pid))
    return find_problems(pid, int(template.stdout.readline()), folder, end)


def send_signal(pid: int, output: Path, end: str, has_ended: Callable[[], bool]) -> None:
    """Send the signal that ends a program, once it is ready."""
    if end.startswith("SIG"):
        while not has_ended() and not (output.exists() and output.read_text() == "ready\n"):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[end])


def find_problems(pid: int, code: int, folder: Path, end: str) -> list[str]:
    """Return what is wrong after a program has ended."""
    errors = folder.with_suffix(".err").read_text()
    is_ready = folder.with_suffix(".out").read_text() == "ready\n"
    problems = [] if is_ready else [f"did not start: {errors[-500:]}"]
    if code != ENDS[end]:
        problems.append(f"ended with {code}: {errors[-500:]}")
    if "Exception ignored" in errors or errors.count("Traceback") > (
        end in ("exception", "SIGINT")
    ):
        problems.append(f"printed {errors[-500:]}")
    left = members_of(pid)
    limit = time.monotonic() + 30.0
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left = members_of(pid)
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
