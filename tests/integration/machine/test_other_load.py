"""Other programs that use the cores are noticed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from penstock.machine.other_load import measure_load, say_load

pytestmark = pytest.mark.legacy

BUSY = "print(1, flush=True)\nwhile True: pass"


def test_a_busy_program_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            program.stdout.readline()
            deadline_s = time.monotonic() + 120  # low priority may give it little time at first
            while measure_load() < 0.4:
                assert time.monotonic() < deadline_s
        finally:
            program.kill()


def test_an_idle_machine_is_not_called_busy() -> None:
    assert say_load(0.3, 2) == ""
    assert "about 2.0 of its 2 cores" in say_load(2.4, 2)
