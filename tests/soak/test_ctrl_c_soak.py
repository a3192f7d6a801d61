"""Ctrl-C at 200 random moments of programs that fork workers. Every program ends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support import interrupts

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

NUM_ROUNDS, NUM_PROGRAMS = 10, 20


def test_programs_that_fork_workers_end_with_ctrl_c(
    tmp_path: Path, note: Callable[[str], None]
) -> None:
    endings = []
    for _ in range(NUM_ROUNDS):
        endings += interrupts.interrupt(tmp_path, NUM_PROGRAMS)
    counts = Counter("ended" if ending.is_clean else str(ending.end) for ending in endings)
    note(f"Ctrl-C, workers by fork: {dict(counts)} of {len(endings)} programs")
    assert [ending for ending in endings if not ending.is_clean] == []
