"""The line of ``penstock run`` is read as typer reads it, or left to typer."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer

from penstock.cli import commands
from penstock.cli.run_checks import make_options
from penstock.cli.run_line import SWITCHES, TAKES_VALUE, num_own, read_line

READ = [
    "train.py",
    "train.py --epochs 3 -m x",
    "--seed 7 train.py --seed 8",
    "--seed=-7 --workers auto train.py",
    "--seed -7 train.py",
    "--workers 0 --start-method spawn train.py",
    "--workers=4 --persistent-workers --start-method=forkserver train.py a b",
    "--on-error skip --max-bad 0.25 --bad-samples-file bad.jsonl train.py",
    "--on-error replace --max-bad 12 train.py",
    "--max-restarts 3 --sample-timeout-s 2.5 --conv off --trace out.html train.py",
    "-m package.train",
    "--seed 3 -m package.train --seed 4 -- -x",
    "--seed 1 --seed 2 train.py",
    "train.py -- --x",
    "--trace=a=b.json train.py",
    "--bad-samples-file= train.py",
]
LEFT = [
    "",
    "--help",
    "--seed 7",
    "--seed x train.py",
    "--seed",
    "--seed= train.py",
    "--seed 1e3 train.py",
    "--sed 7 train.py",
    "--workers two train.py",
    "--workers -1 train.py",
    "--max-restarts -1 train.py",
    "--max-bad nan train.py",
    "--on-error ignore train.py",
    "--persistent-workers=1 train.py",
    "--conv maybe train.py",
    "--start-method thread train.py",
    "-x train.py",
    "-mpackage",
    "-m",
    "-m --seed 7 train.py",
    "-- train.py",
]


def by_typer(line: str) -> Any:
    """What typer makes of it; None where it refuses, or shows something."""
    command: Any = typer.main.get_command(commands.app)
    commands._pending.clear()
    try:
        command(["run", *line.split()], standalone_mode=False)
    except BaseException:
        return None
    return commands._pending.pop() if commands._pending else None


@pytest.mark.parametrize("line", READ)
def test_what_is_read_is_what_typer_reads(line: str) -> None:
    found, expected = read_line(line.split()), by_typer(line)
    assert expected is not None
    if found is None:  # allowed, though slower
        assert line in ("--bad-samples-file= train.py",)
        return
    assert make_options(**found) == expected


@pytest.mark.parametrize("line", LEFT)
def test_what_is_not_clear_is_left_to_typer(line: str) -> None:
    assert read_line(line.split()) is None


def test_every_option_of_the_command_is_known() -> None:
    command: Any = typer.main.get_command(commands.app)
    options = [one for one in command.commands["run"].params if one.param_type_name == "option"]
    valued = {name for one in options if not one.is_flag for name in one.opts}
    switches = {name for one in options if one.is_flag for name in one.opts}
    assert valued == set(TAKES_VALUE)
    assert switches - {"--help"} == {*SWITCHES, "-m"}


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
    assert num_own(line.split()) == count


def test_a_plain_run_does_without_typer(tmp_path: Any) -> None:
    """The control: help needs it."""
    script = tmp_path / "program.py"
    script.write_text("import sys; print('typer' in sys.modules)")
    command = [sys.executable, "-m", "penstock", "run", "--workers", "2", str(script)]
    end = subprocess.run(command, capture_output=True, text=True, check=True)
    assert end.stdout == "False\n"
    end = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, check=True)
    assert "--sample-timeout-s" in end.stdout
