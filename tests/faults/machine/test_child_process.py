"""Child processes that hang, die, flood their output, or leave their own children behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from penstock.machine.child_process import ChildProcess, _kill_children, python_command
from support.leftovers import SETTLE_S

pytestmark = [pytest.mark.fault, pytest.mark.legacy]

LIMIT_S = 60.0
"""Reached only by a hang."""
SHORT_S = 0.3
CHILD_OF_CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "print(child.pid, flush=True)\n"
)


def start(code: str, **options: object) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def is_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_lines_come_before_the_child_ends() -> None:
    code = "import time\nprint('one\\n\\ntw\\xf6', flush=True)\ntime.sleep(300)"
    with start(code, environ={"PYTHONIOENCODING": "utf-8"}) as child:
        assert [child.read_line(LIMIT_S) for _ in range(3)] == ["one", "", "tw\xf6"]
        with pytest.raises(TimeoutError):
            child.read_line(SHORT_S)
        with pytest.raises(TimeoutError):
            child.wait(SHORT_S)


def test_the_end_of_the_output_is_told_again_and_again() -> None:
    with start("print('last, without an end', end='')") as child:
        assert child.read_line(LIMIT_S) == "last, without an end"
        assert [child.read_line(LIMIT_S) for _ in range(2)] == [None, None]
        assert child.wait(LIMIT_S) == 0


@pytest.mark.parametrize(("reads", "heard"), [("stdout", "o"), ("stderr", "e"), ("both", "eo")])
def test_only_the_wanted_output_is_read(reads: str, heard: str) -> None:
    code = "import sys; print('o', end=''); print('e', end='', file=sys.stderr)"
    with start(code, reads=reads) as child:
        exit_code, printed = child.finish(LIMIT_S, keep_bytes=100)
    assert (exit_code, "".join(sorted(printed))) == (0, heard)


def test_input_is_given_and_none_is_an_empty_one() -> None:
    code = "import sys; print(len(sys.stdin.buffer.read()))"
    for num_bytes in (0, 1 << 20):
        with start(code, send=b"x" * num_bytes) as child:
            assert child.read_line(LIMIT_S) == str(num_bytes)


def test_input_that_nobody_reads_holds_nobody_up() -> None:
    with start("print('done')", send=b"x" * (8 << 20)) as child:
        assert child.finish(LIMIT_S, keep_bytes=100) == (0, f"done{os.linesep}")


ECHO = "import sys\nfor line in sys.stdin: print(line.strip() * 2, flush=True)"


def test_lines_can_be_written_one_after_the_other() -> None:
    with start(ECHO, send=None) as child:
        for line in (b"ab", b"cd"):
            child.write(line + b"\n")
            assert child.read_line(LIMIT_S) == (line * 2).decode()


def test_writing_to_a_child_that_has_exited_is_an_os_error() -> None:
    with start("", send=None) as child:
        assert child.wait(LIMIT_S) == 0
        with pytest.raises(OSError, match=r".+"):
            child.write(b"x" * (1 << 20))  # more than fits in a pipe


def test_a_flood_is_cut_to_its_end_and_to_its_time() -> None:
    code = "import itertools\nfor n in itertools.count(): print(n)"
    with start(code) as child:
        exit_code, printed = child.finish(1.0, keep_bytes=1000)
    assert exit_code is None
    assert 0 < len(printed) <= 1000


def test_children_of_a_child_that_hangs_are_killed_with_it() -> None:
    with start(f"{CHILD_OF_CHILD}time.sleep(300)") as child:
        pid = int(child.read_line(LIMIT_S) or 0)
        assert psutil.pid_exists(pid)
    assert is_gone(pid)


def test_children_are_found_where_there_are_no_process_groups() -> None:
    with start(f"{CHILD_OF_CHILD}time.sleep(300)") as child:
        pid = int(child.read_line(LIMIT_S) or 0)
        _kill_children(child._process.pid)
        assert is_gone(pid)
        with pytest.raises(TimeoutError):
            child.wait(SHORT_S)  # still running
    _kill_children(child._process.pid)  # it has exited, so nothing is killed


@pytest.mark.skipif(sys.platform == "win32", reason="orphans are not found on Windows")
def test_a_child_ends_although_its_own_child_holds_the_output_open() -> None:
    with start(CHILD_OF_CHILD) as child:
        exit_code, printed = child.finish(LIMIT_S, keep_bytes=100)
    assert exit_code == 0
    assert is_gone(int(printed))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_is_an_exit_code() -> None:
    with start("import os; os.abort()") as child:
        assert child.finish(LIMIT_S, keep_bytes=100)[0] == -6


def test_a_program_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        ChildProcess(["/no-such-program"])


def test_a_function_is_called_with_this_process_s_packages() -> None:
    with ChildProcess(python_command("os.path:abspath", "x"), reads="both") as child:
        assert child.finish(LIMIT_S, keep_bytes=1000) == (0, "")
    with ChildProcess(python_command("no.such.module:main"), reads="stderr") as child:
        exit_code, printed = child.finish(LIMIT_S, keep_bytes=1000)
    assert exit_code == 1
    assert "No module named 'no'" in printed


@pytest.mark.parametrize("clean_up", ["", ", lambda: None"])
def test_a_child_ends_with_a_parent_that_is_killed(clean_up: str) -> None:
    code = (
        "import os, sys, time\n"
        "from penstock.machine.child_process import ChildProcess\n"
        "watch = 'import os, sys, time; from penstock.machine.child_process import "
        f"end_with_parent; end_with_parent(int(sys.argv[1]){clean_up}); "
        "print(os.getpid(), flush=True); "
        "time.sleep(300)'\n"
        "child = ChildProcess([sys.executable, '-c', watch, str(os.getpid())])\n"
        "print(child.read_line(60), flush=True)\n"
        "time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert is_gone(pid)
