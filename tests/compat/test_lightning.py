"""Lightning saves and restores the loader, so a run that crashes continues at the same batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from penstock.machine.collect import quick_facts
from support.datasets import Draws

pytestmark = [
    pytest.mark.vision,
    # Advice and deprecation warnings of Lightning and its dependencies, unrelated to the loader.
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
pl: Any = pytest.importorskip("pytorch_lightning")

NUM_EPOCHS = 3
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
Step = tuple[int, int, list[Any]]


class Crash(Exception):
    """Any error that ends training."""


class Witness(pl.LightningModule):  # type: ignore[misc]
    """A model that records its batches and crashes at a given step."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.crash_at = crash_at
        self.seen: list[Step] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash_at:
            raise Crash
        self.seen.append((self.current_epoch, batch_idx, [field.tolist() for field in batch]))
        return (self.weight * batch[1].float()).sum()

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        indices: list[int] = batch[0].tolist()
        return indices

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path,
    kind: Any = DataLoader,
    *,
    crash_at: int | None = None,
    resume: str | None = None,
    **arguments: Any,
) -> tuple[list[Step], str]:
    """Train with a checkpoint after each step. Returns the batches and the newest checkpoint."""
    model = Witness(crash_at)
    saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1)
    trainer = pl.Trainer(max_epochs=NUM_EPOCHS, callbacks=[saver], **QUIET)
    loader = kind(Draws(24), batch_size=5, shuffle=True, **arguments)
    try:
        trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    except Crash:
        pass
    return model.seen, saver.best_model_path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    return fit(tmp_path_factory.mktemp("whole"), seed=3)[0]


@pytest.mark.parametrize("crash_at", [2, 5, 7, 14])  # an epoch has 5 steps
def test_a_fit_that_crashes_goes_on_where_it_was(
    crash_at: int, tmp_path: Path, uninterrupted: list[Step]
) -> None:
    before, checkpoint = fit(tmp_path, crash_at=crash_at, seed=3, num_workers=2)
    after, _ = fit(tmp_path, resume=checkpoint, seed=3, num_workers=1)
    assert len(before) == crash_at
    assert before + after == uninterrupted


def test_a_plain_loop_has_the_stream_of_lightning_s(uninterrupted: list[Step]) -> None:
    loader = DataLoader(Draws(24), batch_size=5, shuffle=True, seed=3)
    loop = [[field.tolist() for field in batch] for _ in range(NUM_EPOCHS) for batch in loader]
    assert [fields for _, _, fields in uninterrupted] == loop


def test_without_a_seed_the_epoch_that_was_under_way_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, _ = fit(tmp_path / "0")
    torch.manual_seed(0)
    before, checkpoint = fit(tmp_path / "1", crash_at=7, num_workers=2)
    torch.manual_seed(99)
    after, _ = fit(tmp_path / "1", resume=checkpoint)
    assert before + after[:3] == whole[:10]
    assert after[3:] != whole[10:]  # later epochs differ because torch's generator was not saved


def test_torch_s_own_loader_fails_this(tmp_path: Path) -> None:
    def indices(folder: str, **more: Any) -> tuple[list[Any], str]:
        torch.manual_seed(0)
        seen, checkpoint = fit(tmp_path / folder, TorchDataLoader, **more)
        return [(epoch, fields[0]) for epoch, _, fields in seen], checkpoint

    whole, _ = indices("0")
    before, checkpoint = indices("1", crash_at=7)
    after, _ = indices("1", resume=checkpoint)
    assert before == whole[:7]
    assert after[:3] != whole[7:10]  # the epoch starts over


def test_seed_everything_with_workers_is_obeyed_and_a_warning_says_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # set by seed_everything(0, workers=True)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    with pytest.warns(UserWarning, match="worker_init_fn set torch's seed"):
        fit(tmp_path, seed=3, num_workers=1)


@pytest.mark.filterwarnings("default::pytorch_lightning.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize(("num_workers", "is_warned"), [(0, True), ("auto", False)])
def test_lightning_s_question_after_more_workers_is_answered_by_auto(
    num_workers: Any, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with many cores, Lightning suggests more workers whatever a sample costs."""
    connector = pl.trainer.connectors.data_connector
    monkeypatch.setattr(connector, "suggested_max_num_workers", lambda *_: 7)
    trainer = pl.Trainer(enable_checkpointing=False, max_steps=1, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Witness(), DataLoader(Draws(24), batch_size=5, num_workers=num_workers))
    asked = ["does not have many workers" in str(one.message) for one in caught]
    assert any(asked) == (is_warned or quick_facts().usable_cores < 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_lightning_builds_again_is_still_ours(num_workers: int) -> None:
    """For predictions, Lightning builds a loader of the same class with its own batch sampler."""
    loader = DataLoader(
        Draws(12), batch_size=5, shuffle=True, seed=3, num_workers=num_workers, pool="thread"
    )
    order = [batch[0].tolist() for batch in loader]
    loader.set_epoch(0)
    trainer = pl.Trainer(enable_checkpointing=False, **QUIET)
    assert trainer.predict(Witness(), loader) == order
    again = trainer.predict_loop._combined_loader.flattened[0]
    assert type(again) is DataLoader
    assert again is not loader
    assert (again.seed, again.pool, again.num_workers) == (3, "thread", num_workers)
