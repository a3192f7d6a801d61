"""An iterable dataset with a state resumes at the exact next sample, on the same workers."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock import DataLoader
from penstock.errors import BadState

pytestmark = pytest.mark.legacy

LENGTH = 41
"""Leaves a last batch that is not full, on each worker."""


class Numbered(IterableDataset):
    """Yields its worker's numbers. Its state returns to the start when an epoch has ended."""

    def __init__(self, length: int = LENGTH, mortal: Path | None = None) -> None:
        self.length = length
        self.mortal = mortal
        self.place = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        own = range(first, self.length, step)
        while self.place < len(own):
            number = own[self.place]
            self._die_once_at(number)
            self.place += 1
            yield number
        self.place = 0

    def _die_once_at(self, number: int) -> None:
        if self.mortal is not None and number % 10 == 7:
            mark = self.mortal / str(number)
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def take(batches: Any, count: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(count)]


def saved(loader: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def check_interruptions(make: Callable[[], Any], points: list[int]) -> None:
    """Stop at each point and resume in a new loader. Nothing is lost, doubled or moved."""
    whole = numbers(make())
    assert sorted(flat(whole)) == list(range(LENGTH))
    for point in points:
        loader = make()
        batches = iter(loader)
        before = take(batches, point)
        state = saved(loader)
        del batches
        loader.close()
        later = make()
        later.load_state_dict(state)
        assert before + numbers(later) == whole
        later.close()


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 4])
def test_a_stream_resumes_at_the_next_sample_wherever_it_was_interrupted(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbered(), batch_size=3, num_workers=num_workers)

    num_batches = len(numbers(make()))
    some = random.Random(num_workers).sample(range(num_batches), 3)
    check_interruptions(make, [0, num_batches - 1, num_batches, *some])


def test_a_resumed_stream_can_be_interrupted_again() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbered(), batch_size=2, num_workers=3)

    whole, state = numbers(make()), None
    found: list[list[int]] = []
    for _ in range(6):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        found += take(iter(loader), 3)
        state = saved(loader)
        loader.close()
    assert found == whole[:18]


def test_control_the_end_of_a_worker_is_not_in_the_state_of_its_dataset() -> None:
    loader = DataLoader(Numbered(4), batch_size=3, num_workers=2)
    batches = iter(loader)
    take(batches, 2)  # both batches are the last of their worker, and not full
    state = saved(loader)
    assert state["dataset"]["ended"] == [0, 1]
    del batches
    later = DataLoader(Numbered(4), batch_size=3, num_workers=2)
    later.load_state_dict(state)
    assert numbers(later) == []
    del state["dataset"]["ended"]
    later.load_state_dict(state)
    assert numbers(later) == [[0, 2], [1, 3]]  # doubled


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_epoch_after_a_resumed_one_is_whole(num_workers: int) -> None:
    loader = DataLoader(
        Numbered(), batch_size=3, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    whole = numbers(loader)
    batches = iter(loader)
    take(batches, 4)
    state = saved(loader)
    list(batches)
    later = DataLoader(
        Numbered(), batch_size=3, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    later.load_state_dict(state)
    assert numbers(later) == whole[4:]
    assert numbers(later) == whole
    later.load_state_dict(state)  # into workers that are running
    assert numbers(later) == whole[4:]
    batches = iter(later)
    take(batches, 1)
    later.load_state_dict(state)  # in the middle of an epoch
    assert numbers(later) == whole[4:]
    loader.close()
    later.close()


def test_a_stream_without_a_state_is_replayed_by_running_workers_too() -> None:
    class Stateless(Numbered):
        state_dict = None  # type: ignore[assignment]

        def __iter__(self) -> Any:
            self.place = 0
            return super().__iter__()

    loader = DataLoader(Stateless(), batch_size=3, num_workers=2, persistent_workers=True)
    whole = numbers(loader)
    batches = iter(loader)
    take(batches, 5)
    state = saved(loader)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="5 batches are loaded again and dropped"):
        assert numbers(loader) == whole[5:]
    loader.close()


@pytest.mark.fault
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_killed_do_not_move_a_resumed_stream(
    tmp_path: Path, persistent: bool
) -> None:
    def make(mortal: Path | None) -> DataLoader[Any]:
        return DataLoader(
            Numbered(mortal=mortal), batch_size=3, num_workers=2, persistent_workers=persistent
        )

    whole = numbers(make(None))
    for point in (0, 3, 8):
        deaths = tmp_path / str(point)
        deaths.mkdir()
        loader = make(None)
        batches = iter(loader)
        before = take(batches, point)
        state = saved(loader)
        del batches
        loader.close()
        later = make(deaths)
        later.load_state_dict(state)
        assert before + numbers(later) == whole
        assert later.num_restarts == len(list(deaths.iterdir())) > 0
        assert numbers(later) == whole
        later.close()


def test_a_different_number_of_workers_is_refused_with_the_reason() -> None:
    loader = DataLoader(Numbered(), batch_size=3, num_workers=2)
    batches = iter(loader)
    take(batches, 2)
    state = saved(loader)
    del batches
    other = DataLoader(Numbered(), batch_size=3, num_workers=4)
    with pytest.raises(BadState, match=r"divided among its workers.*2 in the state, 4 here"):
        other.load_state_dict(state)


def test_control_the_dataset_in_this_process_does_not_move_with_the_workers() -> None:
    """A checkpoint of the dataset beside torch's loader, which has no state, repeats samples."""
    dataset = Numbered()
    batches = iter(DataLoader(dataset, batch_size=3, num_workers=2))
    before = take(batches, 2)
    again = Numbered()
    again.load_state_dict(dataset.state_dict())
    del batches
    after = numbers(torch.utils.data.DataLoader(again, batch_size=3))
    found = flat([*before, *after])
    assert len(found) > len(set(found))


@pytest.mark.parametrize(
    "edited", [{"ended": 1}, {"ended": [5]}, {"ended": ["0"]}, {"ended": [True]}]
)
def test_the_list_of_ended_workers_cannot_be_edited(edited: Any) -> None:
    loader = DataLoader(Numbered(), batch_size=3)
    next(iter(loader))
    state = saved(loader)
    state["dataset"].update(edited)
    with pytest.raises(BadState, match="the state's dataset is"):
        DataLoader(Numbered(), batch_size=3).load_state_dict(state)


class Unfinished(IterableDataset):
    """Has the methods of a state, but they only raise."""

    def __iter__(self) -> Any:
        return iter(range(8))

    def state_dict(self) -> Any:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class Broken(Numbered):
    """Its state cannot be read."""

    def state_dict(self) -> Any:
        raise KeyError("cursor")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_state_names_the_method_and_the_error(num_workers: int) -> None:
    loader = DataLoader(Broken(), batch_size=4, num_workers=num_workers)

    def load() -> None:
        next(iter(loader))
        loader.state_dict()

    with pytest.raises(BadState, match=r"Broken.state_dict\(\) raised KeyError: ") as caught:
        load()
    assert "test_stream_resume.py, line" in str(caught.value)
    assert "mend Broken.state_dict()" in str(caught.value)
    loader.close()


class Stateless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_is_refused_by_a_stream_that_cannot_restore_it(num_workers: int) -> None:
    loader = DataLoader(Numbered(), batch_size=4, num_workers=num_workers)
    next(iter(loader))
    state = saved(loader)
    loader.close()
    other = DataLoader(Stateless(), batch_size=4, num_workers=num_workers)
    with pytest.raises(BadState, match=r"Stateless has no state_dict\(\) and load_state_dict"):
        other.load_state_dict(state)
    other.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_is_not_implemented_is_none(num_workers: int) -> None:
    loader = DataLoader(Unfinished(), batch_size=4, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()
