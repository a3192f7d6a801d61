"""``penstock top`` in a terminal, as JSON, and of programs that it cannot show."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from penstock.cli import top
from penstock.cli.live_loaders import WorkerView, read_program
from support import command_line
from support.live_programs import running, wait_for

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

import fcntl
import pty
import struct
import termios

pytestmark = pytest.mark.slow


class Terminal:
    """``penstock top`` in a pseudo-terminal of a given size."""

    def __init__(self, *arguments: str, columns: int, rows: int = 40) -> None:
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        command = [sys.executable, "-m", "penstock", "top", *arguments]
        self.program = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env=environment
        )
        os.close(other)
        self.text = ""

    def read_until(self, pattern: str) -> str:
        """Read until a pattern is in the text since the last call."""
        text, limit = "", time.monotonic() + 240
        while not re.search(pattern, text):
            assert time.monotonic() < limit, text
            if select.select([self._end], [], [], 1.0)[0]:
                try:
                    text += os.read(self._end, 1 << 16).decode()
                except OSError:  # the command has ended
                    assert re.search(pattern, text), text
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        return text

    def interrupt(self) -> None:
        self.program.send_signal(signal.SIGINT)

    def close(self) -> int:
        """Wait for the end of the command."""
        while self.program.poll() is None:
            if select.select([self._end], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # it has closed its end
                    os.read(self._end, 1 << 16)  # otherwise it would wait for room
        os.close(self._end)
        return self.program.returncode


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_a_program_until_it_ends(columns: int) -> None:
    with running("1", "2") as program:
        terminal = Terminal(str(program.pid), columns=columns)
        text = terminal.read_until("restarts\\s")
        assert f"{program.pid}  Slow, batch size 4" in text
        assert "samples/s" in text
        widths = [len(line.rstrip()) for line in re.split(r"[\r\n]+", text)]
        assert max(widths) <= columns
        os.kill(program.pid, signal.SIGSTOP)
        terminal.read_until("program is stopped")
        os.kill(program.pid, signal.SIGCONT)
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        terminal.read_until(f"Program {program.pid} has ended")
        assert terminal.close() == 0


def test_ctrl_c_ends_the_view_and_not_the_program() -> None:
    with running("1", "0") as program:
        terminal = Terminal(columns=100)
        terminal.read_until(f"{program.pid}  Slow")
        terminal.interrupt()
        assert terminal.close() == 0
        assert program.poll() is None


@pytest.mark.parametrize(("num_loaders", "num_workers"), [("20", "0"), ("1", "64")])
def test_many_loaders_and_many_workers_are_shown(num_loaders: str, num_workers: str) -> None:
    with running(num_loaders, num_workers) as program:
        wait_for(lambda: len(read_program(program.pid)) == int(num_loaders))
        done = command_line.invoke("top", str(program.pid), "--json")
        found = json.loads(done.output)
        assert len(found) == int(num_loaders)
        assert [len(view["workers"]) for view in found] == [int(num_workers)] * int(num_loaders)
        printed = command_line.invoke("top", str(program.pid), "--once").output
        assert printed.count("Slow, batch size 4") == int(num_loaders)
        assert ("and 48 more" in printed) is (num_workers == "64")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(("num_loaders", "num_workers"), [("20", "1"), ("1", "64")])
def test_a_small_window_shows_all_loaders_or_the_busiest_workers(
    num_loaders: str, num_workers: str, columns: int
) -> None:
    with running(num_loaders, num_workers) as program:
        wait_for(lambda: len(read_program(program.pid)) == int(num_loaders))
        terminal = Terminal(str(program.pid), columns=columns, rows=24)
        if num_loaders == "20":
            pattern = rf"bottleneck\s+(?:{program.pid}\s+Slow\s[^\n]*\n\s*){{20}}"
            text = terminal.read_until(pattern)
            assert "batch size 4" not in text  # the lines of each loader, where there is room
        else:
            text = terminal.read_until(r"and \d+ more")
            assert "batch size 4" in text
            assert 1 <= len(re.findall(r"^\s*\d+\s+\d+\s+(?:idle|loading)", text, re.M)) <= 20
        assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", text)) <= columns
        terminal.interrupt()
        assert terminal.close() == 0


def test_ranks_and_scripts_under_penstock_run_are_shown() -> None:
    run = (sys.executable, "-m", "penstock", "run")
    with (
        running("1", "1", RANK="0") as first,
        running("1", "1", RANK="1") as second,
        running("1", "1", "torch", launcher=run) as script,
    ):
        pids = (first.pid, second.pid, script.pid)
        wait_for(lambda: all(read_program(pid) for pid in pids))
        found = {
            view["pid"]: view for view in json.loads(command_line.invoke("top", "--json").output)
        }
        assert [found[pid]["rank"] for pid in pids] == ["0", "1", None]
        assert all(len(found[pid]["workers"]) == 1 for pid in pids)
        printed = command_line.invoke("top", "--once").output
        assert f"{first.pid} rank 0  Slow" in printed
        assert f"{second.pid} rank 1  Slow" in printed
        assert re.search(rf"{script.pid}  Slow, batch size 4  .*penstock", printed)


def test_the_bytes_that_are_read_now_are_shown() -> None:
    with running("1", "1", "read") as reads, running("1", "1") as other:
        wait_for(lambda: read_program(reads.pid) and read_program(other.pid))
        printed = {
            pid: " ".join(command_line.invoke("top", str(pid), "--once").output.split())
            for pid in (reads.pid, other.pid)
        }
    rates = {
        pid: re.search(r"reading \S+ (\w+)/s, \S+ \w+/s from disk", printed[pid]) for pid in printed
    }
    units = {pid: found and found[1] for pid, found in rates.items()}
    assert units[reads.pid] in ("MiB", "GiB"), printed
    assert units[other.pid] in ("B", "KiB"), printed


def test_between_two_epochs_no_bottleneck_is_named() -> None:
    with running("1", "2", "between") as between, running("1", "2") as other:
        wait_for(lambda: read_program(between.pid) and read_program(other.pid))
        ended, running_now = (
            " ".join(command_line.invoke("top", str(pid), "--once").output.split())
            for pid in (between.pid, other.pid)
        )
    assert "No epoch is running." in ended
    assert "Bottleneck" not in ended
    assert "Try:" not in ended
    assert "load 0/0/0" not in ended
    assert "No epoch is running." not in running_now
    assert "load " in running_now


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Runs a program that has its own process ids and its own /proc, as in a container."""


def has_containers() -> bool:
    try:
        return (
            subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=240).returncode == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not has_containers(), reason="needs unshare and the right to use it")
def test_a_program_in_a_container_is_shown_with_the_ids_of_this_one() -> None:
    with running("1", "2", launcher=(*CONTAINER, sys.executable)) as container:
        (child,) = psutil.Process(container.pid).children()
        (view,) = wait_for(lambda: read_program(child.pid))
        workers = {worker.pid for worker in view.workers}
        assert workers <= {process.pid for process in child.children(recursive=True)}
        assert len(workers) == 2
        assert {worker.state for worker in view.workers} <= {"idle", "loading"}
        os.kill(view.workers[0].pid, signal.SIGSTOP)
        stopped = wait_for(
            lambda: [one for one in read_program(child.pid)[0].workers if one.state == "stopped"]
        )
        assert [worker.number for worker in stopped] == [0]


def test_a_worker_on_another_machine_is_shown_without_a_pid() -> None:
    far = WorkerView(number=1, pid=None, state="loading", sample="7", busy_s=3.0)
    near = WorkerView(number=0, pid=os.getpid(), state="idle")
    metrics = SimpleNamespace(read_bytes=None, disk_bytes=None)
    view: Any = SimpleNamespace(pid=1, workers=(near, far), metrics=metrics)
    usage = top._Usage()
    usage.measure([view])
    assert usage.of(view).keys() == {1, os.getpid()}
    console = Console(width=100, record=True)
    console.print(top._worker_table(view, usage, room=8))
    _, first, second = (line.split() for line in console.export_text().splitlines())
    assert first[:3] == ["0", str(os.getpid()), "idle"]
    assert second == ["1", "remote", "loading", "7", "3.0", "s"]
    assert list(top._stacks(view)) == []  # a signal to pid 0 would go to this process group


@pytest.mark.parametrize("is_measured", [True, False])
def test_times_are_shown_once_there_are_some(is_measured: bool) -> None:
    times = SimpleNamespace(p50_s=0.001, p95_s=0.002, p99_s=0.003 if is_measured else 0.0)
    rates = dict.fromkeys(("samples_per_s", "batches_per_s", "wait_share", "step_share"), 0.0)
    counts = dict.fromkeys(("num_ready", "num_batches", "num_restarts", "num_hangs"), 0)
    verdict = SimpleNamespace(sentence="No batch was delivered.", remedy="")
    metrics = SimpleNamespace(
        **rates, **counts, load=times, wait=times, step=times, bad_samples={}, verdict=verdict
    )
    view: Any = SimpleNamespace(
        pid=1,
        rank=None,
        facts={},
        program="",
        is_stopped=False,
        waiting_s=None,
        idle_s=0.0,
        ring_bytes=0,
        workers=(),
        metrics=metrics,
    )
    lines = [text for text, _ in top._lines(view, top._Usage(), width=80)]
    assert [line for line in lines if line.startswith("p50")] == (
        ["p50/p95/p99 in ms: load 1/2/3; wait 1/2/3; step 1/2/3"] if is_measured else []
    )


def test_a_hung_sample_is_shown_with_its_stack() -> None:
    def is_hung() -> bool:
        views = read_program(program.pid)
        return bool(views) and (views[0].waiting_s or 0) > 4

    with running("1", "2", "hang", waits=False) as program:
        wait_for(is_hung)
        printed = command_line.invoke("top", str(program.pid), "--once", "--stacks").output
        assert "has been waiting for a batch" in printed
        assert re.search(r"loading\s+777\s", printed)
        assert re.search(r"live_programs.py\W+line \d+ in __getitem__", printed.replace("\n", " "))
        assert "__getitem__" not in command_line.invoke("top", str(program.pid), "--once").output


OTHER_USER = """
import os, sys
import rich.console, penstock.cli.top, penstock.cli.live_loaders, psutil, pwd
from penstock.cli import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
main(["top", sys.argv[1], "--once"])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_program_of_another_user_is_refused() -> None:
    with running("1", "0") as program:
        command = [sys.executable, "-c", OTHER_USER, str(program.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 2, done.stderr
        assert f"process {program.pid} belongs to root" in done.stderr
        assert f"Try: sudo penstock top {program.pid}" in done.stderr
        own = command_line.invoke("top", str(program.pid), "--once")
        assert own.exit_code == 0


def test_what_is_not_there_is_said() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        done = command_line.invoke("top", str(plain.pid), "--once")
        assert done.exit_code == 0
        assert f"No running loader in process {plain.pid}" in done.output
        plain.kill()
    gone: Any = command_line.invoke("top", str(plain.pid), "--once")
    assert gone.exit_code == 2
    assert f"no process {plain.pid}" in gone.output
