"""Finds what a test leaves behind, from /proc, psutil and the list of threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import resource_tracker

import psutil

SETTLE_S = 60.0
GONE_S = 60.0
"""Limits that only a hang reaches, even on a busy machine."""
"""Time for a stopped process to disappear. Anything that remains longer is left over."""
PREFIX = "penstock-"
KEPT = ("/dev/nvidia", "/tmp/perf-", "/sys/")
"""Opened by a GPU driver, or by torch's libraries on arm64, and kept until exit."""
BROWSER = "/chromium/chromium --"
HAS_PROC = os.path.isdir("/proc/self/fd")
"""Outside Linux, only processes and threads can be counted."""


@dataclass(frozen=True)
class World:
    """Snapshot of this process and its resources."""

    children: dict[int, str]
    fds: dict[int, str]
    segments: frozenset[str]
    mappings: int
    threads: frozenset[str]


def fork_server_pid() -> int | None:
    """Return the PID of this process's fork server, if any. It stays warm between tests."""
    module = sys.modules.get("penstock.engine.parent.fork_server")
    fork_server = getattr(module, "_current", None)
    return None if fork_server is None else fork_server.pid


def _fds_that_stay() -> set[int | None]:
    """Return the descriptors that live as long as this process.

    They lead to the fork server, to multiprocessing's resource tracker, and to the pipe that forked
    children inherit.
    """
    module = sys.modules.get("penstock.engine.parent.fork_server")
    fork_server = getattr(module, "_current", None)
    fds = {resource_tracker._resource_tracker._fd}  # type: ignore[attr-defined]
    if fork_server is not None:
        fds.add(fork_server._control.fileno())
    watch = sys.modules.get("penstock.engine.memory.fork_watch")
    return fds if watch is None else fds.union(watch.process_forks.fds)


def _descendants() -> list[psutil.Process]:
    """Return all descendants of this process.

    psutil reads every process of the machine, twice in each of thousands of tests. Reading the list
    of a thread's children on Linux, which is usually empty, takes a tenth of the time.
    """
    parents = [os.getpid()]
    try:
        for parent in parents:  # the list grows during the loop
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    parents += map(int, file.read().split())
        return [psutil.Process(pid) for pid in parents[1:]]
    except (OSError, psutil.NoSuchProcess):  # no such list, or a process ended
        if sys.platform == "win32" and os.getpid() not in psutil._psplatform.ppid_map().values():
            return []  # the usual case, in one call
        return psutil.Process().children(recursive=True)


def _children() -> dict[int, str]:
    found = {}
    spared = {fork_server_pid()}
    for process in _descendants():
        if process.pid in spared:
            continue
        try:
            command = " ".join(process.cmdline())
            if "resource_tracker" in command:
                continue  # multiprocessing's resource tracker lives as long as the interpreter
            if BROWSER in command:
                continue  # it starts and ends processes while its module's tests run
            found[process.pid] = f"process {process.pid} ({process.status()}): {command[:120]}"
        except psutil.NoSuchProcess:
            continue
    return found


def _fds() -> dict[int, str]:
    found = {}
    stay = _fds_that_stay()
    for name in os.listdir("/proc/self/fd") if HAS_PROC else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
        if int(name) not in stay and not target.startswith(KEPT):
            found[int(name)] = target
    return found


def _segments() -> frozenset[str]:
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def _mappings() -> int:
    if not HAS_PROC:
        return 0
    with open("/proc/self/maps", "rb") as file:  # hundreds of lines, twice in each test
        maps = file.read()
    return maps.count(b"memfd:penstock") + maps.count(b"/penstock-")


def look() -> World:
    """Take a snapshot of the current state."""
    return World(
        children=_children(),
        fds=_fds(),
        segments=_segments(),
        mappings=_mappings(),
        threads=frozenset(t.name for t in threading.enumerate() if t.name.startswith(PREFIX)),
    )


def difference(before: World, after: World) -> list[str]:
    """Describe the resources in ``after`` that are not in ``before``."""
    left = [text for pid, text in after.children.items() if pid not in before.children]
    if len(after.fds) > len(before.fds):
        new = Counter(after.fds.values()) - Counter(before.fds.values())
        num_more = len(after.fds) - len(before.fds)
        left.append(f"{num_more} descriptors, among {dict(new)}")
    left += [
        f"segment /dev/shm/{name}"
        for name in sorted(after.segments - before.segments)
        if not _belongs_to_others(name)
    ]
    if after.mappings > before.mappings:
        left.append(f"{after.mappings - before.mappings} mappings of a penstock memfd or file")
    left += [f"thread {name}" for name in sorted(after.threads - before.threads)]
    return left


def _belongs_to_others(segment: str) -> bool:
    """Return True if a process outside this process tree maps the segment.

    Other programs run on the same machine. The segment is matched by inode, because glibc maps a
    semaphore under a temporary name before it gets its own.
    """
    try:
        inode = f" {os.stat(f'/dev/shm/{segment}').st_ino} "
    except FileNotFoundError:
        return True  # already gone
    ours = {os.getpid(), fork_server_pid(), *_children()}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            with open(f"/proc/{process.pid}/maps") as lines:
                if any("/dev/shm/" in line and inode in line for line in lines):
                    return True
        except OSError:
            continue
    return False


def wait_until_clean(before: World, settle_s: float = SETTLE_S) -> list[str]:
    """Return the leftovers after a settling period."""
    limit, pause_s = time.monotonic() + settle_s, 0.0
    youngest = 1
    while True:
        left = difference(before, look())
        if not left or time.monotonic() > limit:
            return left
        time.sleep(pause_s)
        # Objects of the test are usually young. A full collection takes ten times as long.
        gc.collect(youngest)
        if youngest == 2:
            pause_s = 0.02  # the rest needs time, not a collection
        youngest = 2


def wait_until_gone(pids: list[int], limit_s: float = GONE_S) -> list[int]:
    """Return the processes that still run after ``limit_s``. Zombies count as ended."""
    limit = time.monotonic() + limit_s
    while True:
        alive = [pid for pid in pids if is_running(pid)]
        if not alive or time.monotonic() > limit:
            return alive
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
