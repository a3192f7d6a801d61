"""A process that the kernel kills for lack of memory is counted, with its limit.

A loader whose worker is killed this way reports it, with the memory of each worker.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.machine.cgroup import MOUNT
from penstock.machine.oom import OomCount

pytestmark = pytest.mark.fault

LIMIT_BYTES = 64 << 20
ROOM_FOR_A_LOADER_BYTES = 3 << 29
# Enters the control group, reports it, and allocates more than the limit.
GREEDY = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
sys.stdin.read(1)
hoard = []
while True:
    hoard.append(b"x" * (8 << 20))
"""


# A loader with one sample that always needs more memory than available.
LOADER = """
import os, sys
import numpy, torch
from penstock import DataLoader
from penstock.errors import WorkerDied

with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))

class Greedy:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 9:
            numpy.ones(4 << 30, dtype=numpy.uint8)
        return index

try:
    list(DataLoader(Greedy(), batch_size=2, num_workers=2))
except WorkerDied as error:
    print(error)
left_out = DataLoader(Greedy(), batch_size=2, num_workers=2, on_error="skip")
print("left:", sum(len(batch) for batch in left_out))
"""


# A loader whose fork server enters the control group between two epochs.
SERVER = """
import os, sys
import penstock
from penstock.engine.parent import fork_server

def load():
    return [batch.tolist() for batch in loader]

loader = penstock.DataLoader(range(64), batch_size=4, num_workers=2)
server = fork_server.current_fork_server()
print("fresh" if server.why_fresh else "forked")
expected = load()
with open(sys.argv[1], "w") as procs:
    procs.write(str(server.pid))
assert load() == expected
assert server.was_killed and fork_server.current_fork_server() is not server
print("all right")
"""


class SmallGroup:
    """A control group with a small memory limit."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        name = f"penstock-test-{os.getpid()}"
        self.is_v2 = not (MOUNT / "memory").is_dir()
        top = MOUNT if self.is_v2 else MOUNT / "memory"
        if self.is_v2 and "memory" not in (top / "cgroup.subtree_control").read_text().split():
            raise OSError(f"no memory controller below {top}")
        self.folder = top / name
        self.line = f"0::/{name}\n" if self.is_v2 else f"4:memory:/{name}\n"
        self.folder.mkdir()
        try:
            self._limit()
        except OSError:
            self.remove()
            raise

    def _limit(self) -> None:
        limit = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self.folder / limit).write_text(str(self._limit_bytes))
        swap = "memory.swap.max" if self.is_v2 else "memory.swappiness"
        if (self.folder / swap).exists():
            (self.folder / swap).write_text("0")

    def remove(self) -> None:
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except OSError:  # its process is still exiting
                time.sleep(0.02)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[SmallGroup]:
    try:
        group = SmallGroup(getattr(request, "param", LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    yield group
    group.remove()


def test_a_real_kill_by_a_control_group_s_limit_is_counted(
    group: SmallGroup, tmp_path: Path
) -> None:
    membership = tmp_path / "membership"
    membership.write_text(group.line)
    before = OomCount.now(membership=membership)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", GREEDY, str(group.folder / "cgroup.procs")],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert OomCount.now(membership=membership).since(before).kind is None  # control
            process.communicate(b"!", timeout=240)
        finally:
            process.kill()
    found = OomCount.now(membership=membership).since(before)
    assert process.returncode == -9
    assert (found.kind, found.num_kills, found.limit_bytes) == ("cgroup", 1, LIMIT_BYTES)


@pytest.mark.parametrize("group", [ROOM_FOR_A_LOADER_BYTES], indirect=True)
def test_a_loader_names_the_kernel_s_killer_with_the_limit_and_each_worker_s_memory(
    group: SmallGroup,
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(group.folder / "cgroup.procs")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (
        "killed by the kernel's OOM killer: 1 kill in this control group (limit 1.5 GiB)"
        in run.stdout
    )
    assert "while loading sample 9" in run.stdout
    assert re.search(r"as of each worker's last batch: worker \d 0\.\d+ GiB", run.stdout), (
        run.stdout
    )
    assert "left: 15" in run.stdout, run.stderr


@pytest.mark.parametrize("group", [1 << 20], indirect=True)
@pytest.mark.parametrize("kind", ["forked", "fresh"])
def test_a_fork_server_that_runs_out_of_memory_is_replaced(kind: str, group: SmallGroup) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SERVER, str(group.folder / "cgroup.procs")],
        env={**os.environ, "PENSTOCK_FORK_SERVER": kind},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.stdout.split("\n") == [kind, "all right", ""], run.stderr


def test_looking_takes_less_than_a_millisecond() -> None:
    times_s = []
    for _ in range(25):
        start_s = time.thread_time()  # processor time excludes other programs
        OomCount.now()
        times_s.append(time.thread_time() - start_s)
    assert min(times_s) < 0.001
