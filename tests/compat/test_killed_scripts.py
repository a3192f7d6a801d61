"""A training script that is killed in mid-epoch and restarted misses no sample.

test_accelerate.py and test_lightning.py show, without processes, that torch's loader fails this.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock import DataLoader
from support import scripts
from support.datasets import Draws
from support.example_runs import QUIET
from support.paths import SITE, TESTS

pytestmark = [
    pytest.mark.vision,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL"),
]
accelerate: Any = pytest.importorskip("accelerate")
pytest.importorskip("pytorch_lightning")

NUM_EPOCHS = 2
KEYWORDS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 3}
BEGIN = """
import json, os, sys, time
from pathlib import Path
import torch
from penstock import DataLoader
from support.datasets import Draws

stop_at = int(sys.argv[1])
loader = DataLoader(Draws(24), batch_size=5, shuffle=True, seed=3, num_workers=2)

def note(batch, *more):
    with open(f"seen-{os.environ.get('RANK', '0')}.jsonl", "a") as file:
        print(json.dumps([[field.tolist() for field in batch], *more]), file=file)

def wait(num_done):
    if num_done == stop_at:  # to be killed; the workers have loaded ahead
        print("waiting", flush=True)
        time.sleep(120)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
num_done = 0
if Path("saved").exists():
    accelerator.load_state("saved")
    num_done = json.loads(Path("steps.json").read_text())
for epoch in range(num_done // len(loader), 2):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[1].float().reshape(-1, 1)).sum())
            optimizer.step()
            is_synced = accelerator.sync_gradients
        note(batch, accelerator.gather_for_metrics(batch[0]).tolist(), is_synced)
        num_done += 1
        accelerator.save_state("saved")
        Path("steps.json").write_text(json.dumps(num_done))
        accelerator.wait_for_everyone()
        wait(num_done)
"""
LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        wait(self.global_step)  # after the checkpoint of the step before
        note(batch)
        return self.layer(batch[1].float().reshape(-1, 1)).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
saver = pl.callbacks.ModelCheckpoint("saved", save_last=True, every_n_train_steps=1)
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[saver], logger=False,
                     enable_progress_bar=False, enable_model_summary=False)
last = Path("saved/last.ckpt")
last = str(last) if last.exists() else None
trainer.fit(Model(), loader, ckpt_path=last, weights_only=False)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    training: str
    stop_at: int
    num_ranks: int = 1


CASES = {
    "Lightning": Case(training=LIGHTNING, stop_at=2),  # takes the longest
    "accelerate": Case(training=ACCELERATE, stop_at=7),  # an epoch has 5 steps
    "accelerate, 2 ranks": Case(training=ACCELERATE, stop_at=4, num_ranks=2),  # 3 steps per epoch
}


def start(case: Case, folder: Path, stop_at: int) -> list[subprocess.Popen[str]]:
    """Start the ranks directly. A launcher would be one more process that imports torch."""
    program = folder / "program.py"
    program.write_text(BEGIN + case.training)
    path = os.pathsep.join(filter(None, (str(SITE), str(TESTS), *sys.path)))
    environ = {**os.environ, **QUIET, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    if case.num_ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.num_ranks))
    names = ("RANK", "LOCAL_RANK") if case.num_ranks > 1 else ()
    return [
        subprocess.Popen(
            [sys.executable, str(program), str(stop_at)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**environ, **dict.fromkeys(names, str(rank))},
        )
        for rank in range(case.num_ranks)
    ]


def kill_half_way(case: Case, folder: Path) -> None:
    """Run until each rank has saved its checkpoint and waits, then kill all ranks."""
    ranks = start(case, folder, case.stop_at)
    try:
        for rank in ranks:
            scripts.read_line(rank, "waiting")
    finally:
        for rank in ranks:  # their workers then exit
            rank.kill()
            rank.communicate(timeout=240)


def seen_by(case: Case, folder: Path) -> list[list[Any]]:
    files = [folder / f"seen-{rank}.jsonl" for rank in range(case.num_ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Samples of each rank, before and after the kill."""
    root = tmp_path_factory.mktemp("killed")

    def both(name: str) -> Any:
        case, folder = CASES[name], root / name.replace(" ", "-")
        folder.mkdir()
        kill_half_way(case, folder)
        before = seen_by(case, folder)
        for rank in start(case, folder, -1):
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors[-3000:]
        return before, seen_by(case, folder)

    return scripts.run_all(both, list(CASES))


def epochs(loader: Any) -> list[Any]:
    return [[field.tolist() for field in batch] for _ in range(NUM_EPOCHS) for batch in loader]


@pytest.mark.parametrize("name", ["accelerate", "Lightning"])
def test_a_script_killed_half_way_goes_on_with_exactly_what_was_missing(
    name: str, seen: dict[str, Any]
) -> None:
    (before,), (after,) = scripts.told(seen[name])
    assert len(before) == CASES[name].stop_at
    assert [fields for fields, *_ in after] == epochs(DataLoader(Draws(24), **KEYWORDS))


def test_two_ranks_killed_half_way_go_on_with_exactly_what_was_missing(
    seen: dict[str, Any],
) -> None:
    before, after = scripts.told(seen["accelerate, 2 ranks"])
    for rank in (0, 1):
        loader = DataLoader(Draws(24), **KEYWORDS)
        assert not loader._is_accelerate_prepared  # type: ignore[attr-defined]
        whole = accelerate.data_loader.prepare_data_loader(
            loader, num_processes=2, process_index=rank
        )
        assert len(before[rank]) == 4
        assert [fields for fields, *_ in after[rank]] == epochs(whole)


def test_two_ranks_gather_each_sample_once_and_sync_at_the_end(seen: dict[str, Any]) -> None:
    """Samples of the first batch that pad the last batch of an epoch do not count."""
    _, after = scripts.told(seen["accelerate, 2 ranks"])
    plain = [index for fields in epochs(DataLoader(Draws(24), **KEYWORDS)) for index in fields[0]]
    for rank in (0, 1):
        assert [index for _, gathered, _ in after[rank] for index in gathered] == plain
        # An epoch has 3 steps. Gradients are synchronized at the second (accumulation) and third
        # (last).
        assert [is_synced for *_, is_synced in after[rank]] == [False, True, True] * NUM_EPOCHS
