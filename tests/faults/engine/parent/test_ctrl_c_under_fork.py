"""Ctrl-C is not lost while workers are forked, and workers print no traceback for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import interrupts, scripts

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

NUM_PROGRAMS = 20

IN_A_HOOK = """
import multiprocessing, os, signal, sys, threading, time
import torch
from penstock import DataLoader

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # it may take the signal
is_armed = []

def hook():
    if is_armed:
        is_armed.clear()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # until the signal is handled, in here
            time.sleep(0.0001)

os.register_at_fork(**{sys.argv[1]: hook})
signal.signal(signal.SIGINT, signal.default_int_handler)
loader = DataLoader(range(8), batch_size=4, num_workers=1, multiprocessing_context="fork")
try:
    is_armed.append(1)
    if sys.argv[2] == "loader":
        print([batch.tolist() for batch in loader])
    else:
        process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
        process.start()
        process.join()
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
    is_armed.clear()
    print([batch.tolist() for batch in loader])
print(len(multiprocessing.active_children()))
"""
BATCHES = "[[0, 1, 2, 3], [4, 5, 6, 7]]"


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_ctrl_c_inside_somebody_s_hook_is_raised_after_the_fork(
    moment: str, tmp_path: Path
) -> None:
    result = scripts.run(IN_A_HOOK, tmp_path, moment, "loader")
    assert result.stdout.splitlines() == ["interrupted", BATCHES, "0"]
    assert result.stderr == ""


def test_elsewhere_it_is_lost(tmp_path: Path) -> None:
    result = scripts.run(IN_A_HOOK, tmp_path, "before", "process")
    assert result.stdout.splitlines() == ["child", "went on", "0"]
    assert "Exception ignored" in result.stderr
    assert "KeyboardInterrupt" in result.stderr


def test_a_worker_does_not_see_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    result = scripts.run(IN_A_HOOK, tmp_path, "after_in_child", "loader")
    assert result.stdout.splitlines() == [BATCHES, "went on", "0"]
    assert result.stderr == ""


def test_another_child_does(tmp_path: Path) -> None:
    result = scripts.run(IN_A_HOOK, tmp_path, "after_in_child", "process")
    assert "KeyboardInterrupt" in result.stderr


@pytest.mark.slow
def test_programs_that_get_ctrl_c_at_random_moments_end(tmp_path: Path) -> None:
    endings = interrupts.interrupt(tmp_path, NUM_PROGRAMS)
    assert len(endings) == NUM_PROGRAMS
    assert [ending for ending in endings if not ending.is_clean] == []


HOOKS = """
import os, sys, types

def is_python(hook):
    return not isinstance(getattr(hook, "func", hook), types.BuiltinFunctionType)

def record(**hooks):
    caller = sys._getframe(1).f_globals["__name__"]
    found.extend((caller, is_python(hook)) for hook in hooks.values())
    register(**hooks)

found, register, os.register_at_fork = [], os.register_at_fork, record
from penstock.cli.run import PatchOptions, _PatchedRun, options_of
import penstock.engine.parent.launcher
import torch
defaults = {name: option.default for name, option in options_of(PatchOptions).items()}
_PatchedRun().patch_torch(defaults, conv=None, trace=None)
ours = [one for one in found if one[0].startswith("penstock.")]
print(*sorted({caller for caller, _ in ours}))
print([caller for caller, is_bad in ours if is_bad])
print(sum(is_bad for _, is_bad in found) > 0)
"""


def test_no_at_fork_hook_of_ours_runs_python(tmp_path: Path) -> None:
    result = scripts.run(HOOKS, tmp_path)
    names, ours, has_others = result.stdout.splitlines()
    assert names.split() == [
        "penstock.cli.run",
        "penstock.engine.memory.fork_watch",
        "penstock.engine.parent.fork_server",
        "penstock.trace.record",
    ]
    assert ours == "[]"
    assert has_others == "True"  # control: hooks of other libraries do
