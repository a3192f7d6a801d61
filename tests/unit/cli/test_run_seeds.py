"""Python restarts itself when the hash seed requires it."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from penstock.cli import run, run_seeds
from penstock.cli.parser import make_parser
from penstock.integrations import script_runner


@pytest.mark.parametrize(
    ("line", "seed"),
    [
        ("--seed 5 train.py", "5"),
        ("--workers 2 --seed=5 train.py --seed 6", "5"),
        ("--seed 1 --seed 5 train.py", "5"),
        ("--seed -1 -m train", str(2**32 - 1)),
        ("train.py --seed 6", None),
        ("-m train --seed 6", None),
    ],
)
def test_python_starts_again_only_for_a_seed_of_penstock_s_own(
    line: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.delenv(run_seeds.HASH_SEED, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(run, "seed_early", lambda seed: None)
    for name in ("when_imported", "run_file", "run_module"):
        monkeypatch.setattr(script_runner, name, lambda *_, **__: None)
    options = make_parser().parse_args(["run", *line.split()])
    options.execute(options)
    assert [call[2][run_seeds.HASH_SEED] for call in started] == ([] if seed is None else [seed])
