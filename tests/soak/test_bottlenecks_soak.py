"""Runs of each bottleneck: the right verdict each time, also beside busy processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import bottlenecks

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("run", range(20))
@pytest.mark.parametrize("cause", bottlenecks.CASES)
def test_the_verdict_is_right_each_time(cause: str, run: int, tmp_path: Path) -> None:
    verdict = bottlenecks.CASES[cause](tmp_path).verdict
    assert verdict.cause == cause, str(verdict)


@pytest.mark.parametrize("run", range(5))
@pytest.mark.parametrize("num_busy", [2, 4])
@pytest.mark.parametrize("cause", bottlenecks.CASES)
def test_beside_busy_processes_the_verdict_is_the_cause_or_the_other_programs(
    cause: str, num_busy: int, run: int, tmp_path: Path
) -> None:
    with bottlenecks.busy_processes(num_busy):
        verdict = bottlenecks.CASES[cause](tmp_path).verdict
    assert verdict.cause in (cause, "other programs"), str(verdict)
