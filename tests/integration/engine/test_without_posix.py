"""Windows semantics on Linux: the spawn path with every POSIX-only facility removed.

A ``sitecustomize`` removes them in the program and in each worker before any code of Penstock is
imported. engine/memory/windows_handles.py lists the code that only Windows runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.paths import SOURCE

pytestmark = pytest.mark.timeout(300)  # the programs share one setup

ENGINE = SOURCE / "engine"
MAX_WINDOWS_LINES = 90
MAX_DOORS = 6

BLOCKER = """
import builtins, os, select, signal, socket, sys
# What does here in its own way what it does on Windows in another.
import multiprocessing.connection, multiprocessing.popen_spawn_posix, selectors, subprocess
import tempfile, shutil, numpy, psutil, torch

for name in ("fork", "forkpty", "memfd_create", "register_at_fork", "sched_getaffinity",
             "sched_setaffinity", "posix_fallocate", "pidfd_open", "set_blocking",
             "geteuid", "statvfs", "mkfifo", "killpg", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
os.O_TEMPORARY = 0  # Windows opens shared files by name; there the system deletes them
for name in ("poll", "epoll"):
    delattr(select, name)
for name in ("SCM_RIGHTS", "CMSG_SPACE", "CMSG_LEN", "send_fds", "recv_fds"):
    if hasattr(socket, name):
        delattr(socket, name)
for name in [name for name in dir(signal) if name.startswith("SIG")]:
    if name not in ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIG_DFL",
                    "SIG_IGN") and not isinstance(getattr(signal, name), type):
        delattr(signal, name)
for name in ("pthread_sigmask", "pthread_kill", "sigwait", "alarm", "setitimer"):
    delattr(signal, name)

real_kill = os.kill
def kill(pid, number):
    assert number in (0, 15), f"signal {number} does not exist here"
    real_kill(pid, number)
os.kill = kill

BLOCKED = {"fcntl", "resource", "termios", "pty", "grp", "pwd", "_posixshmem"}
real_import = builtins.__import__
def blocked_import(name, globals=None, locals=None, fromlist=(), level=0):
    asker = (globals or {}).get("__name__", "")
    if name in BLOCKED and (asker.startswith("penstock") or asker == "__main__"):
        raise ImportError(f"no module named {name!r} here")
    return real_import(name, globals, locals, fromlist, level)
builtins.__import__ = blocked_import
"""

PROGRAM = """
import glob, os, sys, tempfile
import numpy as np
import torch
from torch.utils.data import Dataset
from penstock import DataLoader

print("blocked:", not hasattr(os, "fork"), flush=True)

class Data(Dataset):
    def __init__(self):
        self.table = np.arange(3_000_000, dtype=np.float64)
        self.scale = lambda x: 2 * x
        self.broken = None
    def __len__(self):
        return 60
    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError("sample 33")
        self.table[index] = -1.0  # a worker's own
        return torch.full((4,), self.scale(float(index))), np.random.rand(), os.getpid()

data = Data()
arguments = dict(batch_size=6, multiprocessing_context="spawn")

def epoch(**more):
    torch.manual_seed(1)
    more = {**arguments, **more} if more else {"batch_size": 6}
    loader = DataLoader(data, **more)
    return [(x.tolist(), r.tolist(), p.tolist()) for x, r, p in loader]

here, there = epoch(), epoch(num_workers=2)
data.table[:] = np.arange(3_000_000)
print("same:", [b[:2] for b in here] == [b[:2] for b in there])
print("elsewhere:", os.getpid() not in {p for b in there for p in b[2]})
kept = DataLoader(data, num_workers=1, persistent_workers=True, **arguments)
held = [batch for _ in range(2) for batch in kept]
print("held:", [int(v) for b in held for v in b[0][:, 0]] == 2 * [2 * i for i in range(60)])
half = iter(kept); next(half); del half
kept.close()
print("custom:", [b for b in DataLoader(data, num_workers=1, collate_fn=len, **arguments)])
print("own:", data.table[:60].tolist() == list(range(60)))
auto = DataLoader(data, num_workers="auto", **arguments)
print("auto:", sum(len(b[0]) for b in auto))
data.broken = 33
try:
    epoch(num_workers=1)
except ValueError as error:
    print("error:", "sample 33" in str(error))
"""


def run(folder: Path, source: str = PROGRAM) -> Any:
    """Run a program in which every interpreter removes the POSIX facilities first."""
    site, scratch = folder / "site", folder / "scratch"
    site.mkdir()
    scratch.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)
    path = ":".join([str(site), *(entry for entry in sys.path if entry)])
    return scripts.run(source, folder, PYTHONPATH=path, TMPDIR=str(scratch))


PROGRAMS: dict[str, Callable[[Path], Any]] = {
    "spawn": run,
    "the fork server": lambda folder: run(
        folder, PROGRAM.replace('multiprocessing_context="spawn"', "pool='process'")
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all programs in this file, run to completion."""
    return scripts.run_all(
        lambda name: PROGRAMS[name](scripts.make_folder(tmp_path_factory, "program")),
        list(PROGRAMS),
    )


def test_the_spawn_path_needs_no_posix(results: dict[str, Any]) -> None:
    result = scripts.told(results["spawn"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "blocked: True",
        "same: True",
        "elsewhere: True",
        "held: True",
        "custom: [6, 6, 6, 6, 6, 6, 6, 6, 6, 6]",
        "own: True",
        "auto: 60",
        "error: True",
    ]
    assert result.stderr == ""


def test_an_error_travels_without_posix(results: dict[str, Any]) -> None:
    result = scripts.told(results["spawn"])
    assert result.stdout.splitlines()[-1] == "error: True", result.stderr


def test_the_fork_server_would_not_run_there(results: dict[str, Any]) -> None:
    """Control: the other start methods need the removed facilities."""
    result = scripts.told(results["the fork server"])
    assert result.returncode != 0
    assert result.stdout.splitlines() == ["blocked: True"]
    assert "SIGCHLD" in result.stderr or "fork_server" in result.stderr


def test_what_only_windows_runs_is_in_one_place_and_small() -> None:
    lines = (ENGINE / "memory" / "windows_handles.py").read_text().splitlines()
    assert len(lines) <= MAX_WINDOWS_LINES
    asks = [
        f"{path.name}: {line.strip()}"
        for path in sorted(ENGINE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if "win32" in line and path.name != "windows_handles.py"
    ]
    # Other files check for Windows only to reach that file or to raise an error.
    assert all('if sys.platform == "win32":' in ask for ask in asks), asks
    assert len(asks) <= MAX_DOORS, asks
