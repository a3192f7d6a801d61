"""A thread that exists only while there is work, and its behavior when the program ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.device.on_demand_thread import OnDemandThread
from support.scripts import run

LEAVING = """
import time
from penstock.device import on_demand_thread

def work(items):
    while items:
        items.pop()
        time.sleep({seconds})
        print("done", flush=True)

{control}
thread = on_demand_thread.OnDemandThread(work)
thread.submit(1)
thread.submit(2)
"""


def test_what_has_begun_is_waited_for_at_the_end(tmp_path: Path) -> None:
    end = run(LEAVING.format(control="", seconds=0.2), tmp_path)
    assert (end.returncode, end.stdout.split()) == (0, ["done"] * 2), end.stderr


def test_the_control_leaves_it_unfinished(tmp_path: Path) -> None:
    end = run(
        LEAVING.format(control="on_demand_thread.WAIT_AT_EXIT_S = 0.0", seconds=9.0), tmp_path
    )
    assert end.stdout.split() != ["done"] * 2


def test_nothing_is_begun_after_the_end(tmp_path: Path) -> None:
    late = """
from penstock.device import on_demand_thread

thread = on_demand_thread.OnDemandThread(lambda items: print("late", items, flush=True))
on_demand_thread._wait_for_all()
thread.submit(1)
assert not thread.is_running
"""
    end = run(late, tmp_path)
    assert (end.returncode, end.stdout) == (0, ""), end.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path: Path) -> None:
    forking = """
import os, sys, threading, time
from penstock.device import on_demand_thread

begun, done = threading.Event(), threading.Event()

def work(items):
    items.clear()
    begun.set()
    done.wait(200)

thread = on_demand_thread.OnDemandThread(work)
thread.submit(1)
begun.wait(200)
child = os.fork()
if not child:
    sys.exit(0)  # with everything that Python does at its end
start_s = time.monotonic()
os.waitpid(child, 0)
done.set()
print(time.monotonic() - start_s)
"""
    end = run(forking, tmp_path)
    assert float(end.stdout) < 100, end.stderr


def is_soon(question: Callable[[], bool], limit_s: float = 120.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not question() and time.monotonic() < until_s:
        time.sleep(0.001)
    return question()


def test_work_that_fails_does_not_end_the_thread_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    failures: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failures.append)

    def work(items: list[int]) -> None:
        seen.extend(items)
        if 0 in items:
            raise ValueError("of the work")

    thread = OnDemandThread(work)
    thread.submit(0)
    assert is_soon(lambda: bool(failures))
    thread.submit(1)
    assert is_soon(lambda: seen == [0, 1])
    assert is_soon(lambda: not thread.is_running)


def test_many_threads_may_submit_to_one_thread() -> None:
    done: list[int] = []
    worker: OnDemandThread[int] = OnDemandThread(done.extend)
    threads = [
        threading.Thread(target=lambda first=first: [worker.submit(first + i) for i in range(50)])
        for first in range(0, 400, 50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_soon(lambda: len(done) == 400)
    assert sorted(done) == list(range(400))
    assert is_soon(lambda: not worker.is_running)
