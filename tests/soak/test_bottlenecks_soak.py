"""Twenty runs of each bottleneck, with the right verdict each time."""

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
