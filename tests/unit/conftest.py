"""Unit tests start no process and do not sleep. A test that tries to do so fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy.testing  # noqa: F401  (NumPy 1 starts lscpu when this is imported on arm64)
import pytest

HERE = os.path.dirname(__file__)
FORBIDDEN = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))
"""Audit events."""


class ProcessGuard:
    """An audit hook that is active while a unit test runs. Hooks cannot be removed."""

    def __init__(self) -> None:
        self.is_active = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_active and event in FORBIDDEN:
            raise AssertionError(f"{event} in a unit test: move it to tests/integration")


guard = ProcessGuard()
sys.addaudithook(guard)


@pytest.fixture(autouse=True)
def no_process_and_no_sleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sleep = time.sleep

    def checked_sleep(seconds: float) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(HERE):  # the library itself may wait
            raise AssertionError("time.sleep in a unit test: move it to tests/integration")
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", checked_sleep)
    guard.is_active = True
    yield
    guard.is_active = False
