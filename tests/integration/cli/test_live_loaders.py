"""Reads real programs from outside while they run, hang, stop, fork and end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from support.live_programs import running, wait_for

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

from penstock.cli.live_loaders import (
    LoaderView,
    WorkerView,
    _Pool,
    find_programs,
    read_program,
)
from penstock.engine.memory.messages import control_bytes


@pytest.mark.slow
def test_a_program_is_found_and_its_workers_are_seen() -> None:
    with running("1", "2") as program:
        (view,) = wait_for(lambda: read_program(program.pid))
        assert program.pid in set(find_programs())
        assert view.metrics.num_batches > 10
        assert view.metrics.samples_per_s > 0
        assert view.metrics.load.p50_s >= 0.008
        assert view.facts["dataset"] == "Slow"
        assert [worker.number for worker in view.workers] == [0, 1]
        assert {worker.state for worker in view.workers} <= {"loading", "idle"}
        assert len({worker.pid for worker in view.workers} | {program.pid}) == 3
        assert view.waiting_s is None
        assert not view.is_stopped
        os.kill(program.pid, signal.SIGSTOP)
        assert wait_for(lambda: read_program(program.pid)[0].is_stopped)
        os.kill(program.pid, signal.SIGCONT)
        assert wait_for(lambda: not read_program(program.pid)[0].is_stopped)
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        with pytest.raises((FileNotFoundError, ProcessLookupError)):
            read_program(program.pid)
    assert program.pid not in set(find_programs())


@pytest.mark.slow
def test_a_sample_that_hangs_is_named_with_its_worker() -> None:
    def hung() -> LoaderView | None:
        views = read_program(program.pid)
        is_there = views and views[0].waiting_s is not None and views[0].waiting_s > 3
        return views[0] if is_there else None

    with running("1", "2", "hang", waits=False) as program:
        view = wait_for(hung)
        (busy,) = (worker for worker in view.workers if worker.state == "loading")
        assert (busy.sample, busy.position) == ("777", 777)
        assert busy.busy_s > 1
        (idle,) = (worker for worker in view.workers if worker is not busy)
        assert (idle.state, idle.sample, idle.busy_s) == ("idle", None, 0.0)


@pytest.mark.slow
def test_a_fork_of_the_program_is_not_a_second_loader() -> None:
    with running("2", "0", "fork") as program:
        assert len(wait_for(lambda: read_program(program.pid))) == 2
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        assert children
        assert all(read_program(int(child)) == [] for child in children)


def workers_of(pids: list[int]) -> list[WorkerView]:
    """Return what is seen of a pool of this process, with workers of these pids."""
    fd = os.memfd_create("penstock-test")
    try:
        os.ftruncate(fd, control_bytes(len(pids), 0))
        pool = {"pids": pids, "pass_offset": 0, "trace_bytes": 0, "fd": fd}
        return list(_Pool(os.getpid(), pool, [], {}).workers(at_ns=0))
    finally:
        os.close(fd)


def test_workers_on_other_machines_have_no_pid_and_are_not_lost() -> None:
    local, remote = workers_of([os.getpid(), 0])  # as with remote_workers=
    assert (local.pid, local.state) == (os.getpid(), "loading")
    assert (remote.pid, remote.state) == (None, "loading")
    (ended,) = workers_of([(1 << 22) + 1])  # the control: no process can have this pid
    assert ended.state == "lost"
