"""The verdict on real runs with one artificial bottleneck (20 runs of each: make soak)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import bottlenecks


@pytest.mark.parametrize("cause", bottlenecks.CASES)
def test_the_verdict_names_what_is_wrong(cause: str, tmp_path: Path) -> None:
    verdict = bottlenecks.CASES[cause](tmp_path).verdict
    assert verdict.cause == cause, str(verdict)
