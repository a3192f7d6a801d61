"""Other programs that use the cores are noticed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from penstock.machine.other_load import cores_for, measure_load, say_load

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


@pytest.mark.parametrize("used", [0.0, 0.7, 2.0])
def test_workers_get_fewer_cores_beside_other_programs(used: float) -> None:
    cores = [cores_for(number, 2, used) for number in (0, 1, 2, 4, 64)]
    assert cores[0] == cores[1]
    assert cores == sorted(cores)
    assert cores[-1] <= 2
    if used == 2.0:
        assert cores[2] / cores[1] < 2
    if used == 0.0:  # control: an idle machine has all its cores for the workers
        assert cores == [1, 1, 2, 2, 2]
