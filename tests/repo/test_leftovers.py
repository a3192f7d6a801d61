"""The leftover fixture notices every kind of resource that a test can leave behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock import DataLoader
from penstock.engine.memory.shared_file import SharedFile
from support import leftovers
from support.datasets import Numbers

linux_only = pytest.mark.skipif(not leftovers.HAS_PROC, reason="counts in /proc")


def named(before: leftovers.World) -> str:
    return "\n".join(leftovers.wait_until_clean(before, 0.1))


def test_nothing_done_is_nothing_left() -> None:
    assert leftovers.difference(leftovers.look(), leftovers.look()) == []


def test_a_child_process_is_noticed() -> None:
    before = leftovers.look()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        assert f"process {child.pid}" in named(before)
    finally:
        child.kill()
        child.wait()
    assert named(before) == ""


@linux_only
def test_a_descriptor_is_noticed() -> None:
    before = leftovers.look()
    fd = os.open("/dev/null", os.O_RDONLY)
    assert "/dev/null" in named(before)
    os.close(fd)
    assert named(before) == ""


@linux_only
def test_a_segment_in_shared_memory_is_noticed() -> None:
    before = leftovers.look()
    path = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    path.write_bytes(b"x")
    try:
        assert path.name in named(before)
    finally:
        path.unlink()


@linux_only
def test_a_segment_that_another_process_uses_is_not_blamed_on_us() -> None:
    path = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    hold = (
        "import mmap, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 4096)\n"
        "mapping = mmap.mmap(fd, 4096)\nprint('holding', flush=True)\ntime.sleep(30)\n"
    )
    before = leftovers.look()
    # Started through a shell that exits, so it is a separate process and not a child of this one.
    command = f"{sys.executable} -c '{hold.replace(chr(39), chr(34))}' {path} & echo $!"
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    lines = {shell.stdout.readline().strip(), shell.stdout.readline().strip()}
    shell.wait()
    try:
        assert "holding" in lines
        assert path.exists()
        assert named(before).count("segment") == 0
        holder = int((lines - {"holding"}).pop())
        os.kill(holder, signal.SIGKILL)
        assert leftovers.wait_until_gone([holder]) == []
        assert "segment" in named(before)  # control: no process holds it
    finally:
        shell.stdout.close()
        path.unlink()


@linux_only
def test_a_mapping_of_our_memory_is_noticed_although_its_descriptor_is_closed() -> None:
    before = leftovers.look()
    file = SharedFile.create()
    mapping = file.map(file.grow(10), 10)
    file.close()
    assert "mappings" in named(before)
    assert isinstance(mapping, mmap.mmap)
    del mapping
    assert named(before) == ""


def test_a_thread_of_ours_is_noticed_and_another_is_not() -> None:
    before = leftovers.look()
    stop = threading.Event()
    threads = [
        threading.Thread(target=stop.wait, name=name) for name in ("penstock-worker-9", "mine")
    ]
    for thread in threads:
        thread.start()
    assert named(before) == "thread penstock-worker-9"
    stop.set()
    for thread in threads:
        thread.join()


def test_a_worker_is_noticed_and_the_fork_server_is_not() -> None:
    before = leftovers.look()
    iterator = iter(DataLoader(Numbers(1000), batch_size=2, num_workers=1))
    pid = iterator._workers[0].pid
    assert f"process {pid}" in named(before)
    del iterator
    assert leftovers.wait_until_clean(before) == []


def test_a_zombie_counts_as_gone_and_a_sleeper_does_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    assert leftovers.wait_until_gone([child.pid], 0.1) == [child.pid]
    child.kill()
    assert leftovers.wait_until_gone([child.pid]) == []
    child.wait()
