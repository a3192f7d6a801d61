"""on_error: bad samples are skipped or replaced, other samples do not move, and all are listed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import DataLoader
from penstock.engine.loading.bad_sample_file import read
from penstock.engine.loading.bad_samples import MAX_IN_A_ROW
from penstock.errors import BadArgument, MismatchedSamples, NoSubstitute, SampleTimeout, TooManyBad
from support.datasets import WAYS, assert_same, collect, differences
from support.worker_faults import drawn

legacy = pytest.mark.legacy

AUTO = {**WAYS, "auto": {"num_workers": "auto"}}
EVERY = ["inline", "thread", "forkserver", "auto"]
BAD = frozenset({0, 5, 6, 23, 24, 25, 26, 39})
"""The first, the last, neighbors, and all but one of a batch (unshuffled, batches of four)."""
LENGTH = 40


class Unspeakable(Exception):
    """An exception that cannot be pickled and whose text cannot be read."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise LookupError


class Broken(Dataset):
    """Sample i is i and random numbers. Samples in ``bad`` raise after drawing."""

    def __init__(self, bad: Any = BAD, *, length: int = LENGTH, wait_s: float = 0.0) -> None:
        self.bad = frozenset(bad)
        self.length = length
        self.wait_s = wait_s
        self.error: Any = lambda index: ValueError(f"{index} is truncated")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        sample = drawn(index)
        if index in self.bad:
            raise self.error(index)
        return sample


class BrokenBatches(Broken):
    """The same with ``__getitems__``, where one bad sample makes the call fail."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Broken.__getitem__(self, index) for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ should have been used")


class Empty(Broken):
    """Bad samples are None."""

    def __getitem__(self, index: int) -> Any:
        return None if index in self.bad else drawn(index)


def make(dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, **arguments}
    return DataLoader(Broken() if dataset is None else dataset, **arguments)


def quiet(**arguments: Any) -> list[Any]:
    return collect(make(Broken(()), **arguments))


def indices_of(batches: list[Any]) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


def without_bad(batches: list[Any], bad: Any = BAD) -> list[Any]:
    """Return the batches of a fault-free run without the bad samples."""
    kept = [
        torch.stack([row for row in b if int(row[0]) not in bad] or [b[0][:0]]) for b in batches
    ]
    return [batch for batch in kept if batch.numel()]


# -- skipping --------------------------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("kind", [Broken, Empty])
def test_skipped_samples_leave_all_others_in_their_place_with_their_bits(
    kind: Any, way: str
) -> None:
    loader = make(kind(), on_error="skip", **AUTO[way])
    for _ in range(2):
        epoch = loader.state_dict()["epoch"]
        everything = make(Broken(()))
        everything.set_epoch(epoch)
        assert_same(collect(loader), without_bad(collect(everything)))
    assert {one.index: one.count for one in loader.bad_samples} == dict.fromkeys(BAD, 2)


def test_under_spawn_it_is_the_same() -> None:
    loader = make(on_error="replace", num_workers=1, multiprocessing_context="spawn")
    assert_same(collect(loader), collect(make(on_error="replace")))
    assert {one.index for one in loader.bad_samples} == BAD


def test_auto_that_goes_on_with_workers_is_the_same() -> None:
    loader = make(Broken(wait_s=0.02, length=80), on_error="skip", num_workers="auto")
    assert_same(collect(loader), without_bad(collect(make(Broken((), length=80)))))
    assert loader.num_workers > 0  # control: workers were started
    assert {one.index for one in loader.bad_samples} == BAD


def test_without_on_error_the_sample_s_own_error_is_raised() -> None:
    for way in EVERY:
        with pytest.raises(ValueError, match="is truncated"):
            collect(make(**AUTO[way]))
    with pytest.raises(ValueError, match="is truncated"):
        collect(TorchDataLoader(Broken(), batch_size=4))


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_with_nothing_left_is_dropped(size: int, way: str) -> None:
    loader = make(
        Broken({4, 5, 6, 7, 9}), on_error="skip", shuffle=False, batch_size=size, **AUTO[way]
    )
    expected = [[*range(n, n + size)] for n in range(0, LENGTH, size)]
    left = [[i for i in batch if i not in (4, 5, 6, 7, 9)] for batch in expected]
    assert indices_of(collect(loader)) == [batch for batch in left if batch]
    assert len(loader.bad_samples) == 5


@pytest.mark.parametrize("way", EVERY)
def test_without_batches_a_bad_sample_is_dropped(way: str) -> None:
    loader = make(on_error="skip", batch_size=None, **AUTO[way])
    found = torch.stack(collect(loader))
    assert_same(found, torch.cat(without_bad(quiet())))


@pytest.mark.parametrize("way", EVERY)
def test_a_collate_fn_gets_the_shorter_list(way: str) -> None:
    def collate(samples: list[Any]) -> tuple[int, Any]:
        return len(samples), torch.stack(samples)

    found = collect(make(on_error="skip", collate_fn=collate, **AUTO[way]))
    assert_same(found, [(len(batch), batch) for batch in without_bad(quiet())])


@pytest.mark.parametrize("way", EVERY)
def test_a_dataset_that_loads_batches_is_asked_for_one_at_a_time(way: str) -> None:
    loader = make(BrokenBatches(), on_error="skip", **AUTO[way])
    found = collect(loader)
    assert indices_of(found) == indices_of(without_bad(quiet()))
    assert {one.index for one in loader.bad_samples} == BAD


def test_out_of_order_nothing_is_lost() -> None:
    loader = make(on_error="skip", num_workers=3, in_order=False)
    found = sorted(indices_of(collect(loader)))
    assert found == sorted(indices_of(without_bad(quiet())))


def test_with_randomness_of_the_worker_samples_stay_in_their_place() -> None:
    loader = make(on_error="skip", num_workers=2, randomness="worker")
    assert indices_of(collect(loader)) == indices_of(without_bad(quiet()))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rest_is_dropped_by_its_own_length_and_not_by_what_is_left(num_workers: int) -> None:
    loader = make(
        Broken({0, 1, 30}, length=34),
        on_error="skip",
        shuffle=False,
        batch_size=8,
        drop_last=True,
        num_workers=num_workers,
    )
    assert [len(batch) for batch in loader] == [6, 8, 8, 7]


@pytest.mark.parametrize("way", ["inline", "thread", "forkserver"])
@pytest.mark.parametrize(
    "error", [StopIteration, KeyError, Unspeakable, AssertionError, MemoryError]
)
def test_whatever_a_sample_raises_it_is_left_out(error: Any, way: str) -> None:
    dataset = Broken({5})
    dataset.error = lambda index: error()
    loader = make(dataset, on_error="skip", **WAYS[way])
    assert_same(collect(loader), without_bad(quiet(), {5}))
    name = error.__name__
    expected = f"RuntimeError: dataset[i] raised {name}" if error is StopIteration else name
    assert loader.bad_samples[0].error.startswith(expected)


def test_ctrl_c_in_a_sample_is_not_swallowed() -> None:
    dataset = Broken({5})
    dataset.error = lambda index: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        collect(make(dataset, on_error="skip"))


# -- None ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY)
def test_none_is_handed_to_a_collate_fn_of_the_user_s(way: str) -> None:
    def collate(samples: list[Any]) -> Any:
        return [sample is None for sample in samples]

    loader = make(Empty({1}), on_error="skip", shuffle=False, collate_fn=collate, **AUTO[way])
    assert collect(loader)[0] == [False, True, False, False]
    assert loader.bad_samples == []


@pytest.mark.parametrize("way", EVERY)
def test_without_batches_none_is_what_the_user_asked_for(way: str) -> None:
    loader = make(Empty({1}), on_error="skip", shuffle=False, batch_size=None, **AUTO[way])
    assert [batch is None for batch in loader][:3] == [False, True, False]


# -- replacing -------------------------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("kind", [Broken, Empty])
def test_substitutes_are_the_same_however_they_are_loaded(kind: Any, way: str) -> None:
    loader = make(kind(), on_error="replace", **AUTO[way])
    first, second = collect(loader), collect(loader)
    inline = make(on_error="replace")
    assert_same([first, second], [collect(inline), collect(inline)])
    for batch, full in zip(first, quiet(), strict=True):
        for row, (ours, theirs) in enumerate(zip(batch, full, strict=True)):
            if int(theirs[0]) in BAD:
                assert int(ours[0]) not in BAD, row
            else:
                assert_same(ours, theirs)


def test_substitutes_follow_seed_and_epoch() -> None:
    def substitute(seed: int, epoch: int) -> int:
        loader = make(Broken({7}), on_error="replace", seed=seed, shuffle=False)
        loader.set_epoch(epoch)
        return int(collect(loader)[1][3][0])

    assert substitute(3, 1) == substitute(3, 1)
    assert len({substitute(seed, epoch) for seed in (3, 4, 5) for epoch in range(6)}) > 8


@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_a_sampler_of_the_user_s_gets_substitutes_from_the_same_batch_only(
    num_workers: int,
) -> None:
    split = [1, 2, 3, 5, 21, 22, 23, 24, 31, 32, 39, 38]
    arguments: dict[str, Any] = {"sampler": split, "shuffle": None, "seed": None}
    torch.manual_seed(7)
    found = indices_of(collect(make(on_error="replace", num_workers=num_workers, **arguments)))
    for batch, asked in zip(found, [split[0:4], split[4:8], split[8:12]], strict=True):
        good = [index for index in asked if index not in BAD]
        for ours, theirs in zip(batch, asked, strict=True):
            assert ours == theirs if theirs not in BAD else ours in good
    torch.manual_seed(7)
    assert found == indices_of(collect(make(on_error="replace", **arguments)))


@pytest.mark.parametrize("way", EVERY)
def test_where_nothing_can_stand_in_the_error_says_so(way: str) -> None:
    with pytest.raises(NoSubstitute) as info:
        collect(make(Broken(range(LENGTH)), on_error="replace", **AUTO[way]))
    assert isinstance(info.value, RuntimeError)
    assert info.value.sample_index in range(LENGTH)  # type: ignore[attr-defined]


def test_a_substitute_that_is_bad_too_gives_way_to_the_next() -> None:
    half = range(0, LENGTH, 2)
    loader = make(Broken(half), on_error="replace")
    found = torch.cat(collect(loader))[:, 0]
    assert len(found) == LENGTH
    assert all(int(index) % 2 for index in found)
    assert {one.index for one in loader.bad_samples} <= set(half)


# -- callables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*EVERY, "fork"])
def test_a_function_gives_a_sample_or_leaves_it_out(way: str) -> None:
    def decide(index: int, error: Exception) -> Any:
        assert str(error) == f"{index} is truncated"
        return None if index < 20 else torch.full((4,), -index)

    loader = make(on_error=decide, shuffle=False, **AUTO[way])
    left = [[i for i in range(n, n + 4) if i not in BAD or i >= 20] for n in range(0, LENGTH, 4)]
    expected = [[-i if i in BAD else i for i in batch] for batch in left]
    assert indices_of(collect(loader)) == expected
    ends = {one.index: one.end for one in loader.bad_samples}
    assert ends == {index: "skip" if index < 20 else "replace" for index in BAD}


@pytest.mark.parametrize("way", EVERY)
def test_a_function_that_raises_is_raised_in_the_batch_s_place(way: str) -> None:
    def refuse(index: int, error: Exception) -> Any:
        raise LookupError(f"no substitute for {index}") from error

    iterator = iter(make(Broken({13}), on_error=refuse, shuffle=False, **AUTO[way]))
    assert indices_of([next(iterator) for _ in range(3)])[2] == [8, 9, 10, 11]
    with pytest.raises(LookupError, match="no substitute for 13"):
        next(iterator)
    assert next(iterator)[:, 0].tolist() == [16, 17, 18, 19]  # continues, as after any sample error


@pytest.mark.parametrize("way", EVERY)
def test_a_function_that_returns_another_shape_is_an_error_that_says_so(way: str) -> None:
    def wrong(index: int, error: Exception) -> Any:
        return torch.zeros(7)

    with pytest.raises(MismatchedSamples):
        collect(make(on_error=wrong, **AUTO[way]))


def test_a_function_that_blocks_ends_at_the_limit() -> None:
    def block(index: int, error: Exception) -> Any:
        time.sleep(3600)

    with pytest.raises(SampleTimeout, match="in block"):
        collect(make(Broken({13}), on_error=block, num_workers=2, sample_timeout_s=0.8))


def test_a_function_that_is_neither_word_nor_callable_is_refused() -> None:
    for wrong in ("ignore", None, 3):
        with pytest.raises(BadArgument, match="on_error"):
            make(on_error=wrong)


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_samples_that_do_not_stack_are_an_error_still(way: str) -> None:
    class Ragged(Broken):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(1 + index % 2)

    with pytest.raises(MismatchedSamples):
        collect(make(Ragged(), on_error="skip", **WAYS[way]))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_errors_of_a_collate_fn_are_not_a_sample_s(way: str) -> None:
    def collate(samples: list[Any]) -> Any:
        raise LookupError("of the collate_fn")

    loader = make(Broken(()), on_error="skip", collate_fn=collate, **WAYS[way])
    with pytest.raises(LookupError, match="of the collate_fn"):
        collect(loader)
    assert loader.bad_samples == []


def test_errors_of_worker_init_fn_are_not_a_sample_s() -> None:
    def init(number: int) -> None:
        raise LookupError("of the init")

    with pytest.raises(LookupError, match="of the init"):
        collect(make(Broken(()), on_error="skip", worker_init_fn=init, num_workers=1))


# -- budgets ---------------------------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_budget_that_is_kept_is_kept_in_each_epoch(on_error: str, way: str) -> None:
    loader = make(Broken({3, 17}), on_error=on_error, max_bad=4, **AUTO[way])
    for _ in range(3):
        assert len(collect(loader)) == 10
    assert {one.count for one in loader.bad_samples} == {3}


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("max_bad", [3, 0.1, 0.099999, 0])
def test_a_budget_that_is_spent_ends_the_epoch_with_the_last_ones(max_bad: Any, way: str) -> None:
    loader = make(on_error="skip", max_bad=max_bad, **AUTO[way])
    with pytest.raises(TooManyBad, match=f"max_bad={max_bad}") as info:
        collect(loader)
    facts: Any = info.value
    allowed = int(max_bad * LENGTH) if isinstance(max_bad, float) else max_bad
    assert facts.num_bad == allowed + 1
    assert f"allows {allowed}" in str(facts)
    assert isinstance(facts, RuntimeError)
    last = facts.bad_samples[-1]
    assert last.error in str(facts)
    assert str(facts.__cause__) == f"sample {last.index}: {last.error}"


@pytest.mark.parametrize("way", EVERY)
def test_an_epoch_of_which_nothing_is_left_is_an_error_without_a_budget_too(way: str) -> None:
    with pytest.raises(TooManyBad, match="all samples of epoch 0"):
        collect(make(Broken(range(LENGTH)), on_error="skip", **AUTO[way]))


@pytest.mark.parametrize("way", EVERY)
def test_substitutes_do_not_depend_on_workers_with_randomness_by_worker(way: str) -> None:
    class Indices(Broken):
        def __getitem__(self, index: int) -> int:
            super().__getitem__(index)
            return index

    def substitutes(**arguments: Any) -> list[Any]:
        loader = make(Indices(), on_error="replace", randomness="worker", **arguments)
        return [batch.tolist() for batch in loader]

    assert substitutes(**AUTO[way]) == substitutes(num_workers=0)
    assert substitutes(**AUTO[way]) != substitutes(num_workers=0, seed=4)  # control


@pytest.mark.parametrize("way", EVERY)
def test_an_epoch_without_samples_raises_once_and_then_ends(way: str) -> None:
    batches = iter(make(Broken(range(LENGTH)), on_error="skip", **AUTO[way]))
    with pytest.raises(TooManyBad, match="all samples of epoch 0"):
        next(batches)
    assert list(batches) == []


def raise_for_even(index: int, error: Exception) -> None:
    if index % 2 == 0:
        raise error


@pytest.mark.parametrize("way", EVERY)
def test_an_error_that_was_raised_is_not_followed_by_one_about_the_whole_epoch(way: str) -> None:
    dataset = Broken(range(LENGTH))
    batches = iter(make(dataset, on_error=raise_for_even, batch_size=LENGTH, **AUTO[way]))
    with pytest.raises(ValueError, match="truncated"):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize("max_bad", [-1, 1.0, 2.5, -0.1, True, "3", float("nan")])
def test_a_budget_that_is_none_is_refused(max_bad: Any) -> None:
    with pytest.raises(BadArgument, match="max_bad"):
        make(on_error="skip", max_bad=max_bad)


# -- the list and the file -------------------------------------------------------------------------


@pytest.mark.parametrize("way", EVERY)
def test_every_bad_sample_is_listed_with_its_path_and_what_was_done(way: str) -> None:
    dataset: Any = Broken()
    dataset.files = [f"images/{index}.jpg" for index in range(LENGTH)]
    loader = make(dataset, on_error="skip", **AUTO[way])
    order = [int(index) for batch in quiet() for index in batch[:, 0]]
    collect(loader)
    assert [one.index for one in loader.bad_samples] == [i for i in order if i in BAD]
    for one in loader.bad_samples:
        assert one.path == f"images/{one.index}.jpg"
        assert one.error == f"ValueError: {one.index} is truncated"
        assert (one.count, one.epoch, one.end) == (1, 0, "skip")
        assert order[one.position] == one.index


@pytest.mark.parametrize("way", EVERY)
def test_the_path_in_the_error_is_listed(way: str) -> None:
    dataset = Broken({5})
    dataset.error = lambda index: FileNotFoundError(2, "No such file", f"/data/{index}.png")
    loader = make(dataset, on_error="replace", **AUTO[way])
    collect(loader)
    assert loader.bad_samples[0].path == "/data/5.png"


@pytest.mark.parametrize("way", EVERY)
def test_the_file_has_a_line_for_each_time(way: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    loader = make(on_error="skip", bad_samples_file=path, **AUTO[way])
    collect(loader), collect(loader)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 * len(BAD)
    assert {(line["index"], line["count"]) for line in lines} == {
        (index, count) for index in BAD for count in (1, 2)
    }
    found = read(path)
    assert (found.num_unreadable, {one.index for one in found.samples}) == (0, BAD)
    assert {one.count for one in found.samples} == {2}


def test_a_file_that_cannot_be_written_costs_the_file_and_not_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    loader = make(on_error="skip", bad_samples_file=tmp_path / "missing" / "bad.jsonl")
    assert_same(collect(loader), without_bad(quiet()))
    assert len(loader.bad_samples) == len(BAD)
    assert sum("stopped writing" in text for text in caplog.messages) == 1


def test_only_the_first_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    collect(make(on_error="skip"))
    assert len(caplog.messages) == 5
    assert "loader.bad_samples" in caplog.messages[-1]


# -- resuming --------------------------------------------------------------------------------------


@legacy
@pytest.mark.parametrize("way", ["inline", "forkserver"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("size", [1, 4])
def test_an_epoch_with_bad_samples_is_resumed_anywhere(size: int, on_error: str, way: str) -> None:
    def new(**arguments: Any) -> Any:
        return make(on_error=on_error, batch_size=size, **arguments)

    whole = collect(new())
    for num_taken in (0, 1, len(whole) // 2, len(whole) - 1):
        loader = new(**AUTO[way])
        iterator = iter(loader)
        found = [next(iterator).clone() for _ in range(num_taken)]
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        other = new()
        other.load_state_dict(state)
        assert other.state_dict().get("bad") == state.get("bad")
        assert_same(found + collect(other), whole)


def test_the_state_has_the_positions_and_the_budget_counts_on(tmp_path: Path) -> None:
    order = [int(index) for batch in quiet() for index in batch[:, 0]]
    where = [place for place, index in enumerate(order) if index in BAD]
    loader = make(on_error="skip", max_bad=len(BAD) - 1)
    iterator = iter(loader)
    while len(loader.bad_samples) < len(BAD) - 1:
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["bad"] == {"positions": where[:-1]}
    other = make(on_error="skip", max_bad=len(BAD) - 1)
    other.load_state_dict(state)
    with pytest.raises(TooManyBad) as info:
        collect(other)
    assert info.value.num_bad == len(BAD)  # type: ignore[attr-defined]
    fresh = make(on_error="skip", max_bad=len(BAD) - 1)
    fresh.load_state_dict({**state, "bad": None})
    collect(fresh)  # control: without the recorded positions the budget suffices


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_resumed_before_a_bad_rest_is_over_and_not_an_error(num_workers: int) -> None:
    def new() -> Any:
        return make(
            Broken({3, *range(32, 40)}), on_error="skip", shuffle=False, num_workers=num_workers
        )

    iterator = iter(loader := new())
    for _ in range(8):
        next(iterator)
    state = loader.state_dict()
    del iterator
    other = new()
    other.load_state_dict(state)
    assert collect(other) == []
    assert sum(len(batch) for batch in other) == 31  # the next epoch is complete


# -- streams ---------------------------------------------------------------------------------------


class BrokenStream(IterableDataset):
    """Numbers from 0. Those in ``bad`` raise, and the stream continues after them."""

    def __init__(self, bad: Any = (3, 4, 11), length: int = 24) -> None:
        self.bad, self.length = frozenset(bad), length

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return Numbers(range(first, self.length, step), self.bad)


class Numbers:
    def __init__(self, numbers: range, bad: frozenset[int]) -> None:
        self.numbers, self.bad = iter(numbers), bad

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Any:
        number = next(self.numbers)
        if number in self.bad:
            raise OSError(f"shard {number}")
        return torch.tensor([number])


STREAM_WAYS = ["inline", "thread", "forkserver"]


@pytest.mark.parametrize("way", STREAM_WAYS)
def test_bad_samples_of_a_stream_are_left_out(way: str) -> None:
    loader = DataLoader(BrokenStream(), batch_size=3, on_error="skip", **WAYS[way])
    found = torch.cat(collect(loader)).flatten().tolist()
    assert sorted(found) == [n for n in range(24) if n not in (3, 4, 11)]
    assert [bad.count for bad in loader.bad_samples] == [1, 1, 1]  # distinguished by position


@pytest.mark.parametrize("way", STREAM_WAYS)
def test_bad_samples_of_a_stream_are_replaced_by_those_that_follow(way: str) -> None:
    loader = DataLoader(BrokenStream(), batch_size=3, on_error="replace", **WAYS[way])
    batches = collect(loader)
    assert sorted(torch.cat(batches).flatten().tolist()) == [
        n for n in range(24) if n not in (3, 4, 11)
    ]
    assert {len(batch) for batch in batches[:-2]} == {3}


@pytest.mark.parametrize("way", STREAM_WAYS)
def test_a_function_decides_about_a_stream_s_samples_too(way: str) -> None:
    loader = DataLoader(
        BrokenStream(), batch_size=3, on_error=lambda index, error: torch.tensor([-1]), **WAYS[way]
    )
    assert torch.cat(collect(loader)).flatten().tolist().count(-1) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_none_in_a_stream_is_left_out(num_workers: int) -> None:
    class Holes(IterableDataset):
        def __iter__(self) -> Any:
            yield from (torch.tensor(1), None, torch.tensor(2), None)

    loader = DataLoader(Holes(), batch_size=2, on_error="skip", num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[1], [2]]


@pytest.mark.parametrize("way", STREAM_WAYS)
def test_a_generator_that_raised_has_ended_and_that_is_an_error(way: str) -> None:
    class Raises(IterableDataset):
        def __iter__(self) -> Any:
            yield torch.tensor(1)
            raise OSError("the rest would be lost silently")

    with pytest.raises(OSError, match="lost silently"):
        collect(DataLoader(Raises(), batch_size=2, on_error="skip", **WAYS[way]))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_stream_that_raises_for_ever_ends(on_error: str, way: str) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise OSError("gone")

    loader = DataLoader(Endless(), batch_size=2, on_error=on_error, **WAYS[way])
    with pytest.raises((OSError, TooManyBad)):
        collect(loader)
    assert sum(one.count for one in loader.bad_samples) <= 3 * MAX_IN_A_ROW


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_s_budget_is_judged_from_a_hundred_samples_on(num_workers: int) -> None:
    few = DataLoader(
        BrokenStream(bad=(0, 1), length=60),
        batch_size=3,
        on_error="skip",
        max_bad=0.05,
        num_workers=num_workers,
    )
    assert len(torch.cat(collect(few))) == 58
    many = BrokenStream(bad=range(0, 400, 4), length=400)
    with pytest.raises(TooManyBad):
        collect(DataLoader(many, batch_size=3, on_error="skip", max_bad=0.1))


def test_bad_samples_are_told_apart_from_good_ones() -> None:
    """Control: the comparison above does detect a sample that moved."""
    assert differences(without_bad(quiet()), quiet())
    assert differences(without_bad(quiet(seed=4)), without_bad(quiet()))


@pytest.mark.parametrize("way", EVERY)
def test_a_path_is_not_taken_from_the_error_of_another_sample(way: str) -> None:
    dataset = Broken({4, 5, 6})
    dataset.error = lambda index: (
        FileNotFoundError(2, "No such file", "/data/4.png") if index == 4 else ValueError()
    )
    loader = make(dataset, on_error="skip", shuffle=False, **AUTO[way])
    collect(loader)
    assert [one.path for one in loader.bad_samples] == ["/data/4.png", None, None]


def test_processes_that_append_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    code = (
        "import sys\nfrom penstock.engine.loading.bad_sample_file import append\n"
        "for n in range(200):\n"
        "    append(sys.argv[1], {'index': sys.argv[2] + str(n), 'error': 'x' * 900})\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    programs = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in "abc"]
    assert [program.wait() for program in programs] == [0, 0, 0]
    found = read(file)
    assert (len(found.samples), found.num_unreadable) == (600, 0)
