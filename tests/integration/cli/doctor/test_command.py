"""``penstock doctor`` on real scripts: findings, and robustness against failing scripts."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import scripts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the trials share one setup

MAX_CPU_S_WITHOUT_SCRIPT = 3.0
COLOUR = re.compile(r"\x1b\[")

GOOD = """
import random
import torch
print("printed by the script")
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.names = [str(i) for i in range(500)]
    def __len__(self):
        return len(self.names)
    def __getitem__(self, i):
        return prepare(torch.full((3, 8), float(self.names[i]))), random.random()
ds = Data()
while True:
    open("training_ran", "w").close()
    for sample in ds: pass
def prepare(x):
    return x * SCALE
SCALE = 2.0
"""
GUARDED = """
from __future__ import annotations
import torch
if __name__ == "__main__":
    class Data:
        names: NoSuchType = None
        def __len__(self): return 40
        def __getitem__(self, i):
            if not 0 <= i < 40: raise IndexError(i)
            return torch.zeros(2)
    loader = torch.utils.data.DataLoader(Data(), batch_size=5, collate_fn=lambda samples: samples)
    for batch in loader: open("training_ran", "w").close()
"""
LYING = """
class Data:
    def __len__(self): return 100
    def __getitem__(self, i):
        if i >= 60: raise IndexError(i)
        return i
def make(size=1):
    return Data()
"""
HOMEBOUND = """
class Data:
    def __init__(self): self.stream = (i for i in range(3))
    def __len__(self): return 10
    def __getitem__(self, i): return [0, 1, 2, 3, 4, 5, 6, 7, 8, 9][i]
ds = Data()
"""
HANGING = """
import time
class Data:
    def __len__(self): return 10
    def __getitem__(self, i):
        if i == 9:
            time.sleep(1000)
        return i
ds = Data()
"""
CRASHING = """
import os, signal
class Data:
    def __len__(self): return 10
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)
ds = Data()
"""
LARGE = """
import multiprocessing
import numpy, torch
multiprocessing.set_start_method("fork")
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.samples = [(str(i), i) for i in range(150_000)]
        self.generator = numpy.random.default_rng(0)
    def __len__(self): return len(self.samples)
    def __getitem__(self, i):
        if i == 75_000:
            raise KeyError("no label")
        return torch.zeros(2 + i % 2) + self.generator.random()
ds = Data()
"""
RAISING = """
import data_of_mine
x = 1
ds = data_of_mine.load()
"""
DATA_MODULE = """
def load():
    raise FileNotFoundError("no such folder")
"""
STREAM = """
import torch
class Stream(torch.utils.data.IterableDataset):
    def __len__(self): return 20
    def __iter__(self): return iter(range(12))
ds = Stream()
"""
ENDING = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
args = parser.parse_args()
ds = [1.0] * int(args.root)
"""

TRIALS: dict[str, tuple[str, ...]] = {
    "hanging": ("hanging.py:ds", "--json", "--timeout", "20"),  # includes the import of torch
    "good": ("good.py:ds", "--json"),
    "good for people": ("good.py:ds",),
    "guarded": ("guarded.py:loader", "--json"),
    "lying": ("lying.py:make", "--json"),
    "homebound": ("homebound.py:ds", "--json"),
    "crashing": ("crashing.py:ds", "--json"),
    "large": ("large.py:ds", "--json"),
    "raising": ("raising.py:ds", "--json"),
    "raising for people": ("raising.py:ds",),
    "stream": ("stream.py:Stream", "--json"),
    "ending": ("ending.py:ds", "--json"),
    "with arguments": ("ending.py:ds", "--json", "--batch-size", "4", "--", "--root", "30"),
}
SCRIPTS = {
    "good": GOOD,
    "guarded": GUARDED,
    "lying": LYING,
    "homebound": HOMEBOUND,
    "hanging": HANGING,
    "crashing": CRASHING,
    "large": LARGE,
    "raising": RAISING,
    "data_of_mine": DATA_MODULE,
    "stream": STREAM,
    "ending": ENDING,
}


def doctor(
    *arguments: str, folder: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environ},
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor")
    for name, source in SCRIPTS.items():
        (path / f"{name}.py").write_text(source)
    return path


@pytest.fixture(scope="module")
def trials(folder: Path) -> dict[str, Any]:
    # One of the three parallel trials only waits for its time limit.
    def run(name: str) -> subprocess.CompletedProcess[str]:
        limit = () if "--timeout" in TRIALS[name] else ("--timeout", "200")  # busy machines
        return doctor(TRIALS[name][0], *limit, *TRIALS[name][1:], folder=folder)

    return scripts.run_all(run, list(TRIALS), 3)


def outcome(trials: dict[str, Any], name: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and JSON of a trial. No trial prints a traceback."""
    result = scripts.told(trials[name])
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    return result.returncode, json.loads(result.stdout)


def problems(found: dict[str, Any]) -> dict[str, Any]:
    return {problem["code"]: problem for problem in found["problems"]}


# -- a dataset -----------------------------------------------------------------------------------


def test_a_good_dataset_is_measured_and_has_no_problem(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "good")
    notes = found["dataset"]
    assert code == 0
    assert set(found) >= {"machine", "plan", "problems", "dataset"}
    assert problems(found) == {}
    assert notes["length"] == 500
    assert notes["forms"][0]["form"] == "(Tensor float32 [3, 8], float)"
    assert notes["draws"] == ["python"]
    assert notes["samples"]["p10_s"] <= notes["samples"]["median_s"] <= notes["samples"]["p90_s"]
    assert notes["travel"]["private_bytes"] > 1000
    assert notes["batch"]["is_ok"]
    assert found["plan"]["num_workers"]["source"] == "measured"


def test_the_training_loop_further_down_never_runs(trials: dict[str, Any], folder: Path) -> None:
    assert outcome(trials, "good")[0] == outcome(trials, "guarded")[0] == 0
    assert not (folder / "training_ran").exists()


def test_what_the_script_prints_does_not_mix_with_ours(trials: dict[str, Any]) -> None:
    _, found = outcome(trials, "good")
    assert "printed by the script" in found["dataset"]["printed"]
    assert "printed by the script" not in scripts.told(trials["good for people"]).stdout


def test_a_report_in_a_pipe_has_no_colour_and_says_the_same(trials: dict[str, Any]) -> None:
    result = scripts.told(trials["good for people"])
    assert result.returncode == 0
    assert not COLOUR.search(result.stdout)
    for text in ("Machine", "Plan", "Dataset good.py:ds", "500 samples", "none found"):
        assert text in result.stdout


def test_a_loader_under_the_main_guard_is_taken_with_its_arguments(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "guarded")
    notes = found["dataset"]
    assert code == 0
    assert notes["loader"]["made_by"] == "torch"
    assert notes["batch_size"] == 5
    assert not notes["stacks_by_default"]
    assert notes["batch"]["form"].startswith("[Tensor float32 [2], Tensor")


def test_a_length_that_lies_is_told_where_samples_end(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "lying")
    assert code == 1
    assert set(problems(found)) == {"length-lies"}
    assert "100, but the dataset has 60" in problems(found)["length-lies"]["what"]


def test_a_stream_is_read_and_its_length_compared(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "stream")
    assert code == 1
    assert "is 20, but the dataset yields 12" in problems(found)["length-lies"]["what"]
    assert found["plan"]["num_workers"]["value"] == 1


def test_what_cannot_travel_is_named_with_its_way_out(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "homebound")
    assert code == 1
    assert "dataset.stream" in problems(found)["cannot-travel"]["what"]
    assert "__iter__" in problems(found)["cannot-travel"]["cure"]
    assert found["plan"]["num_workers"]["value"] == 0


def test_a_sample_that_hangs_is_named_with_the_line(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "hanging")
    problem = problems(found)["trial-limit"]
    assert code == 1
    assert "dataset[9]" in problem["what"]
    assert problem["where"].startswith("hanging.py:7")


def test_a_sample_that_kills_the_process_is_named(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "crashing")
    assert code == 1
    assert "SIGKILL while loading dataset[0]" in problems(found)["trial-death"]["what"]


def test_a_large_list_comes_with_a_line_to_paste(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "large")
    problem = problems(found)["large-container"]
    assert code == 1
    assert "dataset.samples is a list of 150,000 Python objects" in problem["what"]
    assert problem["cure"] == "dataset.samples = penstock.SharedList(dataset.samples)"


def test_everything_else_that_is_wrong_with_a_dataset_is_found_too(trials: dict[str, Any]) -> None:
    found = problems(outcome(trials, "large")[1])
    assert found["sample-raises"]["where"].startswith("large.py:12")
    assert "dataset[75000]" in found["sample-raises"]["what"]
    assert "Tensor" in found["forms-differ"]["what"]
    assert "dataset.generator" in found["held-generator"]["what"]
    assert found["fork-set"]["where"] == "large.py:4"


def test_a_script_that_raises_is_one_clear_line(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "raising")
    problem = problems(found)["trial-script"]
    assert code == 1
    assert problem["where"] == "raising.py:4"
    assert "FileNotFoundError: no such folder in data_of_mine.py:3" in problem["what"]
    for_people = scripts.told(trials["raising for people"])
    assert "raising.py:4: the script raised" in for_people.stdout
    assert "Traceback" not in for_people.stdout + for_people.stderr


def test_a_script_that_ends_itself_says_so_with_its_last_words(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "ending")
    assert code == 1
    assert "--root" in problems(found)["trial-script"]["what"]


def test_arguments_after_two_dashes_are_the_script_s(trials: dict[str, Any]) -> None:
    code, found = outcome(trials, "with arguments")
    assert code == 0
    assert found["dataset"]["length"] == 30
    assert found["dataset"]["batch_size"] == 4


# -- the machine alone ---------------------------------------------------------------------------


def test_without_a_script_it_needs_little_work() -> None:
    doctor()  # warm up the bytecode and page caches
    start_s = _children_cpu_s()
    result = doctor("--json")
    assert result.returncode in (0, 1), result.stderr
    assert _children_cpu_s() - start_s < MAX_CPU_S_WITHOUT_SCRIPT


def _children_cpu_s() -> float:
    """Processor time of children that have ended. Unlike the time of day, load leaves it alone."""
    times = os.times()
    return times.children_user + times.children_system


def test_without_a_script_no_torch_is_imported_so_no_gpu_is_opened() -> None:
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        "try:\n"
        "    main(['doctor', '--json'])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert b"AssertionError" not in result.stderr, result.stderr
    assert json.loads(result.stdout)["machine"]


def test_json_names_every_fact_and_choice() -> None:
    found = json.loads(doctor("--json", "--workers", "3").stdout)
    assert found["dataset"] is None
    assert found["machine"]["num_cpus"] >= 1
    assert found["plan"]["num_workers"]["value"] == 3
    assert all({"code", "severity", "what", "why", "cure"} <= set(p) for p in found["problems"])


def test_threads_times_workers_are_counted_from_the_environment() -> None:
    found = json.loads(doctor("--json", "--workers", "4", OMP_NUM_THREADS="64").stdout)
    assert "256 threads" in problems(found)["threads-times-workers"]["what"]


def test_colour_is_for_terminals() -> None:
    assert not COLOUR.search(doctor().stdout)
    assert COLOUR.search(doctor(FORCE_COLOR="1", TERM="xterm-256color").stdout)


@pytest.mark.parametrize("text", ["x", "x.py:", "missing.py:ds", ".", "good.py", "good.py:dss"])
def test_a_target_that_is_none_is_a_usage_error(text: str, folder: Path) -> None:
    result = doctor(text, folder=folder)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "BadTarget: [D01] " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_worker_count_that_is_none_is_a_usage_error() -> None:
    assert doctor("--workers", "many").returncode == 2


def test_where_the_data_lies_can_be_said(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    found = json.loads(doctor("--json", "--data", str(tmp_path), "--data", str(other)).stdout)
    assert set(found["storage"]) == {str(tmp_path), str(other)}


def test_data_that_is_nowhere_is_said_to_be(tmp_path: Path) -> None:
    result = doctor("--data", str(tmp_path / "nowhere"))
    assert result.returncode == 2
    assert "nowhere does not exist" in result.stderr


# -- vendor tools --------------------------------------------------------------------------------


def fake_tool(folder: Path, body: str) -> str:
    """Return a PATH with an nvidia-smi that runs ``body``."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")


@needs_shell
def test_a_vendor_tool_that_hangs_costs_a_line_and_not_the_answer(tmp_path: Path) -> None:
    result = doctor("--json", PATH=fake_tool(tmp_path, "sleep 1000"))
    found = json.loads(result.stdout)
    assert "Traceback" not in result.stderr
    if found["machine"]["gpus_seen_by"] != "nvml":  # NVML does not need the tool
        assert "did not respond" in problems(found)["gpu-driver"]["what"]


@pytest.fixture
def watched() -> Iterator[subprocess.Popen[str]]:
    code = """
import sys
from penstock.cli.doctor.watch import run_watch
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.gpu_usage import GpuUsage
reading = GpuReading(index=0, name="card", use_percent=42.0, temperature_c=61.0,
                     memory_used_bytes=3 << 30, memory_total_bytes=8 << 30)
looks = iter([GpuUsage(readings=(reading,), seen_by="test"), GpuUsage(trouble="it hangs")])
run = run_watch(as_json=False, ask=lambda limit_s: next(looks, GpuUsage(readings=(reading,))))
sys.exit(run)
"""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    yield process
    process.kill()
    process.communicate()


@needs_shell
def test_watching_prints_a_line_a_second_until_it_is_interrupted(
    watched: subprocess.Popen[str],
) -> None:
    assert watched.stdout is not None
    lines = [watched.stdout.readline() for _ in range(3)]
    assert "GPU 0  42 %  61 °C  3 GiB of 8 GiB" in lines[0]
    assert "it hangs" in lines[1]
    assert "42 %" in lines[2]
    watched.send_signal(signal.SIGINT)
    out, err = watched.communicate(timeout=240)
    assert watched.returncode == 0
    assert "Traceback" not in out + err
