"""No process or file of Penstock outlives the program, however it ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support import leftovers, scripts

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]  # the programs share one setup

HEAD = """
import ctypes, os, sys, time, threading, warnings
import torch
from penstock import DataLoader
method = sys.argv[1] if len(sys.argv) > 1 else "forkserver"
context = None if method == "forkserver" else method

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, i):
        return i

class Stuck(Data):
    def __getitem__(self, i):
        if i >= 8:
            time.sleep(60)
        return i

class Holding(Stuck):
    def __getitem__(self, i):
        if i >= 8 and torch.utils.data.get_worker_info().id == 1:
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock
        return super().__getitem__(i)

def start(data, **more):
    return iter(DataLoader(data, batch_size=2, num_workers=2,
                           multiprocessing_context=context, **more))
"""

RUNNING = "for n, b in enumerate(start(Data())):\n    n == 3 and print('ready', flush=True)\n"
STUCK = (
    "it = start(Stuck())\nnext(it), next(it), next(it)\ntime.sleep(0.3)\nprint('ready')\nlist(it)\n"
)
HOLDING = STUCK.replace("Stuck", "Holding")
IDLE = (
    "loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True,\n"
    "                    multiprocessing_context=context)\nnext(iter(loader))\n"
    "print('ready')\ntime.sleep(60)\n"
)
STARTING = RUNNING
METHODS = ["forkserver", "fork", "spawn"]
GONE_S = 60.0
"""Processes exit within 0.1 s, later on a busy machine. Stuck samples sleep for 60 s, so none of
them ends before this limit. The same holds for the limits below."""


KILLED = [
    ("RUNNING", "forkserver"),
    *[("STUCK", method) for method in METHODS],
    ("HOLDING", "forkserver"),  # under fork and spawn it ends with the native call; see docs
    ("IDLE", "forkserver"),
    ("STARTING", "forkserver"),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Programs killed while running: the number of children of each, and the children left."""

    def kill(case: tuple[str, str]) -> tuple[int, list[int]]:
        state, method = case
        folder = scripts.make_folder(tmp_path_factory, "killed")
        with scripts.running(HEAD + globals()[state], folder, method) as program:
            if state == "STARTING":
                scripts.wait_for_family(program.pid, 1)  # the fork server, while it imports torch
            else:
                scripts.read_line(program, "ready")
            family = scripts.family_of(program.pid)
            program.send_signal(signal.SIGKILL)
            program.wait()
            left = leftovers.wait_until_gone(family, GONE_S)
        for pid in left:  # orphans: a failed test must not leave them
            os.kill(pid, signal.SIGKILL)
        return len(family), left

    return scripts.run_all(kill, KILLED, at_once=3)  # they mostly wait


@pytest.mark.parametrize(("state", "method"), KILLED)
def test_when_the_parent_is_killed_everything_else_goes(
    state: str, method: str, killed: dict[Any, Any]
) -> None:
    num_children, left = scripts.told(killed[state, method])
    least = 1 if state == "STARTING" else 3 if method == "forkserver" else 2
    assert num_children >= least  # control: there were children to end
    assert left == []


def test_a_child_that_is_not_ours_does_outlive_its_parent(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\n"
        "print('ready', flush=True)\ntime.sleep(20)\n"
    )
    with scripts.running(source, tmp_path) as program:
        scripts.read_line(program, "ready")
        family = scripts.family_of(program.pid)
        program.send_signal(signal.SIGKILL)
        program.wait()
        try:
            assert leftovers.wait_until_gone(family, 1.0) == family
        finally:
            for pid in family:
                os.kill(pid, signal.SIGKILL)


INTERRUPTED = [
    ("forkserver", "RUNNING"),
    ("forkserver", "STUCK"),
    ("forkserver", "starting"),
    ("forkserver", "starting for a while"),
    ("fork", "RUNNING"),
    ("spawn", "RUNNING"),
    ("spawn", "starting for a while"),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Programs that received Ctrl-C: exit code, output, and the children left."""

    def interrupt(case: tuple[str, str]) -> tuple[int, str, list[int]]:
        method, state = case
        body = RUNNING if "starting" in state else globals()[state]
        folder = scripts.make_folder(tmp_path_factory, "interrupted")
        with scripts.running(HEAD + body, folder, method) as program:
            if "starting" in state:
                scripts.wait_for_family(program.pid, 1)
                time.sleep(0.5 if "while" in state else 0.0)
            else:
                scripts.read_line(program, "ready")
            family = scripts.family_of(program.pid)
            os.killpg(program.pid, signal.SIGINT)  # the whole group, like a terminal
            _, said = program.communicate(timeout=240)
            return program.returncode, said, leftovers.wait_until_gone(family, GONE_S)

    return scripts.run_all(interrupt, INTERRUPTED)


@pytest.mark.skipif(
    "COVERAGE_PROCESS_START" in os.environ,
    reason="a Ctrl-C inside coverage's tracer leaves its lock held, and the program hangs in there",
)
@pytest.mark.parametrize(("method", "state"), INTERRUPTED)
def test_ctrl_c_leaves_nothing_and_says_so_once(
    method: str, state: str, interrupted: dict[Any, Any]
) -> None:
    code, said, left = scripts.told(interrupted[method, state])
    assert left == []
    assert code in (-signal.SIGINT, 1, 130)
    assert said.count("KeyboardInterrupt") == 1, said
    num_chained = said.count("During handling of the above exception")
    assert said.count("Traceback") - num_chained == 1, said
    assert not re.search(r"^Process \S+:$", said, re.MULTILINE)  # printed by multiprocessing


def test_after_a_ctrl_c_that_was_caught_the_loader_goes_on(tmp_path: Path) -> None:
    source = HEAD + (
        "loader = DataLoader(Data(), batch_size=2, num_workers=2)\n"
        "try:\n"
        "    for n, b in enumerate(loader):\n"
        "        n == 3 and print('ready', flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('caught', flush=True)\n"
        "for n, b in enumerate(loader):\n"
        "    assert b.tolist() == [2 * n, 2 * n + 1]\n"
        "    if n == 100: break\n"
        "print('went on', flush=True)\n"
    )
    with scripts.running(source, tmp_path) as program:
        scripts.read_line(program, "ready")
        os.killpg(program.pid, signal.SIGINT)
        scripts.read_line(program, "caught")
        scripts.read_line(program, "went on")
        assert program.wait(30) == 0


ENDINGS = {
    "sys.exit in the loop": ("for b in start(Data()):\n    sys.exit(4)\n", 4),
    "an iterator that is still alive": ("it = start(Data())\nnext(it)\n", 0),
    "a persistent loader that is still alive": (
        "loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)\n"
        "it = iter(loader)\nnext(it)\n",
        0,
    ),
    "os._exit": ("it = start(Data())\nnext(it)\nos._exit(3)\n", 3),
    "a sample that hangs": ("it = start(Holding())\nnext(it)\ntime.sleep(0.3)\n", 0),
    "threads of a pool": (
        "it = iter(DataLoader(Data(), batch_size=2, num_workers=2, pool='thread'))\nnext(it)\n",
        0,
    ),
}


TELL = """
def tell():
    import psutil
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Programs that ran to the end: exit code, output, and the children left."""

    def end(name: str) -> tuple[int, str, list[int]]:
        body = ENDINGS[name][0].replace("next(it)\n", "next(it)\ntell()\n", 1)
        with scripts.running(
            HEAD + TELL + body, scripts.make_folder(tmp_path_factory, "ended")
        ) as program:
            out, said = program.communicate(timeout=240)
        family = [int(pid) for pid in out.split()]
        return program.returncode, said, leftovers.wait_until_gone(family, GONE_S)

    return scripts.run_all(end, list(ENDINGS))


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_ends_leaves_nothing_and_says_nothing(
    name: str, ended: dict[str, Any]
) -> None:
    code, said, left = scripts.told(ended[name])
    assert (code, said) == (ENDINGS[name][1], "")
    assert left == []


def test_an_error_in_the_loop_is_told_once(tmp_path: Path) -> None:
    result = scripts.run(
        HEAD + "for b in start(Data()):\n    raise LookupError('mine')\n", tmp_path
    )
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.rstrip().endswith("LookupError: mine")
