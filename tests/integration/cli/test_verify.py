"""``penstock verify`` on real scripts: the table, the exit status, and failing scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock.verify.training as training
from support import scripts

pytestmark = [pytest.mark.timeout(240), pytest.mark.soak]

SCRIPT = """
import random, time
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from penstock import DataLoader
print("printed by the script")
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((2,), float(i)), random.random()
def make_loader(num_workers=0):
    return DataLoader(Data(), batch_size=4, shuffle=True, seed=0, num_workers=num_workers)
def make_torch(num_workers=0):
    return TorchDataLoader(Data(), batch_size=4, num_workers=num_workers)
loader = DataLoader(Data(), batch_size=4, seed=0)
batches = [[1, 2], [3, 4]]
dataset = Data()
def make_dataset():
    return dataset
def hangs():
    time.sleep(1000)
def raises(num_workers=0):
    raise KeyError("no such folder")
def needs(folder):
    return folder
def gives_none():
    pass
def parsed(num_workers=0):
    import sys
    print("to stderr", sys.argv[1:], file=sys.stderr)
    assert sys.argv[1:] == ["--size", "3"], sys.argv
    return make_loader(num_workers)
if __name__ == "__main__":
    for batch in make_loader():
        open("training_ran", "w").close()
"""
TINY = ["train.py:parsed", "--workers", "0", "--epochs", "1"]
CASES: dict[str, list[str]] = {
    "ours": ["train.py:make_loader", "--json", "--workers", "0,2", "--epochs", "1"],
    "torch's": ["train.py:make_torch", "--workers", "0,2"],
    "a list": ["train.py:batches"],
    "hangs": ["train.py:hangs", "--timeout", "5"],
    "raises": ["train.py:raises"],
    "a dataset": ["train.py:dataset"],
    "a maker of datasets": ["train.py:make_dataset"],
    "needs": ["train.py:needs"],
    "gives none": ["train.py:gives_none"],
    "no such name": ["train.py:make_loder"],
    "no such script": ["no.py:make_loader"],
    "bad workers": ["train.py:make_loader", "--workers", "two"],
    "its arguments": [*TINY, "--", "--size", "3"],
    "other arguments": [*TINY, "--", "--size", "4"],
    "the machine": ["--json"],
}


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "verify", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "train.py").write_text(SCRIPT)
    outcomes = scripts.run_all(lambda name: verify(folder, *CASES[name]), list(CASES))
    assert not (folder / "training_ran").exists(), "the training loop was run"
    return outcomes


def test_a_loader_that_is_the_same_has_status_0(found: dict[str, Any]) -> None:
    ended = scripts.told(found["ours"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    assert told["verdict"]["is_same"]
    assert told["failure"] is None
    assert "printed by the script" in told["printed"]
    names = [row["setting"] for row in told["verdict"]["rows"] if row["outcome"] == "same"]
    assert {"0 workers", "2 workers, killed and resumed with 3", "0 workers, new process"} <= {
        *names
    }


def test_a_loader_that_is_not_the_same_has_status_1_and_a_cause(found: dict[str, Any]) -> None:
    ended = scripts.told(found["torch's"])
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "First difference: epoch 0, batch 0, sample 0, field [1]" in ended.stdout
    assert "worker-seeds" in ended.stdout
    assert "printed by the script" not in ended.stdout


def test_any_iterable_is_run_as_it_is(found: dict[str, Any]) -> None:
    ended = scripts.told(found["a list"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "as given, again" in ended.stdout


def test_a_factory_that_hangs_is_ended_with_what_it_was_doing(found: dict[str, Any]) -> None:
    ended = scripts.told(found["hangs"])
    assert ended.returncode == 1
    assert "timed out after 5 s" in ended.stdout
    assert "train.py:" in ended.stdout
    assert "penstock verify train.py:hangs --timeout 25" in ended.stdout


def test_a_factory_that_raises_is_told_with_its_line(found: dict[str, Any]) -> None:
    ended = scripts.told(found["raises"])
    assert ended.returncode == 1
    assert "KeyError: 'no such folder'" in ended.stdout
    assert "in raises" in ended.stdout


def test_all_processes_get_the_arguments_of_the_script(found: dict[str, Any]) -> None:
    ended = scripts.told(found["its arguments"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"0 workers, new process +same", ended.stdout)
    other = scripts.told(found["other arguments"])  # control, and its stderr is shown
    assert other.returncode == 1
    assert "The script printed:" in other.stdout
    assert "to stderr ['--size', '4']" in other.stdout


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a dataset", "dataset is a dataset"),
        ("a maker of datasets", "the result of make_dataset() is a dataset"),
        ("needs", "needs() requires folder, which is not passed Try: def make_loader("),
        ("gives none", "gives_none() returned None, not a loader"),
        ("no such name", "penstock verify train.py:make_loader"),
        ("no such script", "cannot be read"),
        ("bad workers", "not a list of numbers"),
    ],
)
def test_a_usage_error_has_status_2(found: dict[str, Any], case: str, words: str) -> None:
    ended = scripts.told(found[case])
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


# -- the machine -----------------------------------------------------------------------------------


def test_without_a_target_the_machine_trains_twice(found: dict[str, Any]) -> None:
    ended = scripts.told(found["the machine"])
    rows = json.loads(ended.stdout)["verdict"]["rows"]
    cpu = [row for row in rows if row["setting"].startswith("cpu, ")]
    assert [row["outcome"] for row in cpu] == ["same", "same"], ended.stdout
    assert ended.returncode == (0 if all(row["outcome"] == "same" for row in rows) else 1)


def test_a_training_that_is_not_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Chance(torch.nn.Module):
        def forward(self, images: Any) -> Any:
            return images + int.from_bytes(os.urandom(2), "little") * 1e-6

    make = training._make_model

    def make_with_chance() -> Any:
        model = make()
        model.pooling = torch.nn.Sequential(model.pooling, Chance())
        return model

    monkeypatch.setattr(training, "_make_model", make_with_chance)
    monkeypatch.setattr(training, "find_devices", lambda: [training.Device(kind="cpu", name="cpu")])
    verdict = training.verify_training(modes={"default": False})
    assert not verdict
    assert verdict.rows[0].note == "first difference: step 0, the output of pooling"
    assert "The bits differ" in str(verdict)


def test_a_training_leaves_the_caller_s_switches_as_they_were() -> None:
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.random.get_rng_state()
    training.train("cpu", is_deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
