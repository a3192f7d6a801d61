"""The command line separates Penstock's options from the script's, and rejects invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.parser import COMMANDS, make_parser
from penstock.options import LoaderOptions, PatchOptions, SharedOptions, options_of

pytestmark = pytest.mark.legacy


def read(line: str) -> dict[str, Any]:
    """Return the settings that differ from the defaults of ``penstock run``."""
    options = vars(make_parser().parse_args(["run", *line.split()]))
    defaults = {name: option.default for name, option in options_of(PatchOptions).items()}
    defaults |= {"command": "run", "is_module": False, "execute": options["execute"]}
    defaults |= {"conv": None, "max_wait": None, "metrics_port": None}
    return {name: value for name, value in options.items() if value != defaults.get(name, ())}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", {"script": ["train.py"]}),
        ("train.py --epochs 3 -m x", {"script": ["train.py", "--epochs", "3", "-m", "x"]}),
        ("train.py --se 3 --help", {"script": ["train.py", "--se", "3", "--help"]}),
        ("--seed 7 train.py --seed 8", {"seed": 7, "script": ["train.py", "--seed", "8"]}),
        ("--seed=-7 --workers auto x.py", {"seed": -7, "num_workers": "auto", "script": ["x.py"]}),
        ("--seed -7 train.py", {"seed": -7, "script": ["train.py"]}),
        ("--seed 1 --seed 2 train.py", {"seed": 2, "script": ["train.py"]}),
        (
            "--workers 0 --start-method spawn train.py",
            {"num_workers": 0, "multiprocessing_context": "spawn", "script": ["train.py"]},
        ),
        (
            "--workers=4 --persistent-workers --start-method=forkserver train.py a b",
            {
                "num_workers": 4,
                "persistent_workers": True,
                "multiprocessing_context": "forkserver",
                "script": ["train.py", "a", "b"],
            },
        ),
        (
            "--on-error skip --max-bad 0.25 --bad-samples-file bad.jsonl train.py",
            {
                "on_error": "skip",
                "max_bad": 0.25,
                "bad_samples_file": "bad.jsonl",
                "script": ["train.py"],
            },
        ),
        ("--max-bad 12 train.py", {"max_bad": 12, "script": ["train.py"]}),
        (
            "--max-restarts 3 --sample-timeout-s 2.5 --conv off train.py",
            {"max_restarts": 3, "sample_timeout_s": 2.5, "conv": "off", "script": ["train.py"]},
        ),
        ("--metrics-port 0 train.py", {"metrics_port": 0, "script": ["train.py"]}),
        ("--max-wait 12.5% train.py", {"max_wait": 0.125, "script": ["train.py"]}),
        ("-m package.train", {"is_module": True, "script": ["package.train"]}),
        (
            "--seed 3 -m package.train --seed 4 -- -x",
            {"seed": 3, "is_module": True, "script": ["package.train", "--seed", "4", "--", "-x"]},
        ),
        ("train.py -- --x", {"script": ["train.py", "--", "--x"]}),
        ("- -x", {"script": ["-", "-x"]}),
    ],
)
def test_options_before_the_script_are_ours_and_the_rest_is_the_script_s(
    line: str, expected: dict[str, Any]
) -> None:
    assert read(line) == expected


def test_two_dashes_before_the_script_are_nobody_s() -> None:
    assert read("--seed 3 -- train.py")["script"][-1] == "train.py"


def test_arguments_of_the_script_are_not_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["pack"])
    assert capsys.readouterr().err.endswith("Missing argument: SRC, DST\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Missing argument: SCRIPT"),
        ("--seed 7", "Missing argument: SCRIPT"),
        ("--max-wait 10 train.py", "--max-wait: '10' must be a percentage such as 10%"),
        ("--max-wait 101% train.py", "--max-wait: '101%' must be a percentage such as 10%"),
        ("--seed x train.py", "--seed: 'x' must be an integer"),
        ("--seed", "--seed: expected one argument"),
        ("--seed= train.py", "--seed: '' must be an integer"),
        ("--seed 1e3 train.py", "--seed: '1e3' must be an integer"),
        ("--sed 7 train.py", "No such option: --sed"),
        (
            "--worker 7 train.py",
            "--worker. Did you mean --workers? Options of the script go after its name\n",
        ),
        ("--epochs 7 train.py", "--epochs. Options of the script go after its name\n"),
        ("--workers two train.py", "--workers: 'two' must be auto, 0, 1, 2, ..."),
        ("--workers -1 train.py", "--workers: '-1' must be auto, 0, 1, 2, ..."),
        ("--persistent-workers=1 train.py", "--persistent-workers: ignored"),
        ("--conv maybe train.py", "'maybe' must be one of auto, on, off"),
        ("-x train.py", "No such option: -x"),
        ("-mpackage", "Error: "),  # argparse's text depends on its version
        ("--max-restarts -1 train.py", "--max-restarts=-1 must be at least 0"),
        ("--max-bad nan train.py", "--max-bad=nan must be a count"),
        ("--on-error ignore train.py", "'raise', 'skip', 'replace'\n  Try: --on-error skip\n"),
        ("--sample-timeout-s 0 train.py", "Try: --sample-timeout-s 60\n"),
        ("--max-bad -1 train.py", "Try: --max-bad 100\n"),
        ("--on-error replce train.py", "--on-error='replce'"),
        ("--start-method thread train.py", "--start-method='thread'"),
        ("-m", "Missing argument: SCRIPT"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(line)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_misspelt_option_is_told_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["doctor", "--watc"])
    assert "No such option: --watc. Did you mean --watch?" in capsys.readouterr().err


def test_the_script_s_arguments_stand_behind_two_dashes_elsewhere() -> None:
    parser = make_parser()
    for line in ("t.py:ds --json -- --x 1", "--json t.py:ds -- --x 1", "t.py:ds --x 1"):
        try:
            options = parser.parse_args(["doctor", *line.split()])
        except SystemExit:
            assert "--" not in line.split()
            continue
        assert (options.target, options.json, options.arguments) == ("t.py:ds", True, ["--x", "1"])
    assert parser.parse_args(["doctor", "t.py:ds", "a", "b"]).arguments == ["a", "b"]


def test_every_command_has_a_page_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name, _ in make_parser().subcommands()]
    assert {name.split()[1] for name in names} == set(COMMANDS)
    for name, parser in make_parser().subcommands():
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([*name.split()[1:], "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert said.startswith(f"Usage: {name} [OPTIONS]")
        assert f"Example: {name}" in said
        assert "<bool>" not in said
        assert "[]" not in said
        helps = {action.help for action in parser._actions}
        assert [text for text in helps if not text or not text.endswith(".")] == []


def test_the_help_of_the_program_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    assert "Example: penstock run --trace run.html train.py" in capsys.readouterr().out


def test_no_option_of_the_loader_alone_has_a_flag() -> None:
    """``penstock run`` would reject it, because its flags come from ``PatchOptions``."""
    shared = options_of(SharedOptions)
    alone = {name: o for name, o in options_of(LoaderOptions).items() if name not in shared}
    assert alone
    assert [name for name, option in alone.items() if option.flag] == []
    assert [name for name, option in shared.items() if option.flag]  # control: some have a flag


def test_only_run_replaces_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "demo", "doctor", "pack"):
        with pytest.raises(SystemExit):
            make_parser().parse_args([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "--workers" in said
        assert ("umber of workers, overriding the value in the code" in said) is (command == "run")
