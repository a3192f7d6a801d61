"""A thread that is there only while there is something to do, and the end of the program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripting import run

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
    done.wait(30)

thread = on_demand_thread.OnDemandThread(work)
thread.submit(1)
begun.wait(30)
child = os.fork()
if not child:
    sys.exit(0)  # with everything that Python does at its end
start_s = time.monotonic()
os.waitpid(child, 0)
done.set()
print(time.monotonic() - start_s)
"""
    end = run(forking, tmp_path)
    assert float(end.stdout) < 5, end.stderr
