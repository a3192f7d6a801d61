"""The same bits for any number of workers, for code that draws from the global generators."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset

from penstock import DataLoader
from support.datasets import WAYS, Draws, Numbers, Samples, assert_same, collect, differences, draw

legacy = pytest.mark.legacy


def epoch(
    seed: int = 0, kind: Any = DataLoader, dataset: Any = None, **arguments: Any
) -> list[Any]:
    torch.manual_seed(seed)
    arguments = {"batch_size": 5, "shuffle": True, **arguments}
    return collect(kind(Draws() if dataset is None else dataset, **arguments))


def by_sample(batches: list[Any]) -> dict[int, Any]:
    """Return the numbers drawn by each sample, regardless of its batch."""
    return {
        int(index): [field[place].tolist() for field in batch[1:]]
        for batch in batches
        for place, index in enumerate(batch[0])
    }


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "4 workers": {"num_workers": 4},
    "2 threads": {"num_workers": 2, "pool": "thread"},
    "2 forked workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "little prefetch": {"num_workers": 2, "prefetch_factor": 1},
    "much prefetch": {"num_workers": 3, "prefetch_factor": 20},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@legacy
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_an_epoch_has_the_same_bits_as_without_workers(name: str) -> None:
    assert_same(epoch(**OTHER_WAYS[name]), epoch(num_workers=0))


def test_an_epoch_has_the_same_bits_under_spawn() -> None:
    assert_same(epoch(**WAYS["spawn"]), epoch(num_workers=0))


def test_torch_s_own_loader_fails_this_test() -> None:
    # Python 3.14 would start its own fork server, which stays.
    fork = {"kind": TorchDataLoader, "multiprocessing_context": "fork"}
    epochs = [epoch(kind=TorchDataLoader), *(epoch(num_workers=n, **fork) for n in (1, 2))]
    for one, other in ((0, 1), (1, 2)):
        assert differences(epochs[one], epochs[other])
        assert by_sample(epochs[one]).keys() == by_sample(epochs[other]).keys()


def test_the_worker_s_own_randomness_fails_this_test_too() -> None:
    one, two = (epoch(num_workers=n, randomness="worker") for n in (1, 2))
    assert differences(one, two)


@legacy
def test_the_worker_s_own_randomness_is_torch_s_to_the_bit() -> None:
    arguments = {"num_workers": 2, "multiprocessing_context": "fork"}
    theirs = epoch(kind=TorchDataLoader, **arguments)
    assert_same(epoch(randomness="worker", **arguments), theirs)
    assert_same(epoch(randomness="worker", num_workers=2), theirs)


@legacy
def test_another_seed_gives_other_numbers() -> None:
    assert differences(epoch(seed=0, num_workers=2), epoch(seed=1, num_workers=2))


def test_the_samples_of_one_epoch_draw_different_numbers() -> None:
    drawn = by_sample(epoch(num_workers=2))
    assert len({values[0] for values in drawn.values()}) == len(drawn)


@legacy
@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True}], ids=["new", "persistent"])
def test_the_next_epoch_draws_other_numbers_and_those_are_the_same_for_any_number_of_workers(
    arguments: dict[str, Any],
) -> None:
    epochs = {}
    for num_workers in (1, 3):
        torch.manual_seed(0)
        loader = DataLoader(Draws(), batch_size=5, num_workers=num_workers, **arguments)
        epochs[num_workers] = [collect(loader) for _ in range(3)]
        loader.close()
    assert_same(epochs[1], epochs[3])
    drawn = [by_sample(batches)[0] for batches in epochs[1]]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@legacy
def test_the_batch_size_does_not_change_what_a_sample_draws() -> None:
    assert by_sample(epoch(batch_size=5, num_workers=2)) == by_sample(epoch(batch_size=8))


def test_what_a_sample_draws_follows_its_position_and_not_its_index() -> None:
    torch.manual_seed(0)
    one = collect(DataLoader(Draws(), batch_size=4, sampler=[0, 3, 6, 9], num_workers=2))
    torch.manual_seed(0)
    other = collect(DataLoader(Draws(), batch_size=4, sampler=[9, 6, 3, 0]))
    assert one[0][1][0] == other[0][1][0]  # 0 and 9 draw alike: neither draws extra numbers first


def test_a_batch_that_is_split_over_workers_has_the_same_bits() -> None:
    slow = Samples(_slow_draw, 16)
    assert_same(epoch(dataset=slow, batch_size=8, num_workers=4), epoch(dataset=slow, batch_size=8))


def _slow_draw(index: int) -> Any:
    import time

    time.sleep(0.02)  # makes a batch of 8 slow enough to be split
    return draw(index)


def late(draw_one: Any) -> Samples:
    """Samples that start to draw at index 44, when no draw is expected any more."""
    return Samples(lambda i: float(draw_one()) if i >= 44 else 0.0, 60)


LATE_DRAWS = {
    "random": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(),
    "numpy's normal": lambda: np.random.randn(),
    "random, held as an attribute": random.random,
    "numpy, held as an attribute": np.random.randn,
    "torch": lambda: torch.rand(1),
    "torch's normal": lambda: torch.randn(1, dtype=torch.float64),
    "torch's seed": lambda: torch.initial_seed() % 100_003,
}


@legacy
@pytest.mark.parametrize("name", LATE_DRAWS)
def test_a_dataset_that_begins_to_draw_late_has_the_same_bits_in_a_loop_that_draws_itself(
    name: str,
) -> None:
    def drawn(num_workers: int, noise: int) -> list[Any]:
        torch.manual_seed(0)
        found = []
        for batch in DataLoader(late(LATE_DRAWS[name]), batch_size=4, num_workers=num_workers):
            found.append(batch.tolist())
            for _ in range(noise):  # an odd number of normals leaves one cached
                random.gauss(0, 1)
                np.random.randn()
        return found

    alone = drawn(2, 0)
    assert len({value for batch in alone for value in batch}) == 17  # control: 16 late samples
    for num_workers in (0, 1, 2):
        assert drawn(num_workers, 1) == alone


@pytest.mark.parametrize("draw_one", ["gauss", "numpy's normal"])
def test_a_collate_fn_that_draws_normals_leaves_none_for_the_next_sample(draw_one: str) -> None:
    def collate(samples: list[float]) -> list[float]:
        return [*samples, random.gauss(0, 1), np.random.randn()]  # each leaves one cached

    def drawn(**arguments: Any) -> list[Any]:
        torch.manual_seed(0)
        dataset = late(LATE_DRAWS[draw_one])
        return list(DataLoader(dataset, batch_size=4, collate_fn=collate, **arguments))

    alone = drawn()
    assert len({value for batch in alone[11:] for value in batch}) == 24  # control: all differ
    for arguments in ({"num_workers": 1}, {"num_workers": 2}, WAYS["thread"]):
        assert drawn(**arguments) == alone


def test_a_thread_whose_samples_draw_nothing_leaves_those_of_others_alone() -> None:
    def collate(samples: list[float]) -> list[float]:
        return [*samples, random.gauss(0, 1), np.random.randn()]

    def slowly(index: int) -> float:
        if index < 80 or index // 4 % 4:
            return 0.0
        time.sleep(0.005)  # the other threads start their next batches
        return random.random() + float(np.random.rand())

    def drawn(**arguments: Any) -> list[Any]:
        torch.manual_seed(0)
        dataset = Samples(slowly, 240)
        return list(DataLoader(dataset, batch_size=4, collate_fn=collate, **arguments))

    alone = drawn()
    assert len({value for batch in alone for value in batch[:4]}) == 41  # control: 40 draw
    assert drawn(num_workers=4, pool="thread") == alone


@pytest.mark.parametrize("draw_one", ["gauss", "numpy's normal"])
def test_a_normal_that_somebody_left_in_reserve_is_no_sample_s(draw_one: str) -> None:
    """A draw takes the cached normal and leaves no other trace."""

    def drawn(**arguments: Any) -> list[Any]:
        torch.manual_seed(0)
        random.gauss(0, 1)
        np.random.randn()
        draw = LATE_DRAWS[draw_one]
        dataset = Samples(lambda i: float(draw()) if i >= 200 and i % 20 == 0 else 0.0, 400)
        return [batch.item() for batch in DataLoader(dataset, **arguments)]

    alone = drawn()
    assert len(set(alone)) == 11  # control: 10 draw
    assert drawn(num_workers=3, pool="thread") == alone


def test_threads_whose_collate_fn_draws_leave_the_caller_s_generators_alone() -> None:
    def collate(samples: list[float]) -> list[float]:
        return [*samples, random.gauss(0, 1), np.random.randn()]

    random.seed(1)
    np.random.seed(1)
    expected = random.getstate(), np.random.get_state()[1].tolist()
    dataset = Samples(lambda i: 0.0, 160)
    list(DataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=2, pool="thread"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_caller_s_own_draws_are_not_disturbed_by_the_loader(num_workers: int) -> None:
    def own(dataset: Any) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return [
            (random.gauss(0, 1), np.random.randn(), torch.rand(1).item())
            for _ in DataLoader(dataset, batch_size=4, num_workers=num_workers)
        ]

    silent = own(Samples(lambda i: 0.0, 60))
    assert own(late(LATE_DRAWS["random"])) == silent
    assert own(late(LATE_DRAWS["numpy's normal"])) == silent
    assert own(Draws(60)) == silent


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_subset_has_the_same_bits_as_without_workers(num_workers: int) -> None:
    subset = Subset(Draws(), list(range(3, 20)))
    assert_same(epoch(dataset=subset, num_workers=num_workers), epoch(dataset=subset))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_samples_without_batches_have_the_same_bits(num_workers: int) -> None:
    arguments = {"batch_size": None, "shuffle": False}
    assert_same(epoch(num_workers=num_workers, **arguments), epoch(**arguments))


def test_a_collate_fn_that_draws_gets_the_same_numbers_from_any_worker() -> None:
    def collate(samples: list[Any]) -> Any:
        return [random.random(), np.random.rand(), torch.rand(2), samples]

    assert_same(epoch(num_workers=2, collate_fn=collate), epoch(num_workers=1, collate_fn=collate))


def test_a_worker_init_fn_that_seeds_torch_is_obeyed_and_the_user_is_told() -> None:
    def init(worker: int) -> None:
        torch.manual_seed(100 + worker)

    loader = DataLoader(Draws(8), batch_size=4, num_workers=1, worker_init_fn=init)
    with pytest.warns(UserWarning, match="worker_init_fn"):
        batches = collect(loader)
    torch.manual_seed(100)
    assert torch.equal(batches[0][4][0], torch.rand(2))


def test_a_worker_init_fn_that_seeds_nothing_is_not_warned_about() -> None:
    loader = DataLoader(Numbers(8), batch_size=4, num_workers=1, worker_init_fn=lambda worker: None)
    assert len(collect(loader)) == 2  # warnings are errors here


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return (draw(index) for index in range(6))


@pytest.mark.parametrize("kind", ["an iterable dataset", "randomness='worker'"])
def test_with_a_seed_workers_draw_anew_in_each_epoch_and_the_same_again(kind: str) -> None:
    dataset = Stream() if kind == "an iterable dataset" else Draws(6)

    def epochs() -> list[Any]:
        loader = DataLoader(dataset, batch_size=6, num_workers=1, seed=3, randomness="worker")
        return [batch for _ in range(3) for batch in collect(loader)]

    first = epochs()
    assert len({tuple(batch[1].tolist()) for batch in first}) == 3
    assert_same(epochs(), first)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_the_largest_and_the_smallest_seed_do_with_any_number_of_workers(seed: int) -> None:
    one, two = (collect(DataLoader(Draws(6), seed=seed, num_workers=n)) for n in (0, 2))
    assert_same(two, one)
