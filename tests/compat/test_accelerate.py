"""accelerate saves and restores a loader that is registered; one that is prepared it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from specimens import Draws

pytestmark = pytest.mark.vision
accelerate: Any = pytest.importorskip("accelerate")

NUM_EPOCHS = 2


def make(num_workers: int = 0) -> Any:
    return DataLoader(Draws(24), batch_size=5, shuffle=True, seed=3, num_workers=num_workers)


def fields_of(batch: Any) -> list[Any]:
    return [field.tolist() for field in batch]


def train(
    num_workers: int = 0, *, resume: Path | None = None, save_at: int | None = None, to: Path | None
) -> list[Any]:
    """As a script for accelerate has it, but for ``register_for_checkpointing``."""
    accelerator, loader = accelerate.Accelerator(cpu=True), make(num_workers)
    accelerator.register_for_checkpointing(loader)
    if resume is not None:
        accelerator.load_state(str(resume))
    seen: list[Any] = []
    while loader.state_dict()["epoch"] < NUM_EPOCHS:
        for batch in loader:
            seen.append(fields_of(batch))
            if len(seen) == save_at:
                accelerator.save_state(str(to))
                return seen
    return seen


@pytest.mark.parametrize("save_at", [1, 5, 7])  # an epoch has 5 steps
def test_a_registered_loader_goes_on_where_it_was(save_at: int, tmp_path: Path) -> None:
    before = train(2, save_at=save_at, to=tmp_path)
    assert before + train(1, resume=tmp_path, to=None) == train(to=None)


def test_a_prepared_loader_is_torch_s_and_keeps_our_order_only() -> None:
    """The limit that docs/reproducibility.md states: accelerate builds a loader of its own."""
    prepared = accelerate.Accelerator(cpu=True).prepare(make(2))
    assert type(prepared.base_dataloader) is TorchDataLoader
    ours = [fields_of(batch) for loader in [make()] for _ in range(NUM_EPOCHS) for batch in loader]
    theirs = [fields_of(batch) for _ in range(NUM_EPOCHS) for batch in prepared]
    assert [indices for indices, *_ in theirs] == [indices for indices, *_ in ours]
    assert theirs != ours


def test_batches_that_a_prepared_loader_skips_are_those_of_our_order() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    rest = accelerator.skip_first_batches(accelerator.prepare(make()), 3)
    assert [batch[0].tolist() for batch in rest] == [batch[0].tolist() for batch in make()][3:]


def test_accelerate_s_stateful_loader_is_torchdata_s_and_not_ours() -> None:
    stateful: Any = pytest.importorskip("torchdata.stateful_dataloader")
    configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    prepared = accelerator.prepare(make())
    assert type(prepared.base_dataloader) is stateful.StatefulDataLoader
