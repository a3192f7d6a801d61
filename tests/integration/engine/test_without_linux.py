"""macOS semantics on Linux: everything that only Linux has is removed, and spawn is the default.

A ``sitecustomize`` does this in the program and in each worker before any code of Penstock is
imported. The program is the same on macOS: ``sys.platform`` is ``"darwin"``, there is no ``memfd``,
``epoll``, ``pidfd``, affinity, ``/proc`` or ``/sys``, and fewer flags and limits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import scripts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the programs share one setup
    pytest.mark.skipif(sys.platform != "linux", reason="removes what only Linux has"),
]

BLOCKER = """
import fcntl, mmap, os, resource, select, signal, socket, sys, time
# Libraries that find their own way on each system, and did so already.
import multiprocessing.connection, multiprocessing.popen_spawn_posix, selectors, subprocess
import tempfile, shutil, numpy, psutil, torch

MISSING = {
    os: "memfd_create MFD_ pidfd_open P_PIDFD sched_getaffinity sched_setaffinity posix_fallocate "
        "posix_fadvise POSIX_FADV_ fdatasync eventfd splice copy_file_range getrandom O_PATH "
        "O_TMPFILE O_DIRECT pipe2 setns unshare",
    select: "epoll EPOLL",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC AF_NETLINK SO_PEERCRED",
    signal: "SIGRT SIGPWR SIGSTKFLT SIGPOLL sigtimedwait sigwaitinfo pidfd_send_signal",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_REMOVE MADV_DONTFORK MADV_DOFORK MADV_MERGEABLE "
        "MADV_POPULATE MAP_POPULATE MAP_DENYWRITE",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ F_OFD_",
    resource: "prlimit RUSAGE_THREAD RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    psutil.Process: "cpu_affinity rlimit io_counters memory_maps",
}
for owner, starts in MISSING.items():
    for name in [name for name in dir(owner) if name.startswith(tuple(starts.split()))]:
        delattr(owner, name)

def refuse_linux_files(event, arguments):
    if event not in ("open", "os.listdir", "os.scandir") or not arguments:
        return
    if not str(arguments[0]).startswith(("/proc", "/sys", "/dev/shm")):
        return
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in ("psutil", "torch", "multiprocessing"):
            return
        if package in ("penstock", "__main__"):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])
        frame = frame.f_back

sys.addaudithook(refuse_linux_files)
sys.platform = "darwin"
"""

PROGRAM = """
import os, signal, sys, tempfile
import numpy as np
import torch
import penstock
from penstock import DataLoader

class Data:
    def __init__(self, is_noisy=True):
        self.is_noisy = is_noisy
        self.table = np.arange(300_000, dtype=np.float64)
        self.scale = lambda x: 2 * x
        self.deadly = None
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if self.deadly and index == 9 and not os.path.exists(self.deadly):
            open(self.deadly, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), self.scale(self.table[index])), self.is_noisy and np.random.rand()

def load(dataset, **options):
    torch.manual_seed(1)
    return [[x.tolist() for x in batch] for batch in DataLoader(dataset, batch_size=4, **options)]

folder = tempfile.mkdtemp()
data = Data()
here = load(data)
loader = DataLoader(data, batch_size=4, num_workers=2)
print(loader.plan.start_method)
print("spawn:", load(data, num_workers=2) == here)
print("fork:", load(data, num_workers=2, multiprocessing_context="fork") == here)
print("thread:", load(data, num_workers=2, pool="thread") == here)
print("auto:", load(data, num_workers="auto") == here)
data.deadly = os.path.join(folder, "mark")
print("killed:", load(data, num_workers=1) == here, os.path.exists(data.deadly))
kept = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, timeout=200)
print("persistent:", [len(list(kept)) for _ in range(2)])
kept.close()
names = os.path.join(folder, "packed")
penstock.pack(Data(is_noisy=False), names)
packed = penstock.Packed(names)
print("packed:", torch.equal(packed[3][0], data[3][0]), len(load(packed, num_workers=1)))
for place in ("ram", os.path.join(folder, "cache")):
    cached = penstock.cached(Data(is_noisy=False), place)
    first, again = load(cached, num_workers=1), load(cached, num_workers=1)
    print("cached:", [b[0] for b in first] == [b[0] for b in again] == [b[0] for b in here])
facts = penstock.machine()
print(facts.os, facts.num_affine_cpus, facts.cpu_quota, facts.memory_bytes > 0)
"""

EXPECTED = [
    "spawn (rule: darwin has no safe fork)",
    "spawn: True",
    "fork: True",
    "thread: True",
    "auto: True",
    "killed: True True",
    "persistent: [6, 6]",
    "packed: True 6",
    "cached: True",
    "cached: True",
    "darwin None None True",
]

ORPHANS = """
import os, signal
from penstock import DataLoader

class Data:
    def __len__(self): return 100
    def __getitem__(self, index): return os.getpid()

batches = iter(DataLoader(Data(), batch_size=2, num_workers=2))
print(*sorted({pid for _ in range(8) for pid in next(batches).tolist()}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

CONTROL = """
import os
from penstock.machine.kernel_files import read_text
from penstock.engine.memory.shared_file import SharedFile
from penstock import DataLoader
print(hasattr(os, "memfd_create"), read_text("/proc/self/status") != "")
print(SharedFile.create().is_sparse, DataLoader([1], num_workers=1).plan.start_method.value)
"""


def run(source: str, folder: Path, *, is_blocked: bool = True) -> Any:
    """Run a program in which every interpreter first removes what macOS lacks."""
    site, scratch = folder / "site", folder / "scratch"
    site.mkdir()
    scratch.mkdir()
    if is_blocked:
        (site / "sitecustomize.py").write_text(BLOCKER)
    path = ":".join([str(site), *(entry for entry in sys.path if entry)])
    return scripts.run(source, folder, PYTHONPATH=path, TMPDIR=str(scratch))


PROGRAMS: dict[str, Callable[[Path], Any]] = {
    "macOS": lambda folder: run(PROGRAM, folder),
    "orphans": lambda folder: run(ORPHANS, folder),
    "control": lambda folder: run(CONTROL, folder),
    "control on Linux": lambda folder: run(CONTROL, folder, is_blocked=False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all programs in this file, run to completion."""
    return scripts.run_all(
        lambda name: PROGRAMS[name](scripts.make_folder(tmp_path_factory, "program")),
        list(PROGRAMS),
    )


def test_loaders_of_every_kind_load_without_anything_that_only_linux_has(
    results: dict[str, Any],
) -> None:
    result = scripts.told(results["macOS"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == EXPECTED
    lines = result.stderr.splitlines()
    assert lines[0].endswith("(worker 0); a new worker replaces it")  # the one that was killed
    assert len(lines) == 2


def test_workers_end_with_a_killed_parent_there(results: dict[str, Any]) -> None:
    result = scripts.told(results["orphans"])
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=120)
    assert alive == []


def test_the_program_misses_what_it_is_said_to_miss(results: dict[str, Any]) -> None:
    """Control: with everything that Linux has, the same lines find and use it."""
    blocked = scripts.told(results["control"])
    assert blocked.stdout.splitlines() == ["False False", "False spawn"], blocked.stderr
    usual = scripts.told(results["control on Linux"])
    assert usual.stdout.splitlines() == ["True True", "True forkserver"], usual.stderr
