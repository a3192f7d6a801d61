"""The verdict on real runs with one artificial bottleneck (20 runs of each: make soak)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import bottlenecks


@pytest.mark.parametrize("cause", bottlenecks.CASES)
def test_the_verdict_names_what_is_wrong(cause: str, tmp_path: Path) -> None:
    with bottlenecks.count_others() as others:
        verdict = bottlenecks.CASES[cause](tmp_path).verdict
    known = {cause, "other programs"} if others.share > 0.25 else {cause}
    assert verdict.cause in known, str(verdict)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs one core for all")
def test_cores_that_other_programs_hold_are_not_called_decoding(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with bottlenecks.busy_processes(4):
            verdict = bottlenecks.decode(tmp_path).verdict
    finally:
        os.sched_setaffinity(0, cores)
    assert verdict.cause == "other programs", str(verdict)
    assert "top" in verdict.remedy
