"""Loader state in torch.distributed.checkpoint, which torchtitan uses to save a loader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.errors import BadState
from support.datasets import Draws, collect, differences

checkpoint: Any = pytest.importorskip("torch.distributed.checkpoint")
stateful = pytest.importorskip("torch.distributed.checkpoint.stateful")

pytestmark = [
    pytest.mark.vision,
    pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # from torch 2.8
]


def make(num_workers: int = 0, **arguments: Any) -> Any:
    return DataLoader(Draws(24), batch_size=5, shuffle=True, num_workers=num_workers, **arguments)


class Pickled:
    """Same format as torchtitan's loader: one entry per rank, a pickle of the loader's state."""

    def __init__(self, loader: Any, rank: int = 0) -> None:
        self.loader, self.key = loader, f"dp_rank_{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps(self.loader.state_dict()), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(pickle.loads(state[self.key]))


def halfway(loader: Any) -> tuple[Any, list[Any]]:
    batches = iter(loader)
    return batches, [next(batches) for _ in range(2)]


def test_a_loader_is_what_torch_calls_stateful() -> None:
    assert isinstance(make(), stateful.Stateful)
    assert not isinstance(torch.utils.data.DataLoader(Draws(24)), stateful.Stateful)  # control


@pytest.mark.parametrize("wrap", [lambda loader: loader, Pickled], ids=["values", "bytes"])
def test_a_loader_goes_on_from_a_checkpoint(wrap: Any, tmp_path: Path) -> None:
    loader = make(2, seed=3)
    batches, _ = halfway(loader)
    saved = {"dataloader": wrap(loader), "model": {"weight": torch.ones(3)}}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    rest = collect(batches)

    other, weight = make(1, seed=3), torch.zeros(3)
    checkpoint.load(
        {"dataloader": wrap(other), "model": {"weight": weight}}, checkpoint_id=tmp_path
    )
    assert weight.tolist() == [1.0] * 3
    assert not differences(collect(other), rest)
    assert differences(collect(make(seed=3))[2:], collect(make(seed=4))[2:])  # control


def test_what_was_drawn_without_a_seed_needs_the_pickle(tmp_path: Path) -> None:
    """torch loads only the entries that the new loader has. The missing ones are an error."""
    loader = make()
    batches, _ = halfway(loader)
    both = {"values": loader, "bytes": Pickled(loader)}
    checkpoint.save(both, checkpoint_id=tmp_path)
    rest = collect(batches)
    other = make()
    with pytest.raises(BadState, match="no base_seed and no shuffle_seed"):
        checkpoint.load({"values": other}, checkpoint_id=tmp_path)
    checkpoint.load({"bytes": Pickled(other)}, checkpoint_id=tmp_path)
    assert not differences(collect(other), rest)
