"""Resuming in mid-epoch gives exactly the remaining batches, in every pool."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

import penstock
from penstock import BlockOrder, BucketedBatches, DataLoader, SeededOrder, WeightedOrder
from penstock.errors import BadState
from support.datasets import Draws, Numbers, Samples, assert_same, collect, differences, snapshot

legacy = pytest.mark.legacy

LENGTH, ROWS = 22, 4


def make(dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": ROWS, "shuffle": True, "seed": 3, **arguments}
    return DataLoader(Draws(LENGTH) if dataset is None else dataset, **arguments)


def taken(loader: Any, count: int) -> list[Any]:
    """Return the first ``count`` batches of a new epoch, which is then abandoned."""
    return [snapshot(batch) for batch in itertools.islice(loader, count)]


def saved(loader: Any) -> Any:
    """Return the state after a round trip through JSON, as in a checkpoint."""
    return json.loads(json.dumps(loader.state_dict()))


def indices(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


# -- the same stream -------------------------------------------------------------------------------

WORKERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "1 worker": {"num_workers": 1},
    "3 workers, little prefetch": {"num_workers": 3, "prefetch_factor": 1},
    "threads": {"num_workers": 2, "pool": "thread"},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "auto": {"num_workers": "auto"},
}


@legacy
@pytest.mark.parametrize("after", WORKERS)
@pytest.mark.parametrize("before", ["inline", "3 workers, little prefetch"])
def test_the_rest_of_an_epoch_and_the_next_one_are_the_same_on_other_workers(
    before: str, after: str
) -> None:
    whole = make()
    epochs = [collect(whole) for _ in range(3)]
    first = make(**WORKERS[before])
    collect(first)
    assert_same(taken(first, 2), epochs[1][:2])
    state = saved(first)
    first.close()
    other = make(**WORKERS[after])
    other.load_state_dict(state)
    assert_same(collect(other), epochs[1][2:])
    assert_same(collect(other), epochs[2])
    other.close()


def test_the_rest_of_an_epoch_is_the_same_under_spawn() -> None:
    first = make()
    whole = collect(make())
    taken(first, 3)
    other = make(num_workers=1, multiprocessing_context="spawn")
    other.load_state_dict(saved(first))
    assert_same(collect(other), whole[3:])


def test_what_was_loaded_ahead_does_not_count() -> None:
    loader = make(num_workers=3, prefetch_factor=4)  # the whole epoch is in flight
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["position"] == ROWS


def test_a_loop_that_is_left_is_taken_up_where_it_was_left() -> None:
    loader = make(num_workers=2)
    seen = []
    for batch in loader:
        seen.append(snapshot(batch))
        if len(seen) == 3:
            break
    state = loader.state_dict()
    assert state["position"] == 3 * ROWS
    loader.load_state_dict(state)  # the same loader can resume too
    assert_same(seen + collect(loader), collect(make()))


def test_each_position_of_an_epoch_can_be_gone_on_from() -> None:
    whole = indices(make())
    for count in range(len(whole) + 1):
        first, other = make(), make()
        taken(first, count)
        other.load_state_dict(saved(first))
        assert indices(other) == (whole[count:] or indices(_second_epoch()))


def _second_epoch() -> Any:
    loader = make()
    collect(loader)
    return loader


@legacy
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [20, 22])
def test_after_the_last_batch_comes_the_next_epoch(length: int, drop_last: bool) -> None:
    first = make(Numbers(length), drop_last=drop_last)
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    state = first.state_dict()  # before the loop sees the end
    assert (state["epoch"], state["position"]) == (1, 0)
    assert next(batches, None) is None
    assert first.state_dict() == state


def test_a_loader_of_nothing_has_a_state_too() -> None:
    first, other = make(Numbers(0)), make(Numbers(0))
    assert collect(first) == []
    other.load_state_dict(saved(first))
    assert collect(other) == []


def test_persistent_workers_are_resumed_without_new_workers() -> None:
    loader = make(num_workers=2, persistent_workers=True)
    epoch = collect(loader)
    pids = [worker.pid for worker in loader._iterator._workers]
    taken(loader, 1)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0})
    assert_same(collect(loader), epoch[1:])
    assert [worker.pid for worker in loader._iterator._workers] == pids
    loader.close()


def test_two_loaders_do_not_disturb_each_other() -> None:
    one, other = make(), make(seed=4)
    expected = [collect(make())[2:], collect(make(seed=4))[1:]]
    first, second = iter(one), iter(other)
    next(first), next(second), next(first)
    states = saved(one), saved(other)
    for seed, state, rest in zip((3, 4), states, expected, strict=True):
        loader = make(seed=seed)
        loader.load_state_dict(state)
        assert_same(collect(loader), rest)


def test_a_state_that_was_loaded_and_not_begun_is_still_the_state() -> None:
    first, other = make(), make()
    taken(first, 2)
    other.load_state_dict(saved(first))
    assert other.state_dict() == first.state_dict()
    other.load_state_dict(make().state_dict())  # replaces the first state
    assert_same(collect(other), collect(make()))


def test_samples_without_batches_are_resumed() -> None:
    whole = indices([(torch.tensor(sample[0]),) for sample in make(batch_size=None)])
    first, other = make(batch_size=None), make(batch_size=None, num_workers=2)
    taken(first, 5)
    other.load_state_dict(saved(first))
    assert [int(sample[0]) for sample in other] == whole[5:]


def test_nothing_that_was_delivered_is_loaded_again() -> None:
    loaded: list[int] = []
    dataset = Samples(lambda index: loaded.append(index) or index, LENGTH)
    first, other = make(dataset), make(dataset)
    taken(first, 4)
    other.load_state_dict(saved(first))
    loaded.clear()
    rest = collect(other)
    assert sorted(loaded) == sorted(int(index) for batch in rest for index in batch)
    assert len(loaded) == LENGTH - 4 * ROWS


def test_a_state_is_a_few_hundred_bytes_of_plain_data() -> None:
    loader = make()
    taken(loader, 1)
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    assert len(json.dumps(loader.state_dict())) < 300


# -- epochs ----------------------------------------------------------------------------------------


@legacy
def test_set_epoch_is_not_needed_but_honoured() -> None:
    counted = make()
    epochs = [indices(counted) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    told = make()
    for epoch in (2, 0, 1):
        told.set_epoch(epoch)
        assert indices(told) == epochs[epoch]
    assert indices(told) == epochs[2]  # counting continues


def test_a_loop_that_tells_the_epoch_still_resumes_in_its_middle() -> None:
    first, other = make(), make()
    first.set_epoch(5)
    rest = indices(first)[2:]
    first.set_epoch(5)
    taken(first, 2)
    other.load_state_dict(saved(first))
    other.set_epoch(5)  # typical loops call this before each epoch
    assert indices(other) == rest
    other.load_state_dict(saved(first))
    other.set_epoch(6)  # a different epoch starts at its beginning
    assert len(indices(other)) == len(first)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_of_one_loader_have_an_epoch_each(num_workers: int) -> None:
    one_by_one = make(Numbers(LENGTH))
    epochs = [collect(one_by_one), collect(one_by_one)]
    loader = make(Numbers(LENGTH), num_workers=num_workers)
    assert_same(
        [[*pair] for pair in zip(loader, loader, strict=True)],
        [[*p] for p in zip(*epochs, strict=True)],
    )


def test_two_iterators_that_shuffle_without_a_seed_have_an_order_each() -> None:
    torch.manual_seed(0)
    loader = make(Numbers(LENGTH), seed=None)
    assert any(differences(*pair) for pair in zip(loader, loader, strict=True))


# -- samplers --------------------------------------------------------------------------------------


class Pairs(BatchSampler):
    """A user's batch sampler with a different constructor."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, 2, False)


SAMPLERS: dict[str, Any] = {
    "an order": lambda: {"sampler": SeededOrder(LENGTH, seed=1), "batch_size": ROWS},
    "weights": lambda: {"sampler": WeightedOrder([1.0] * LENGTH, seed=1), "batch_size": ROWS},
    "an order in a batch sampler": lambda: {
        "batch_sampler": BatchSampler(SeededOrder(LENGTH, seed=1), ROWS, False)
    },
    "a batch sampler's own class": lambda: {"batch_sampler": Pairs(SeededOrder(LENGTH, seed=1))},
    "a list of batches": lambda: {"batch_sampler": [[1, 2], [3, 4, 5], [6], [7, 1, 2]] * 12},
    "a list": lambda: {"sampler": list(range(LENGTH))[::-1], "batch_size": ROWS},
    "torch's, in sequence": lambda: {"batch_size": ROWS},
    "torch's, shuffled": lambda: {"batch_size": ROWS, "shuffle": True},
    "torch's, with replacement": lambda: {
        "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=40),
        "batch_size": ROWS,
    },
}


@legacy
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_is_resumed(name: str, num_workers: int) -> None:
    torch.manual_seed(0)
    first = DataLoader(Draws(LENGTH), num_workers=num_workers, **SAMPLERS[name]())
    batches = iter(first)
    next(batches), next(batches)
    state = saved(first)
    rest = collect(batches)
    torch.manual_seed(1)
    other = DataLoader(Draws(LENGTH), **SAMPLERS[name]())
    other.load_state_dict(state)
    assert_same(collect(other), rest)


def test_more_batches_than_samples_are_not_taken_for_the_end() -> None:
    loader = DataLoader(Numbers(3), batch_sampler=[[0], [1], [2]] * 4)
    taken(loader, 5)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 5)


# -- invalid states --------------------------------------------------------------------------------

ORDER = {"sampler": "SeededOrder", "seed": 3, "shuffle": True}
STATE = {
    "version": 2,
    "epoch": 1,
    "position": 8,
    "seed": 3,
    "length": 22,
    "global_batch": 4,
    "order": ORDER,
}
BAD_STATES: dict[str, tuple[Any, str]] = {
    "nothing": (None, "not a loader state"),
    "a list": ([1, 2], "not a loader state"),
    "empty": ({}, "not a loader state"),
    "a model's": ({"weight": 1}, "not a loader state"),
    "another version": ({**STATE, "version": 3}, "version 3, but this version of Penstock reads 1"),
    "no whole version": ({**STATE, "version": True}, "version True"),
    "cut off": ({"version": 1, "epoch": 1}, "position"),
    "seed cut off": ({k: v for k, v in STATE.items() if k != "seed"}, "None in the state, 3 here"),
    "more entries": ({**STATE, "workers": 2}, "workers"),
    "a negative position": ({**STATE, "position": -4}, "-4"),
    "a position of text": ({**STATE, "position": "8"}, "'8'"),
    "half a position": ({**STATE, "position": 8.0}, "8.0"),
    "a position past the end": ({**STATE, "position": 24}, "position 24, but its dataset has 22"),
    "a position within a batch": ({**STATE, "position": 7}, "in the middle of a batch of 4"),
    "a negative epoch": ({**STATE, "epoch": -1}, "-1"),
    "an enormous epoch": ({**STATE, "epoch": 1 << 70}, "epoch"),
    "no epoch": ({**STATE, "epoch": None}, "epoch"),
    "half a version": ({**STATE, "version": 1.0}, "version 1.0"),
    "an enormous position": ({**STATE, "position": 1 << 70}, "its dataset has 22 samples"),
    "an enormous seed": ({**STATE, "seed": 1 << 70}, "64-bit"),
    "what a loader without seed draws": ({**STATE, "base_seed": 5}, "base_seed, which this loader"),
    "a shuffle of torch's": ({**STATE, "shuffle_seed": 5}, "shuffle_seed, which this loader"),
    "a generator's": ({**STATE, "generator_state": "x"}, "generator_state, which this loader"),
    "a sampler's": ({**STATE, "sampler": {"at": 3}}, "sampler, which this loader"),
    "an iterable dataset's": ({**STATE, "dataset": [1]}, "dataset, which this loader"),
    "workers of an iterable's": ({**STATE, "num_workers": 2}, "num_workers, which this loader"),
    "another length": ({**STATE, "length": 50}, "50 in the state, 22 here"),
    "another seed": ({**STATE, "seed": 4}, "4 in the state, 3 here"),
    "no order": ({**STATE, "order": None}, "not a Penstock sampler in the state, SeededOrder here"),
    "an order of text": ({**STATE, "order": "3"}, "not a Penstock sampler in the state"),
    "an order of nothing": ({**STATE, "order": {}}, "sampler: None in the state, SeededOrder here"),
    "another batch size": ({**STATE, "global_batch": 8}, "8 in the state, 4 here"),
}


@legacy
def test_the_state_that_the_next_test_spoils_is_a_good_one() -> None:
    loader = make(Numbers(LENGTH))
    loader.load_state_dict(dict(STATE))
    assert len(collect(loader)) == 4


@legacy
def test_a_state_of_version_1_has_no_order_and_is_resumed() -> None:
    old = {**{k: v for k, v in STATE.items() if k != "order"}, "version": 1}
    loader, other = make(Numbers(LENGTH)), make(Numbers(LENGTH))
    loader.load_state_dict(old)
    other.load_state_dict(STATE)
    assert_same(collect(loader), collect(other))


def _samplers() -> dict[str, Any]:
    """Return samplers whose orders all differ, as functions of nothing."""
    words = [index % 5 for index in range(LENGTH)]
    starts = [0, 4, 12, 22]
    one = penstock.mix([(Numbers(12), 3), (Numbers(10), 1)], length=LENGTH)
    return {
        "seed 0": lambda: SeededOrder(LENGTH, seed=0),
        "seed 1": lambda: SeededOrder(LENGTH, seed=1),
        "in sequence": lambda: SeededOrder(LENGTH, shuffle=False),
        "blocks of 2": lambda: BlockOrder(LENGTH, block_size=2, num_mixed=2),
        "blocks of 4": lambda: BlockOrder(LENGTH, block_size=4, num_mixed=2),
        "blocks of 4, 3 mixed": lambda: BlockOrder(LENGTH, block_size=4, num_mixed=3),
        "blocks, seed 1": lambda: BlockOrder(LENGTH, block_size=4, num_mixed=3, seed=1),
        "uneven blocks": lambda: BlockOrder(LENGTH, block_starts=starts, num_mixed=2),
        "other blocks": lambda: BlockOrder(LENGTH, block_starts=[0, 5, 12, 22], num_mixed=2),
        "weights": lambda: WeightedOrder([1.0] * LENGTH),
        "other weights": lambda: WeightedOrder([2.0, *[1.0] * (LENGTH - 1)]),
        "mixture": lambda: one.order(batch_size=4),
        "mixture, shuffled": lambda: one.order(shuffle=True, batch_size=4),
        "mixture, seed 1": lambda: one.order(shuffle=True, batch_size=4, seed=1),
        "mixture, batches of 2": lambda: one.order(shuffle=True, batch_size=2),
        "buckets": lambda: BucketedBatches(words, batch_size=4, bucket_batches=2),
        "buckets, seed 1": lambda: BucketedBatches(words, batch_size=4, bucket_batches=2, seed=1),
        "larger buckets": lambda: BucketedBatches(words, batch_size=4, bucket_batches=5),
        "other lengths": lambda: BucketedBatches(words[::-1], batch_size=4, bucket_batches=2),
        "torch's": lambda: SequentialSampler(range(LENGTH)),
    }


def test_a_state_is_refused_by_a_loader_with_a_different_order() -> None:
    def make_with(sampler: Any) -> Any:
        if isinstance(sampler, BucketedBatches):
            return DataLoader(Numbers(LENGTH), batch_sampler=sampler)
        return DataLoader(Numbers(LENGTH), sampler=sampler, batch_size=4)

    samplers = _samplers()
    for saved_with, sampler in samplers.items():
        first = make_with(sampler())
        taken(first, 2)
        state = saved(first)
        rest = collect(make_with(sampler()))[2:]
        for name, other in samplers.items():
            loader = make_with(other())
            if name == saved_with:
                loader.load_state_dict(state)
                assert_same(collect(loader), rest)
                continue
            with pytest.raises(BadState, match="belongs to a different loader"):
                loader.load_state_dict(state)


@legacy
@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_is_refused_and_the_loader_is_as_it_was(name: str) -> None:
    state, words = BAD_STATES[name]
    loader = make(Numbers(LENGTH))
    good = {**STATE, "epoch": 7}
    loader.load_state_dict(good)
    with pytest.raises(BadState) as caught:
        loader.load_state_dict(state)
    assert words in str(caught.value)
    assert loader.state_dict() == good
    untouched = make(Numbers(LENGTH))
    untouched.load_state_dict(good)
    assert_same(collect(loader), collect(untouched))


@pytest.mark.parametrize("gone", ["base_seed", "shuffle_seed"])
def test_what_was_drawn_cannot_be_cut_off_a_state(gone: str) -> None:
    first = make(Numbers(LENGTH), seed=None)
    taken(first, 2)
    state = saved(first)
    del state[gone]
    with pytest.raises(BadState, match=gone):
        make(Numbers(LENGTH), seed=None).load_state_dict(state)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"base_seed": 1 << 70}, "64-bit"),
        ({"shuffle_seed": 1 << 70}, "64-bit"),
        ({"base_epoch": 1}, "before its base_epoch"),
        ({"generator_state": "x"}, "generator_state, which this loader"),
    ],
)
def test_what_was_drawn_cannot_be_edited_into_nonsense(entries: Any, words: str) -> None:
    first = make(Numbers(LENGTH), seed=None)
    taken(first, 2)
    with pytest.raises(BadState, match=words):
        make(Numbers(LENGTH), seed=None).load_state_dict({**saved(first), **entries})


@pytest.mark.parametrize("change", [lambda text: None, lambda text: text[:100], lambda text: 7])
def test_the_state_of_a_generator_cannot_be_cut_off(change: Any) -> None:
    def make_drawing() -> DataLoader[Any]:
        return make(Numbers(LENGTH), seed=None, generator=torch.Generator().manual_seed(3))

    first = make_drawing()
    taken(first, 2)
    state = saved(first)
    make_drawing().load_state_dict(dict(state))  # control
    with pytest.raises(BadState, match="generator_state"):
        make_drawing().load_state_dict(
            {**state, "generator_state": change(state["generator_state"])}
        )


def test_a_state_is_refused_in_the_middle_of_an_epoch_without_harm() -> None:
    loader = make(num_workers=2)
    whole = collect(make())
    batches = iter(loader)
    seen = [snapshot(next(batches))]
    with pytest.raises(BadState):
        loader.load_state_dict({**STATE, "seed": 9})
    assert_same(seen + collect(batches), whole)


def test_a_bad_state_is_a_value_error_that_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)a different loader.*Try: use the dataset, sampler, seed="
    ):
        make(Numbers(23)).load_state_dict(dict(STATE))


@legacy
@pytest.mark.parametrize("pool", ["process", "thread"])
def test_a_later_epoch_of_persistent_workers_is_resumed_without_a_seed(pool: str) -> None:
    first = DataLoader(
        Draws(LENGTH), batch_size=4, num_workers=2, pool=pool, persistent_workers=True
    )
    collect(first)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    rest = list(iterator)
    first.close()
    other = DataLoader(Draws(LENGTH), batch_size=4)
    other.load_state_dict(state)
    assert_same(collect(other), rest)
    assert differences(collect(DataLoader(Draws(LENGTH), batch_size=4))[1:], rest)  # control


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("way", ["inline", "1 worker", "threads"])
def test_a_batch_that_failed_is_over_once_a_later_one_was_delivered(way: str) -> None:
    def rest(num_calls: int) -> list[Any]:
        loader = DataLoader(Broken(8), batch_size=2, **WORKERS[way])
        batches = iter(loader)
        for _ in range(num_calls):
            with contextlib.suppress(OSError):
                next(batches)
        other = DataLoader(Numbers(8), batch_size=2)
        other.load_state_dict(loader.state_dict())
        return [labels.tolist() for _, labels in other]

    assert rest(3) == [[6, 7]]
    assert rest(2) == [[2, 3], [4, 5], [6, 7]]  # a loop that ends there retries the batch
