"""``for batch in DataLoader(...)`` keeps its guarantees although the loader is unreferenced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import DataLoader
from penstock.errors import TooManyBad
from support.datasets import QUICK_WAYS, WAYS, Samples

pytestmark = [pytest.mark.fault, pytest.mark.legacy]

HALF_BROKEN = Samples(lambda i: 1 // (i % 2), length=8)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_bad_samples_are_counted_and_written_down(way: str, tmp_path: Path) -> None:
    listed = tmp_path / "bad.jsonl"
    options: dict[str, Any] = {"on_error": "skip", "bad_samples_file": listed, **WAYS[way]}
    with pytest.raises(TooManyBad):
        for _ in DataLoader(HALF_BROKEN, batch_size=2, max_bad=2, **options):
            pass
    assert len(listed.read_text().splitlines()) == 3


def test_an_epoch_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(TooManyBad, match="all samples"):
        for _ in DataLoader(Samples(lambda i: 1 // 0, length=4), batch_size=2, on_error="skip"):
            pass
