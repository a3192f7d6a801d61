"""When Python starts again for its hash seed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock.cli import early


@pytest.mark.parametrize(
    ("line", "seed"),
    [
        ("run --seed 5 train.py", "5"),
        ("run --workers 2 --seed=5 train.py --seed 6", "5"),
        ("run --seed -1 -m train", str(2**32 - 1)),
        ("run train.py --seed 6", None),
        ("run -m train --seed 6", None),
        ("run --seed x train.py", None),
        ("run --seed", None),
        ("verify --seed 5", None),
        ("", None),
    ],
)
def test_python_starts_again_only_for_a_seed_of_penstock_s_own(
    line: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.delenv(early.HASH_SEED, raising=False)
    monkeypatch.setattr(early.sys, "platform", "linux")
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    early.settle_hash_seed(line.split())
    assert [call[2][early.HASH_SEED] for call in started] == ([] if seed is None else [seed])
