"""One typical training script for each library, run by ``penstock run``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.example_runs import End, Run, train

pytestmark = [pytest.mark.vision, pytest.mark.slow, pytest.mark.timeout(600)]
# One script needs only torch. The core CI leg has a similar one in test_run_training.py.
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
    "monai_images": "monai",
    "fastai_learner": "fastai",
    "albumentations_images": "albumentations",
    "torchdata_nodes": "torchdata",
    "webdataset_shards": "webdataset",
    "ddp_gloo": "torch",
}
"""Scripts in examples/ and the package that each of them needs."""
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
RUNS |= {
    (example, "plain"): Run(example=example, is_plain=True, arguments=("0",))
    for example in ("monai_images", "fastai_learner")
}
RUNS["transformers_trainer", "plain"] = Run(
    example="transformers_trainer", is_plain=True, arguments=("output", "0")
)
RUNS["fastai_learner", "own"] = Run(example="fastai_learner", arguments=("0", "own"))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    root = tmp_path_factory.mktemp("examples")

    def one(key: tuple[str, str]) -> End:
        folder = root / "-".join(key)
        folder.mkdir()
        return train(RUNS[key], folder)

    return scripts.run_all(one, [key for key in RUNS if is_there(key[0])])


def end_of(key: tuple[str, str], ends: dict[Any, Any]) -> End:
    if not is_there(key[0]):
        pytest.skip(f"{NEEDS[key[0]]} is not installed")
    end: End = scripts.told(ends[key])
    assert end.status == 0, end.err[-3000:]
    # timm keeps its loader until interpreter shutdown, when Penstock's modules are already cleared.
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


# -- MONAI, fastai, torchrun with a checkpoint -----------------------------------------------------


def order_of(end: End) -> list[int]:
    (line,) = end.told("order")
    order: list[int] = json.loads(line.removeprefix("order "))
    return order


def test_monai_gets_the_order_of_torch_s_loader(ends: dict[Any, Any]) -> None:
    ours, plain = (end_of(("monai_images", way), ends) for way in ("workers", "plain"))
    assert order_of(ours) == order_of(plain)
    assert ours.told("pixels") == end_of(("monai_images", "other"), ends).told("pixels")
    assert ours.told("pixels") != plain.told("pixels")  # drawn from different generators


def test_transformers_trainer_gets_the_order_of_torch_s_loader(ends: dict[Any, Any]) -> None:
    orders = [order_of(end_of(("transformers_trainer", way), ends)) for way in ("workers", "plain")]
    assert orders[0] == orders[1]
    assert sorted(orders[0][:32]) == list(range(32)) != orders[0][:32]  # shuffled, each once


def test_fastai_gets_each_sample_of_an_epoch(ends: dict[Any, Any]) -> None:
    for way in ("workers", "other", "plain", "own"):
        assert sorted(order_of(end_of(("fastai_learner", way), ends))) == list(range(32))


def test_fastai_s_own_loader_is_left_alone_and_the_report_says_so(ends: dict[Any, Any]) -> None:
    end = end_of(("fastai_learner", "own"), ends)
    assert "no DataLoader was iterated, so nothing was changed; seed 0" in end.err
    assert "note: fastai's own DataLoader does not use torch's class" in end.err
    assert "note: fastai" not in end_of(("fastai_learner", "workers"), ends).err


def test_ranks_go_on_from_a_checkpoint_as_torch_s_loader_without_a_stop(tmp_path: Path) -> None:
    """The samples draw no random numbers, so torch's loader gives the same bits."""
    plain = resume(tmp_path / "plain.pt", "4", "0", is_plain=True)
    first, second = (resume(tmp_path / "ours.pt", num_epochs) for num_epochs in ("2", "4"))
    for word in ("order", "loss"):
        assert first.told(word) + second.told(word) == plain.told(word)
        assert len(second.told(word)) == 2
        assert second.told(word) != plain.told(word)[:2]  # the epochs differ
    for end in (first, second):
        assert all(f"penstock (rank {rank}): 1 loader ran" in end.err for rank in range(2))


def resume(checkpoint: Path, *arguments: str, is_plain: bool = False) -> End:
    run = Run(
        example="ddp_resume",
        launcher=("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"),
        arguments=(str(checkpoint), *arguments),
        is_plain=is_plain,
    )
    end = train(run, checkpoint.parent)
    assert end.status == 0, end.err[-3000:]
    return end
