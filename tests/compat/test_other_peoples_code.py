"""A training script for each library, as its users write it, through ``penstock run``."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import scripting
from training import End, Run, train

pytestmark = [pytest.mark.vision, pytest.mark.timeout(600)]

SEEDED = ("--seed", "0")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
NEEDS = {
    "timm_loader": "timm",
    "transformers_trainer": "transformers",
    "huggingface_datasets": "datasets",
    "torchdata_nodes": "torchdata",
    "webdataset_shards": "webdataset",
    "lightning_fit": "pytorch_lightning",
    "accelerate_loop": "accelerate",
    "torchvision_v2": "torchvision",
    "ddp_gloo": "torch",
}
LAUNCHED = {"ddp_gloo": TORCHRUN}
INLINE, WORKERS = ("--workers", "0"), ()
"""Without workers, and with as many as the script says."""


def is_there(example: str) -> bool:
    return importlib.util.find_spec(NEEDS[example]) is not None


RUNS = {
    (example, way): Run(
        example=example,
        options=(*SEEDED, *(INLINE if way == "inline" else WORKERS)),
        launcher=LAUNCHED.get(example, ()),
    )
    for example in NEEDS
    for way in ("inline", "workers")
}
RUNS["accelerate_loop", "launched"] = Run(
    example="accelerate_loop", options=SEEDED, launcher=ACCELERATE
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    def one(key: tuple[str, str]) -> End:
        return train(RUNS[key], tmp_path_factory.mktemp(key[0]))

    return scripting.run_all(one, [key for key in RUNS if is_there(key[0])])


def end_of(key: tuple[str, str], ends: dict[Any, Any]) -> End:
    if not is_there(key[0]):
        pytest.skip(f"{NEEDS[key[0]]} is not installed")
    end: End = scripting.told(ends[key])
    assert end.status == 0, end.err[-3000:]
    return end


@pytest.mark.parametrize("example", NEEDS)
def test_a_script_trains_with_the_same_loss_with_and_without_workers(
    example: str, ends: dict[Any, Any]
) -> None:
    inline, workers = (end_of((example, way), ends) for way in ("inline", "workers"))
    assert "ran on Penstock's engine; seed 0" in workers.err
    assert workers.told("loss") == inline.told("loss")
    if example != "webdataset_shards":
        assert len(workers.told("loss")) == 1


@pytest.mark.parametrize("example", ["huggingface_datasets", "webdataset_shards"])
def test_streams_give_each_sample_once(example: str, ends: dict[Any, Any]) -> None:
    for way in ("inline", "workers"):
        assert end_of((example, way), ends).told("streamed") == ["streamed True"]


def test_each_rank_has_its_own_samples_and_its_own_report(ends: dict[Any, Any]) -> None:
    end = end_of(("ddp_gloo", "workers"), ends)
    assert end.told("each") == ["each once True"]
    assert all(f"penstock (rank {rank}): 1 loader ran" in end.err for rank in (0, 1))


def test_accelerate_launch_starts_penstock_on_each_rank(ends: dict[Any, Any]) -> None:
    end = end_of(("accelerate_loop", "launched"), ends)
    assert len(end.told("loss")) == 2
    assert all(f"penstock (rank {rank}): 1 loader ran" in end.err for rank in (0, 1))
