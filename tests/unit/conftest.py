"""Unit tests start no process and do not sleep. An audit hook fails a test that tries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

FORBIDDEN = frozenset(
    ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "time.sleep")
)
"""Audit events. Python 3.10 has none for ``time.sleep``."""


class UnitTestRules:
    """An audit hook that is active while a unit test runs. Hooks cannot be removed."""

    def __init__(self) -> None:
        self.is_active = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_active and event in FORBIDDEN:
            raise AssertionError(f"{event} in a unit test: move it to tests/integration")


rules = UnitTestRules()
sys.addaudithook(rules)


@pytest.fixture(autouse=True)
def no_process_and_no_sleep() -> Iterator[None]:
    rules.is_active = True
    yield
    rules.is_active = False
