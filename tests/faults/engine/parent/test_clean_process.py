"""The fork server is a fork of the user's process only if that process is clean."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.parent import clean_process, fork_server
from support import scripts

pytestmark = [
    pytest.mark.fault,
    pytest.mark.legacy,
    pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="the process is traced"),
]

PROGRAM = """
import contextlib, importlib, json, os, socket, sys, threading
from pathlib import Path

import numpy as np
import torch

import penstock
from penstock.engine.parent import fork_server
from penstock.machine.native_threads import count_openblas_threads, count_threads

FOUND = {}


class Parallel:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        torch.set_num_threads(2)
        torch.rand(1 << 22).sum()
        return torch.get_num_threads()


def start(name):
    fork_server.close_fork_server()
    loader = penstock.DataLoader(range(8), batch_size=4, num_workers=1)
    FOUND[name] = fork_server.current_fork_server().why_fresh
    if FOUND[name] is None or name in LOADED:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        FOUND[name + ", plan"] = loader.plan.start_method.reason


LOADED = ("an open file",)
start("clean")
FOUND["threads after a fork"] = count_threads()
with open("data.bin", "wb+") as file:
    start("an open file")
start("clean after the file")
library = next(line.split()[-1] for line in open("/proc/self/maps") if ".so" in line)
fd = os.open(library, os.O_RDONLY)
start("an open library")
os.close(fd)

import logging
logging.getLogger("mine").addHandler(logging.FileHandler("log.txt"))
start("a log file")
with socket.socket() as sock:
    start("a socket")
inherited = os.pipe()
for fd in inherited:
    os.set_inheritable(fd, True)
start("an inherited pipe")
try:
    raise KeyError("retried")
except KeyError:
    start("an exception")
sys.settrace(lambda *_: None)
start("a tracer")
sys.settrace(None)
with torch.inference_mode():
    start("inference mode")
with torch.no_grad():
    start("no_grad")
if hasattr(torch, "set_default_device"):
    torch.set_default_device("cpu")
    start("a default device")
    torch.set_default_device(None)
Path("imports_a_loader.py").write_text("import __main__; __main__.start('an import')")
importlib.import_module("imports_a_loader")
data = np.ones(96 << 17)
start("much data")
del data
thread = threading.Thread(target=start, args=("another thread",))
thread.start()
thread.join()
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
start("threads")
stop.set()
thread.join()
np.ones((300, 300)) @ np.ones((300, 300))
FOUND["threads in use"] = [count_threads(), 1 + count_openblas_threads()]
start("OpenBLAS in use")
os.environ["PENSTOCK_FORK_SERVER"] = "fresh"
start("the switch")
del os.environ["PENSTOCK_FORK_SERVER"]
torch.rand(1 << 22).sum()
start("OpenMP in use")
if FOUND["OpenMP in use"] is None:
    loader = penstock.DataLoader(Parallel(), batch_size=None, num_workers=1)
    assert [*loader] == [2, 2], "a worker can use threads"
    torch.rand(1 << 22).sum()
torch.set_num_threads(3)
start("torch's own pool")
print(json.dumps(FOUND))
"""

CAN_STOP_OPENMP = not torch.__version__.startswith("1.")
REASONS = {
    "clean": None,
    "an open file": "data.bin is open",
    "clean after the file": None,
    "an open library": None,
    "a log file": None,
    "a socket": "a connection is open (socket:",
    "an inherited pipe": None,
    "an exception": "KeyError was being handled",
    "a tracer": "coverage tool is active",
    "inference mode": "torch.inference_mode is on",
    "no_grad": None,
    "a default device": "a torch mode is active",
    "an import": "imports_a_loader was being imported",
    "much data": "MiB besides its modules",
    "another thread": "the loader was created in thread",
    "threads": "it has 1 more thread",
    "OpenBLAS in use": None,
    "the switch": "PENSTOCK_FORK_SERVER=fresh is set",
    "OpenMP in use": None if CAN_STOP_OPENMP else "more thread",
    "torch's own pool": "more thread",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = scripts.run(PROGRAM, tmp_path_factory.mktemp("clean"))
    assert result.returncode == 0, result.stderr
    answers: dict[str, Any] = json.loads(result.stdout)
    return answers


@pytest.mark.parametrize("state", REASONS)
def test_the_process_is_forked_only_in_a_clean_state(state: str, found: dict[str, Any]) -> None:
    if state not in found:
        pytest.skip("this torch has no default device")
    expected = REASONS[state]
    if expected is None:
        assert found[state] is None
    else:
        assert expected in str(found[state])


def test_the_plan_says_which_process_is_forked(found: dict[str, Any]) -> None:
    assert "a copy of this process" in found["clean, plan"]
    assert found["an open file, plan"].startswith("a fresh Python forks workers, because /")


def test_openblas_starts_its_threads_again_when_they_are_needed(found: dict[str, Any]) -> None:
    num_threads, num_expected = found["threads in use"]
    assert num_threads == num_expected
    assert found["threads after a fork"] == 1


def test_pytest_with_its_captured_output_is_not_clean() -> None:
    assert clean_process.why_unclean() is not None


UNCHANGED = """
import sys
from torch.utils.data import DataLoader

if sys.argv[1:] == ["patch"]:
    import penstock
    penstock.patch()
loader = DataLoader(range(8), batch_size=4, num_workers=2)
if sys.argv[1:] == ["socket"]:
    import socket
    connection = socket.socket()
assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
from penstock.engine.parent import fork_server
print(fork_server._current.why_fresh)
"""


def test_a_patched_loader_forks_a_clean_process_before_its_pipes_are_open(tmp_path: Path) -> None:
    result = scripts.run(UNCHANGED, tmp_path, "patch")
    assert result.stdout == "None\n", result.stderr


@pytest.mark.parametrize(("argument", "reason"), [("none", "None"), ("socket", "a connection is")])
def test_penstock_run_forks_only_a_clean_process(
    argument: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "unchanged.py").write_text(UNCHANGED)
    result = scripts.run(
        "from penstock.cli import main; main()", tmp_path, "run", "unchanged.py", argument
    )
    assert result.stdout.startswith(reason), result.stderr


HANGS = """
import os, torch
torch.set_num_threads(2)
torch.rand(1 << 22).sum()
pid = os.fork()
torch.set_num_threads(2)
torch.rand(1 << 22).sum()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_fork_after_a_parallel_operation_hangs(tmp_path: Path) -> None:
    """The control: without the check, workers that use threads would hang."""
    (tmp_path / "hangs.py").write_text(HANGS)
    with scripts.running(HANGS, tmp_path) as process, pytest.raises(subprocess.TimeoutExpired):
        process.wait(20)


def test_a_fork_that_fails_early_is_replaced_by_a_fresh_python(
    tmp_path: Path,
) -> None:
    result = scripts.run(FAILS_EARLY, tmp_path)
    assert result.stdout.split("\n")[0] == "[[0, 1], [2, 3]]", result.stderr
    assert "a copy of this process did not become a fork server" in result.stdout


FAILS_EARLY = """
import os, penstock
from penstock.engine.parent import fork_server
owner = os.getpid()
def die():
    if os.getppid() == owner:
        os._exit(7)
os.register_at_fork(after_in_child=die)
loader = penstock.DataLoader(range(4), batch_size=2, num_workers=1)
print([batch.tolist() for batch in loader])
print(loader.plan.start_method.reason)
"""


def test_no_fork_server_says_nothing_about_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_current", None)
    assert fork_server.describe_start() is None
