"""Which arguments are penstock's own, and when Python starts again for its hash seed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock.cli import commands, early


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("train.py --seed 1", 0),
        ("--seed 0 train.py", 2),
        ("--seed=0 train.py", 1),
        ("--workers auto --on-error skip train.py -m x", 4),
        ("-m package.train --seed 1", 1),
        ("--seed 3 -m package.train", 3),
        ("-- --strange.py", 1),
        ("--seed", 1),
        ("", 0),
    ],
)
def test_penstock_s_own_arguments_end_before_the_script(line: str, count: int) -> None:
    assert early.num_own(line.split()) == count


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


def test_every_option_with_a_value_is_known_before_typer_is() -> None:
    import typer.main

    group: Any = typer.main.get_command(commands.app)
    options = [one for one in group.commands["run"].params if one.param_type_name == "option"]
    valued = {name for one in options if not one.is_flag for name in one.opts}
    assert valued == early.TAKES_VALUE
