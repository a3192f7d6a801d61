"""The same batches as torch's DataLoader, in every pool."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from support.datasets import (
    PROCESS_WAYS,
    QUICK_WAYS,
    WAYS,
    WORKER_WAYS,
    Batched,
    Numbers,
    Pair,
    Record,
    Samples,
    Shards,
    Slow,
    Unequal,
    assert_same,
    collect,
    differences,
)

legacy = pytest.mark.legacy


def both(dataset: Any, way: str, **arguments: Any) -> tuple[list[Any], list[Any]]:
    """Return all batches of Penstock (loaded this way) and of torch (in this process)."""
    ours = collect(DataLoader(dataset, **WAYS[way], **arguments))
    torch_arguments = {
        k: v for k, v in arguments.items() if k not in ("prefetch_factor", "in_order")
    }
    return ours, collect(TorchDataLoader(dataset, **torch_arguments))


class Descending(Sampler):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.length - 1, -1, -1))


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "batches of three": lambda: {"batch_size": 3},
    "one by one": lambda: {"batch_size": 1},
    "all at once": lambda: {"batch_size": 100},
    "the last dropped": lambda: {"batch_size": 3, "drop_last": True},
    "not batched": lambda: {"batch_size": None},
    "a sampler": lambda: {"batch_size": 4, "sampler": Descending(20)},
    "some of them": lambda: {"batch_size": 4, "sampler": [3, 1, 4, 1, 5, 9, 2, 6]},
    "a batch sampler": lambda: {
        "batch_sampler": BatchSampler(SequentialSampler(range(20)), 6, False)
    },
    "batches of all sizes": lambda: {"batch_sampler": [[0], [1, 2, 3], [4] * 9, [5, 6]]},
    "batches as tuples": lambda: {"batch_sampler": [(0, 1), (2,)]},
    "batches as arrays": lambda: {"batch_sampler": [np.arange(3), np.arange(3, 8)]},
    "batches as sets": lambda: {"batch_sampler": [{1, 2, 3}, {4}]},
    "indices of numpy": lambda: {"batch_size": 4, "sampler": list(np.arange(10))},
    "a collate_fn": lambda: {"batch_size": 3, "collate_fn": list},
    "no prefetch to speak of": lambda: {"batch_size": 3, "prefetch_factor": 1},
    "much prefetch": lambda: {"batch_size": 1, "prefetch_factor": 30},
}
PREFETCHING = {name for name in ARGUMENTS if "prefetch" in name}


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_batches_are_torch_s(name: str, way: str) -> None:
    if name in PREFETCHING and way == "inline":
        pytest.skip("torch refuses prefetch_factor without workers")
    assert_same(*both(Numbers(), way, **ARGUMENTS[name]()))


def test_the_batches_are_torch_s_under_spawn() -> None:
    assert_same(*both(Numbers(), "spawn", batch_size=3, drop_last=True))


def test_other_batches_would_be_noticed() -> None:
    ours, theirs = both(Numbers(), "forkserver", batch_size=3)
    assert differences(ours[:-1], theirs)
    assert differences(ours[::-1], theirs)
    ours[2][0][1, 1] += 1
    assert differences(ours, theirs)


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_shuffle_with_a_generator_is_torch_s_over_two_epochs(way: str) -> None:
    epochs = {}
    for kind, arguments in ((DataLoader, WAYS[way]), (TorchDataLoader, {})):
        generator = torch.Generator().manual_seed(3)
        loader = kind(Numbers(), batch_size=3, shuffle=True, generator=generator, **arguments)
        epochs[kind] = [collect(loader), collect(loader)]
    assert_same(epochs[DataLoader], epochs[TorchDataLoader])
    assert differences(epochs[DataLoader][0], epochs[DataLoader][1])  # control: shuffled


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_shuffle_without_a_generator_follows_the_global_seed(way: str) -> None:
    orders = []
    for seed, kind in ((0, DataLoader), (0, TorchDataLoader), (1, DataLoader)):
        arguments = WAYS[way] if kind is DataLoader else {}
        torch.manual_seed(seed)
        orders.append(collect(kind(Numbers(), batch_size=3, shuffle=True, **arguments)))
    assert_same(orders[0], orders[1])
    assert differences(orders[0], orders[2])


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_weighted_and_stateful_samplers_are_torch_s(way: str) -> None:
    def sampler() -> Any:
        generator = torch.Generator().manual_seed(5)
        return WeightedRandomSampler([1.0] * 19 + [50.0], 30, generator=generator)

    ours = collect(DataLoader(Numbers(), batch_size=4, sampler=sampler(), **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(Numbers(), batch_size=4, sampler=sampler())))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda i: (i, i / 2, i % 2 == 0),
    "numpy": lambda i: {"a": np.arange(3) + i, "b": np.float32(i)},
    "names beside images": lambda i: (torch.full((3, 8, 8), i, dtype=torch.uint8), f"{i}.jpg"),
    "names in a dict": lambda i: {"image": torch.ones(2) * i, "name": str(i), "raw": bytes(i)},
    "namedtuples": lambda i: Pair(torch.ones(2) * i, str(i)),
    "large images": lambda i: (torch.full((3, 64, 64), float(i)), i),
    "half precision": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "empty tensors": lambda i: (torch.zeros(0, 4), i),
    "only strings": lambda i: "s" * i,
    "int, now and then a float": lambda i: i if i % 3 else i + 0.5,
    "two dtypes": lambda i: torch.ones(2) if i % 2 else torch.ones(2, dtype=torch.float64),
    "scalars of numpy": lambda i: (np.float64(i), np.int32(i)),
    "deep": lambda i: {"a": [(i, [i, (torch.ones(2) * i,)]), Pair(i, {"b": (str(i), i)})]},
}


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_every_kind_are_collated_as_torch_collates_them(name: str, way: str) -> None:
    assert_same(*both(Samples(SAMPLES[name]), way, batch_size=4))


def test_samples_that_need_gradients_keep_them_where_nothing_has_to_travel() -> None:
    dataset = Samples(lambda i: torch.ones(2, requires_grad=i == 5))
    assert_same(*both(dataset, "thread", batch_size=4))


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_dataclass_is_collated_field_by_field(way: str) -> None:
    dataset = Samples(lambda i: Record(torch.ones(2) * i, i), 4)
    batches = collect(DataLoader(dataset, batch_size=2, **WAYS[way]))
    assert [type(batch) for batch in batches] == [Record, Record]
    assert batches[1].label.tolist() == [2, 3]
    assert batches[1].image.tolist() == [[2, 2], [3, 3]]


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_dataclass_inside_containers_is_collated_as_well(way: str) -> None:
    dataset = Samples(lambda i: (i, {"records": [Record(torch.ones(2), i)]}), 4)
    batch = next(iter(DataLoader(dataset, batch_size=2, **WAYS[way])))
    (record,) = batch[1]["records"]
    assert type(record) is Record
    assert record.label.tolist() == batch[0].tolist() == [0, 1]
    with pytest.raises(TypeError):
        torch.utils.data.default_collate([dataset[0]])  # control: torch raises


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_images_flipped_by_a_negative_stride_are_treated_as_without_workers(way: str) -> None:
    dataset = Samples(lambda i: np.arange(6 + i, 12 + i).reshape(2, 3)[:, ::-1])

    def outcome(**arguments: Any) -> Any:
        try:
            return [batch.tolist() for batch in DataLoader(dataset, batch_size=4, **arguments)]
        except ValueError:
            return "ValueError"

    assert outcome(**WAYS[way]) == outcome()


REFUSED: dict[str, Callable[[int], Any]] = {
    "a number past 64 bits": lambda i: 2**70 if i == 5 else i,
    "None": lambda i: None if i == 5 else i,
    "an object": lambda i: object(),
    "sparse tensors": lambda i: torch.eye(3).to_sparse(),
    "texts among numbers": lambda i: "text" if i == 5 else i,
    "a quantized and a plain tensor": lambda i: torch.ones(2).to_sparse() if i else torch.ones(2),
}


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_to_collate_is_refused_with_the_same_type(name: str, way: str) -> None:
    dataset = Samples(REFUSED[name])
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the test compares the type
        collect(TorchDataLoader(dataset, batch_size=4))
    with pytest.raises(theirs.type):
        collect(DataLoader(dataset, batch_size=4, **WAYS[way]))


class Photos(Samples):
    """Its samples are files, as in torchvision's folders. One file is broken."""

    def __init__(self) -> None:
        super().__init__(self._read, 12)
        self.paths = [f"photos/{index}.jpg" for index in range(12)]

    def _read(self, index: int) -> int:
        if index == 6:
            raise OSError("image file is truncated")
        return index


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_error_of_a_broken_file_names_the_file(way: str) -> None:
    with pytest.raises(OSError, match="image file is truncated") as caught:
        collect(DataLoader(Photos(), batch_size=4, **WAYS[way]))
    assert caught.value.sample_index == 6  # type: ignore[attr-defined]
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    if way != "inline" or sys.version_info >= (3, 11):
        assert "while loading sample 6 (photos/6.jpg)" in " ".join(told)


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_batches_of_many_shapes_in_one_epoch_are_right(way: str) -> None:
    dataset = Samples(lambda i: torch.full((1 + i // 4 * 50, 7), float(i)), 32)
    assert_same(*both(dataset, way, batch_size=4))


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_batches_that_grow_past_every_slot_are_right(way: str) -> None:
    dataset = Samples(lambda i: torch.full((4 ** (i // 2), 1024), float(i)), 16)  # 8 KB to 128 MB
    loader = DataLoader(dataset, batch_size=2, **WAYS[way])
    sums = [(batch.shape[1], batch[0, 0, 0].item(), batch[1, -1, -1].item()) for batch in loader]
    assert sums == [(4**n, 2.0 * n, 2.0 * n + 1) for n in range(8)]


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_oversize_results_of_a_collate_fn_are_right(way: str) -> None:
    dataset = Samples(lambda i: np.full(1 << 20, i, np.uint8), 8)
    loader = DataLoader(
        dataset, batch_size=2, collate_fn=lambda batch: [*batch, *batch] * 20, **WAYS[way]
    )
    for number, batch in enumerate(loader):
        assert len(batch) == 80
        assert {int(array[0]) for array in batch} == {2 * number, 2 * number + 1}
        assert {int(array[-1]) for array in batch} == {2 * number, 2 * number + 1}


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_out_of_order_delivery_gives_the_same_batches_in_any_order(way: str) -> None:
    dataset = Slow(32, sample_s=0.001)
    arguments = {"batch_size": 4, "in_order": False}
    batches = [batch.tolist() for batch in DataLoader(dataset, **arguments, **WAYS[way])]
    assert sorted(batches) == [list(range(n, n + 4)) for n in range(0, 32, 4)]


def test_out_of_order_delivery_does_not_wait_for_the_slow_one(tmp_path: Path) -> None:
    orders = {}
    for in_order in (True, False):
        dataset = Samples(partial(_zero_is_slow, is_other_loaded=tmp_path / str(in_order)), 12)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=2, in_order=in_order, prefetch_factor=4
        )
        orders[in_order] = [int(batch) for batch in loader]
    assert orders[True] == list(range(12))
    assert sorted(orders[False]) == list(range(12))
    assert orders[False][0] != 0


def _zero_is_slow(index: int, is_other_loaded: Path) -> int:
    if index != 0:
        is_other_loaded.touch()
        return index
    limit_s = time.monotonic() + 240
    while not is_other_loaded.exists() and time.monotonic() < limit_s:
        time.sleep(0.01)
    time.sleep(1.0)  # the other one is on its way
    return index


# -- data in batches or in memory ------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_batched_getitems_is_used(way: str) -> None:
    batches = collect(DataLoader(Batched(), batch_size=6, **WAYS[way]))
    assert [batch[1].tolist() for batch in batches] == [
        list(range(n, min(n + 6, 20))) for n in range(0, 20, 6)
    ]
    with pytest.raises(AssertionError, match="__getitems__"):  # control: it raises
        Batched()[0]


# -- iterable datasets ----------------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("dataset", [Shards(20), Shards(21), Shards(1), Unequal()], ids=repr)
@pytest.mark.parametrize("batch_size", [3, None])
def test_shards_come_in_torch_s_order(dataset: Any, batch_size: int | None, way: str) -> None:
    arguments: dict[str, Any] = {"batch_size": batch_size, "num_workers": 3}
    context = WAYS[way].get("multiprocessing_context")
    ours = collect(DataLoader(dataset, multiprocessing_context=context, **arguments))
    assert_same(
        ours, collect(TorchDataLoader(dataset, multiprocessing_context="fork", **arguments))
    )


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_short_last_batches_of_shards_are_dropped_when_asked(way: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "drop_last": True, **WAYS[way]}
    ours = collect(DataLoader(Shards(20), **arguments))
    arguments["multiprocessing_context"] = "fork"
    assert_same(ours, collect(TorchDataLoader(Shards(20), **arguments)))


@legacy
@pytest.mark.parametrize("way", ["inline", "thread"])
def test_an_iterable_dataset_that_is_not_shared_out_is_seen_once(way: str) -> None:
    batches = collect(DataLoader(Shards(10), batch_size=4, **WAYS[way]))
    assert torch.cat(batches).tolist() == list(range(10))


@pytest.mark.parametrize("way", ["inline", "thread", "forkserver"])
def test_an_iterable_dataset_can_be_read_again_and_again(way: str) -> None:
    loader = DataLoader(Shards(10), batch_size=4, **WAYS[way])
    epochs = [sorted(torch.cat(collect(loader)).tolist()) for _ in range(3)]
    assert epochs == [list(range(10))] * 3


def test_the_wrong_length_of_an_iterable_dataset_is_warned_about_as_torch_warns() -> None:
    class Liar(Shards):
        def __len__(self) -> int:
            return 2

    loader = DataLoader(Liar(20), batch_size=None, num_workers=2)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(collect(loader)) == 20


# -- random order is drawn at the same point as in torch -------------------------------------------


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_loader_leaves_the_caller_s_generators_where_torch_leaves_them(way: str) -> None:
    def after(kind: Any, **arguments: Any) -> list[Any]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        collect(kind(Numbers(), batch_size=3, shuffle=True, **arguments))
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    assert after(DataLoader, **WAYS[way]) == after(TorchDataLoader)


@legacy
@pytest.mark.parametrize("randomness", ["sample", "worker"])
@pytest.mark.parametrize("pool", ["auto", "process", "inline"])
@pytest.mark.parametrize("dataset", [Numbers(4), Shards(4)], ids=["indexed", "iterable"])
def test_a_loader_without_workers_has_the_settings_of_its_plan(
    dataset: Any, pool: str, randomness: str
) -> None:
    loader = DataLoader(dataset, pool=pool, randomness=randomness)
    assert loader._settings_without_plan("inline", None) == loader._settings(loader.plan)
    assert loader.plan.warnings == ()  # the iterator does not look at the plan


@legacy
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no fork server")
@pytest.mark.parametrize("randomness", ["sample", "worker"])
@pytest.mark.parametrize("pool", ["auto", "process"])
@pytest.mark.parametrize("dataset", [Numbers(4), Shards(4)], ids=["indexed", "iterable"])
def test_a_loader_with_forked_workers_has_the_settings_of_its_plan(
    dataset: Any, pool: str, randomness: str
) -> None:
    options: Any = {"randomness": randomness, "num_workers": 2, "sample_timeout_s": 60.0}
    loader = DataLoader(dataset, pool=pool, prefetch_factor=3, in_order=False, **options)
    assert loader._uses_fork_server()
    settings = loader._settings_without_plan("process", "forkserver")
    assert settings == loader._settings(loader.plan)
    assert loader.plan.warnings == ()


def test_other_settings_than_those_of_the_plan_would_be_noticed() -> None:
    loader = DataLoader(Numbers(4), num_workers=1)
    assert loader._settings_without_plan("inline", None) != loader._settings(loader.plan)
    threads = DataLoader(Numbers(4), num_workers=1, pool="thread")
    assert not threads._uses_fork_server()


@legacy
def test_the_plan_s_warning_about_a_limit_without_workers_is_given() -> None:
    with pytest.warns(UserWarning, match="sample_timeout_s has no effect"):
        collect(DataLoader(Numbers(4), sample_timeout_s=5))
