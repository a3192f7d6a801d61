"""However a program ends, nothing of ours outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import leftovers
import pytest
import scripting

pytestmark = pytest.mark.fault

HEAD = """
import ctypes, os, sys, time, threading, warnings
import torch
from penstock import DataLoader
method = sys.argv[1] if len(sys.argv) > 1 else "nursery"
context = None if method == "nursery" else method

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, i):
        return i

class Stuck(Data):
    def __getitem__(self, i):
        if i == 8:
            time.sleep(60)
        if i == 10:
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock
        return i

def start(data, **more):
    return iter(DataLoader(data, batch_size=2, num_workers=2,
                           multiprocessing_context=context, **more))
"""

RUNNING = "for n, b in enumerate(start(Data())):\n    n == 3 and print('ready', flush=True)\n"
STUCK = "it = start(Stuck())\nnext(it), next(it), next(it)\ntime.sleep(0.3)\nprint('ready')\nlist(it)\n"
IDLE = (
    "loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True,\n"
    "                    multiprocessing_context=context)\nnext(iter(loader))\n"
    "print('ready')\ntime.sleep(60)\n"
)
METHODS = ["nursery", "fork", "spawn"]
GONE_S = 3.0


@pytest.mark.parametrize(
    ("state", "method"),
    [
        *[("RUNNING", method) for method in METHODS],
        *[("STUCK", method) for method in METHODS],
        ("IDLE", "nursery"),
    ],
)
def test_when_the_parent_is_killed_everything_else_goes(
    method: str, state: str, tmp_path: Path
) -> None:
    with scripting.running(HEAD + globals()[state], tmp_path, method) as program:
        scripting.read_line(program, "ready")
        family = scripting.family_of(program.pid)
        assert len(family) >= (3 if method == "nursery" else 2)  # control: there is something to go
        program.send_signal(signal.SIGKILL)
        program.wait()
        assert leftovers.wait_until_gone(family, GONE_S) == []


def test_a_child_that_is_not_ours_does_outlive_its_parent(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\n"
        "print('ready', flush=True)\ntime.sleep(20)\n"
    )
    with scripting.running(source, tmp_path) as program:
        scripting.read_line(program, "ready")
        family = scripting.family_of(program.pid)
        program.send_signal(signal.SIGKILL)
        program.wait()
        try:
            assert leftovers.wait_until_gone(family, 1.0) == family
        finally:
            for pid in family:
                os.kill(pid, signal.SIGKILL)


def interrupt(program: object, family: list[int]) -> tuple[int, str]:
    """Ctrl-C: the whole process group gets the signal. Gives the exit code and what was said."""
    os.killpg(program.pid, signal.SIGINT)  # type: ignore[attr-defined]
    _, said = program.communicate(timeout=15)  # type: ignore[attr-defined]
    assert leftovers.wait_until_gone(family, GONE_S) == []
    return program.returncode, said  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "state"),
    [("nursery", "RUNNING"), ("nursery", "STUCK"), ("fork", "RUNNING"), ("spawn", "RUNNING")],
)
def test_ctrl_c_leaves_nothing_and_says_so_once(method: str, state: str, tmp_path: Path) -> None:
    with scripting.running(HEAD + globals()[state], tmp_path, method) as program:
        scripting.read_line(program, "ready")
        code, said = interrupt(program, scripting.family_of(program.pid))
    assert code in (-signal.SIGINT, 1, 130)
    assert said.count("KeyboardInterrupt") == 1
    assert said.count("Traceback") == 1
    assert "Process" not in said


@pytest.mark.parametrize(
    ("method", "delay_s"), [("nursery", 0.0), ("nursery", 0.5), ("spawn", 0.5)]
)
def test_ctrl_c_while_workers_start_leaves_nothing_and_says_so_once(
    method: str, delay_s: float, tmp_path: Path
) -> None:
    with scripting.running(HEAD + RUNNING, tmp_path, method) as program:
        family = scripting.wait_for_family(program.pid, 1)
        time.sleep(delay_s)
        code, said = interrupt(program, family + scripting.family_of(program.pid))
    assert code in (-signal.SIGINT, 1, 130)
    assert said.count("KeyboardInterrupt") == 1
    assert said.count("Traceback") == 1


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
    with scripting.running(source, tmp_path) as program:
        scripting.read_line(program, "ready")
        os.killpg(program.pid, signal.SIGINT)
        scripting.read_line(program, "caught")
        scripting.read_line(program, "went on")
        assert program.wait(10) == 0


ENDINGS = {
    "sys.exit in the loop": ("for b in start(Data()):\n    sys.exit(4)\n", 4),
    "an iterator that is still alive": ("it = start(Data())\nnext(it)\n", 0),
    "a persistent loader that is still alive": (
        "loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)\n"
        "next(iter(loader))\n",
        0,
    ),
    "os._exit": ("it = start(Data())\nnext(it)\nos._exit(3)\n", 3),
    "a sample that hangs": ("it = start(Stuck())\nnext(it)\ntime.sleep(0.3)\n", 0),
    "a thread that goes on loading": (
        "def forever():\n    for b in start(Data()): pass\n"
        "threading.Thread(target=forever, daemon=True).start()\ntime.sleep(3)\n",
        0,
    ),
    "threads of a pool": (
        "it = iter(DataLoader(Data(), batch_size=2, num_workers=2, pool='thread'))\nnext(it)\n",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_ends_leaves_nothing_and_says_nothing(name: str, tmp_path: Path) -> None:
    body, expected = ENDINGS[name]
    watch = (
        "def tell():\n"
        "    import psutil\n"
        "    return ' '.join(str(c.pid) for c in psutil.Process().children(recursive=True))\n"
    )
    body = body.replace("next(it)\n", "next(it)\nprint(tell(), flush=True)\n", 1)
    with scripting.running(HEAD + watch + body, tmp_path) as program:
        out, said = program.communicate(timeout=30)
    assert (program.returncode, said) == (expected, "")
    family = [int(pid) for pid in out.split()]
    assert leftovers.wait_until_gone(family, GONE_S) == []


def test_an_error_in_the_loop_is_told_once(tmp_path: Path) -> None:
    result = scripting.run(HEAD + "for b in start(Data()):\n    raise LookupError('mine')\n", tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.rstrip().endswith("LookupError: mine")
