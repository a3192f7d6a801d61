"""A training script for each library, as its users write it, through ``penstock run``."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import scripting
from training import End, Run, train

pytestmark = [pytest.mark.vision, pytest.mark.timeout(600)]
# One of the scripts needs nothing but torch; the core leg has its like in test_run_training.py.
pytest.importorskip("torchvision")

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "3", "--standalone")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
NEEDS = {
    "timm_loader": "timm",
    "transformers_trainer": "transformers",
    "huggingface_datasets": "datasets",
    "lightning_fit": "pytorch_lightning",
    "torchvision_v2": "torchvision",
    "accelerate_loop": "accelerate",
    "albumentations_images": "albumentations",
    "torchdata_nodes": "torchdata",
    "webdataset_shards": "webdataset",
    "ddp_gloo": "torch",
}
"""The scripts in examples/, and what each of them imports."""
COMPARED = [example for example in NEEDS if example not in list(NEEDS)[-4:]]


def is_there(example: str) -> bool:
    return importlib.util.find_spec(NEEDS[example]) is not None


RUNS = {(example, "workers"): Run(example=example) for example in NEEDS}
RUNS |= {
    (example, "other"): Run(example=example, options=("--seed", "0", "--workers", "0"))
    for example in COMPARED
}
RUNS["accelerate_loop", "other"] = Run(example="accelerate_loop", launcher=ACCELERATE)
RUNS["ddp_gloo", "workers"] = Run(example="ddp_gloo", launcher=TORCHRUN)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("examples")

    def one(key: tuple[str, str]) -> End:
        folder = root / "-".join(key)
        folder.mkdir()
        return train(RUNS[key], folder)

    return scripting.run_all(one, [key for key in RUNS if is_there(key[0])])


def end_of(key: tuple[str, str], ends: dict[Any, Any]) -> End:
    if not is_there(key[0]):
        pytest.skip(f"{NEEDS[key[0]]} is not installed")
    end: End = scripting.told(ends[key])
    assert end.status == 0, end.err[-3000:]
    # timm keeps its loader to the very end, when of our modules nothing is left but names.
    assert "Exception ignored" not in end.err
    return end


@pytest.mark.parametrize("example", NEEDS)
def test_a_script_trains_unmodified(example: str, ends: dict[Any, Any]) -> None:
    end = end_of((example, "workers"), ends)
    assert "ran on Penstock's engine; seed 0" in end.err
    assert len(end.told("loss")) == 1


@pytest.mark.parametrize("example", COMPARED)
def test_a_script_has_the_same_loss_without_workers_or_behind_a_launcher(
    example: str, ends: dict[Any, Any]
) -> None:
    workers, other = (end_of((example, way), ends) for way in ("workers", "other"))
    assert "ran on Penstock's engine; seed 0" in other.err
    assert workers.told("loss") == other.told("loss")


@pytest.mark.parametrize("example", ["huggingface_datasets", "webdataset_shards"])
def test_streams_give_each_sample_once(example: str, ends: dict[Any, Any]) -> None:
    assert end_of((example, "workers"), ends).told("streamed") == ["streamed True"]


def test_each_rank_has_its_own_samples_and_its_own_report(ends: dict[Any, Any]) -> None:
    end = end_of(("ddp_gloo", "workers"), ends)
    assert end.told("each") == ["each once True"]
    assert all(f"penstock (rank {rank}): 1 loader ran" in end.err for rank in range(3))
