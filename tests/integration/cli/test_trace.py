"""``penstock trace`` and ``penstock run --trace``: printed text, written files, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Timeline
from penstock.cli import run as run_module
from penstock.cli import trace as trace_module
from penstock.trace import recorder
from support import command_line, synthetic_traces


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A slow run and a fast run."""
    paths = []
    for name, workers in (("slow", 1), ("quick", 4)):
        path = tmp_path / f"{name}.json.gz"
        Timeline(synthetic_traces.make_records(num_workers=workers, num_batches=240)).save(path)
        paths.append(str(path))
    return paths[0], paths[1]


def penstock(*arguments: str) -> command_line.Done:
    return command_line.invoke("trace", *arguments)


def test_show_draws_and_judges(files: tuple[str, str]) -> None:
    done = penstock("show", files[0], "--width", "90")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].startswith("worker 0 ▕")
    assert any(line.startswith("The training loop waits") for line in lines)
    assert any("Try: DataLoader(" in line for line in lines)


@pytest.mark.parametrize(
    "part", [("--from", "99"), ("--from", "0.5", "--to", "0.1"), ("--to", "nan")]
)
def test_a_part_that_the_trace_does_not_have_is_named(
    files: tuple[str, str], part: tuple[str, ...]
) -> None:
    done = penstock("show", files[0], *part)
    assert done.exit_code == 2
    assert "the trace covers 0 to" in done.output


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_where_there_are_no_blocks_it_is_drawn_without(
    files: tuple[str, str], encoding: str
) -> None:
    command = [sys.executable, "-m", "penstock", "trace", "show", files[0]]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=240)
    lines = done.stdout.decode(encoding).splitlines()
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines[0].startswith("worker 0 |")
    assert "###" in lines[0]
    assert any(line.startswith("The training loop waits") for line in lines)


def test_show_for_a_program_is_json(files: tuple[str, str]) -> None:
    content = json.loads(penstock("show", files[0], "--json").output)
    assert content["verdict"]["cause"] == "decode"
    assert content["account"]["num_batches"] == 240


@pytest.mark.parametrize("name", ["out.html", "out.perfetto.json.gz", "out.json"])
def test_export_writes_other_forms(files: tuple[str, str], tmp_path: Path, name: str) -> None:
    done = penstock("export", files[0], str(tmp_path / name))
    assert done.exit_code == 0
    assert "spans" in done.output
    assert (tmp_path / name).stat().st_size > 1000


def test_compare_sets_two_side_by_side(files: tuple[str, str]) -> None:
    done = penstock("compare", *files)
    assert "samples a second" in done.output
    assert "better" in done.output
    content = json.loads(penstock("compare", *files, "--json").output)
    before, after = content["samples a second"]
    assert after > 2 * before


def test_open_hands_a_page_to_the_browser(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(trace_module.tempfile, "tempdir", None)
    opened: list[str] = []
    monkeypatch.setattr(trace_module.webbrowser, "open", lambda url: bool(opened.append(url)))
    done = penstock("open", files[0])
    assert opened[0].endswith("slow.html")
    assert "No browser could be started" in done.output
    monkeypatch.setattr(trace_module.tempfile, "tempdir", None)


@pytest.mark.parametrize(
    "arguments", [("show", "x.json"), ("compare", "x.json", "y.json"), ("export", "x", "y.html")]
)
def test_what_is_no_trace_is_an_error_of_two_lines(arguments: tuple[str, ...]) -> None:
    done = penstock(*arguments)
    assert done.exit_code == 2
    assert "BadTrace: [L01] " in done.output


TRAIN = """
import time, torch
from torch.utils.data import DataLoader
train = DataLoader([torch.zeros(4)] * 64, batch_size=4)
valid = DataLoader([torch.zeros(4)] * 16, batch_size=4)
for _ in range(2):
    for batch in train:
        time.sleep(0.04)
for batch in valid:
    pass
"""


def test_run_writes_the_timeline_of_all_loaders_and_says_what_limits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "--trace", "run.json.gz", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "penstock: trace: " in done.stderr
    timeline = Timeline.load(tmp_path / "run.json.gz")
    assert timeline.num_batches == 36
    assert timeline.verdict.cause != "nothing"
    for line in str(timeline.verdict).splitlines():  # the cause depends on the load
        assert f"penstock: {line}\n" in done.stderr


def test_run_traces_a_script_that_has_our_loader_already(tmp_path: Path) -> None:
    script = (
        "import penstock\nfor batch in penstock.DataLoader(range(12), batch_size=2):\n    pass\n"
    )
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "--trace", "run.json", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "penstock: trace: " in done.stderr
    assert Timeline.load(tmp_path / "run.json").num_batches == 6


def test_run_refuses_a_trace_that_cannot_be_written_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "--trace", "run.txt", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "must end in one of .json, .json.gz, .html" in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize(
    ("order", "limit", "exit_code"),
    [("slower", "5%", 1), ("slower", "90%", 0), ("faster", "5%", 0), ("same", "0%", 0)],
)
def test_a_run_that_is_slower_than_allowed_fails(
    files: tuple[str, str], order: str, limit: str, exit_code: int
) -> None:
    slow, quick = files
    pairs = {"slower": (quick, slow), "faster": (slow, quick), "same": (slow, slow)}
    done = penstock("compare", *pairs[order], "--fail-if", f"slower:{limit}")
    assert done.exit_code == exit_code
    assert ("failed." in done.output) is bool(exit_code)
    assert "noise" in done.output
    plain = penstock("compare", *pairs[order], "--fail-if", f"slower:{limit}", "--json")
    assert plain.exit_code == exit_code
    assert json.loads(plain.output)["is_slower"] is bool(exit_code)


@pytest.mark.parametrize(("queued_share", "exit_code"), [(0.5, 0), (0.0, 1)])
def test_runs_beside_other_programs_are_not_checked(
    tmp_path: Path, queued_share: float, exit_code: int
) -> None:
    shares = {"cpu_share": 0.4, "queued_share": queued_share}
    for name, fetch_ms in (("quick", 20.0), ("slow", 30.0)):
        records = synthetic_traces.make_records(num_batches=60, fetch_ms=fetch_ms, **shares)
        Timeline(records).save(tmp_path / f"{name}.json")
    pair = (str(tmp_path / "quick.json"), str(tmp_path / "slow.json"))
    done = penstock("compare", *pair, "--fail-if", "slower:5%")
    assert done.exit_code == exit_code
    shown = " ".join(done.output.split())
    others = "Other programs used the cores during one of the runs"
    assert (f"{others}, so the limit of 5.0% was not checked." in shown) is not bool(exit_code)
    assert ("The limit is 5.0%: failed." in shown) is bool(exit_code)
    without_limit = penstock("compare", *pair)
    assert without_limit.exit_code == 0
    assert (f"{others}." in " ".join(without_limit.output.split())) is not bool(exit_code)


@pytest.mark.parametrize(("queued_share", "is_above"), [(0.5, False), (0.0, True)])
def test_waits_beside_other_programs_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, queued_share: float, is_above: bool
) -> None:
    shares = {"cpu_share": 0.4, "queued_share": queued_share}
    records = synthetic_traces.make_records(num_batches=60, fetch_ms=30.0, **shares)
    monkeypatch.setattr(recorder, "keep_recorders", list)  # the real one keeps those of all tests
    trace = run_module._RunTrace(None, max_wait=0.05)
    monkeypatch.setattr(trace, "_timeline", lambda: Timeline(records))
    assert trace.check_wait() is is_above  # `penstock run` then exits with status 3
    first = trace.write()[0]
    why = "--max-wait was not checked: other programs used the cores"
    assert (why in first) is not is_above
    assert ("above --max-wait 5.0%" in first) is is_above


@pytest.mark.parametrize("text", ["slower", "slower:5", "faster:5%", "slower:-5%", "slower:500%"])
def test_a_limit_that_is_none_is_refused(files: tuple[str, str], text: str) -> None:
    done = penstock("compare", *files, "--fail-if", text)
    assert done.exit_code == 2
    assert "must be" in done.output


def test_a_run_too_short_for_the_noise_is_refused(files: tuple[str, str], tmp_path: Path) -> None:
    short = tmp_path / "short.json"
    Timeline(synthetic_traces.make_records(num_batches=12)).save(short)
    done = penstock("compare", files[0], str(short), "--fail-if", "slower:5%")
    assert done.exit_code == 2
    assert "240 and 12" in done.output
    assert penstock("compare", files[0], str(short)).exit_code == 0


WAITS = """
import sys, time
from torch.utils.data import DataLoader
class Slow:
    def __len__(self):
        return 140
    def __getitem__(self, index):
        time.sleep(float(sys.argv[1]))
        return index
for batch in DataLoader(Slow(), batch_size=2):
    time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load_s", "step_s", "status", "expected"),
    [("0.01", "0", 0, 3), ("0", "0.05", 0, 0), ("0.01", "0", 7, 7)],
)
def test_a_script_that_waits_longer_than_allowed_fails(
    tmp_path: Path, load_s: str, step_s: str, status: int, expected: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    command = [sys.executable, "-m", "penstock", "run", "--max-wait", "50%", str(script)]
    command += [load_s, step_s, str(status)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == expected, done.stderr
    assert ("above --max-wait 50.0%" in done.stderr) is (expected == 3)
    if expected == 0:
        assert "within --max-wait 50.0%" in done.stderr
    if expected == 3:
        assert 'num_workers="auto"' in done.stderr  # the remedy
