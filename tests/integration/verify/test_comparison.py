"""``penstock.verify`` passes equal runs and fails different ones, with the right cause."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

import penstock
from penstock import DataLoader, Verdict
from penstock.errors import BadArgument
from support.datasets import Draws, Numbers, Samples, Shards

# Each verdict starts a dozen loaders and programs, which takes minutes in total.
pytestmark = [pytest.mark.timeout(240), pytest.mark.soak]


def ours(dataset: Any = None, **fixed: Any) -> Callable[..., Any]:
    """Return a factory of Penstock loaders that takes only the number of workers, for fast runs."""

    def make_loader(num_workers: int = 0) -> Any:
        arguments = {"batch_size": 5, "shuffle": True, "seed": 1, **fixed}
        return DataLoader(
            Draws() if dataset is None else dataset, num_workers=num_workers, **arguments
        )

    return make_loader


def theirs(dataset: Any = None, **fixed: Any) -> Callable[..., Any]:
    def make_loader(num_workers: int = 0) -> Any:
        arguments = {"batch_size": 5, **fixed}
        return TorchDataLoader(
            Draws() if dataset is None else dataset, num_workers=num_workers, **arguments
        )

    return make_loader


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {row.setting: row.outcome for row in verdict.rows}


# -- equal runs ------------------------------------------------------------------------------------


def test_our_loader_is_the_same_under_every_setting() -> None:
    def make_loader(**settings: Any) -> Any:
        return DataLoader(Draws(), batch_size=5, shuffle=True, seed=1, **settings)

    verdict = penstock.verify(make_loader)
    assert verdict, str(verdict)
    assert set(outcomes(verdict).values()) == {"same"}
    assert len({row.digest for row in verdict.rows}) == 1
    names = " ".join(outcomes(verdict))
    for name in ("5 workers", "threads", "spawn", "prefetch 8", "killed", "new process", "slow"):
        assert name in names


def test_our_loader_without_a_seed_is_the_same_too() -> None:
    verdict = penstock.verify(ours(seed=None), workers=(0, 2))
    assert verdict, str(verdict)


def test_any_iterable_can_be_verified() -> None:
    verdict = penstock.verify(lambda: [[1, 2], ["a", None]])
    assert verdict
    assert outcomes(verdict)["as given, killed and resumed"] == "skipped"
    assert "does not accept num_workers" in str(verdict)


def test_a_loader_is_made_again_from_its_attributes() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = TorchDataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator)
    quick: dict[str, Any] = {"workers": (0, 2), "start_methods": (), "new_process": False}
    assert penstock.verify(loader, **quick)
    assert penstock.verify(DataLoader(Draws(), 5, seed=1, rank=1, world_size=2), **quick)
    assert not penstock.verify(TorchDataLoader(Draws(), batch_size=4), **quick)


def test_the_caller_s_generators_are_left_as_they_were() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    penstock.verify(lambda: [torch.rand(2) for _ in range(3)])
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())


# -- different runs --------------------------------------------------------------------------------


class Whole(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


class Counts(Draws):
    """Counts samples, so a sample depends on how many its worker has loaded."""

    num_loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.num_loaded += 1
        return index, self.num_loaded


class Forgetful:
    """A loader with an empty state, which starts over after a resume."""

    def __init__(self) -> None:
        self.seed = 0

    def __iter__(self) -> Any:
        return iter([torch.tensor([number]) for number in range(6)])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _worker(index: int) -> Any:
    info = get_worker_info()
    return index, -1 if info is None else info.id


def _slow_first(index: int) -> int:
    time.sleep(0.03 if index % 16 < 4 else 0.0)
    return index


GUILTY: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "torch's loader, 2 against 4": (theirs(shuffle=True), (2, 4), "worker-seeds"),
    "torch's loader, 0 against 1": (theirs(), (0, 1), "worker-seeds"),
    "worker randomness": (ours(randomness="worker"), (1, 2), "worker-seeds"),
    "the time": (ours(Samples(lambda i: (i, time.time()))), (0, 2), "time"),
    "a stopwatch": (ours(Samples(lambda i: {"t": time.perf_counter_ns()})), (0, 2), "time"),
    "id()": (ours(Samples(lambda i: (i, id(object())))), (0, 2), "address"),
    "nobody's generator": (
        ours(Samples(lambda i: np.random.default_rng().random(3))),
        (0, 2),
        "unseeded",
    ),
    "os.urandom": (ours(Samples(lambda i: os.urandom(4).hex())), (0, 2), "unseeded"),
    "a count": (
        lambda num_workers=0: TorchDataLoader(Counts(), batch_size=5, num_workers=num_workers),
        (0, 2),
        "worker-state",
    ),
    "a count that outlives the loader": (theirs(Counts()), (0, 2), "kept-state"),
    "the worker's number": (theirs(Samples(_worker)), (0, 2), "worker-state"),
    "shards by worker": (theirs(Shards()), (0, 2), "worker-order"),
    "the whole stream for each": (theirs(Whole()), (0, 3), "repeated-stream"),
    "no order": (
        ours(Samples(_slow_first, 64), shuffle=False, batch_size=4, in_order=False),
        (0, 3),
        "arrival-order",
    ),
    "the order of a set": (
        ours(Samples(lambda i: (i, list({"a", "b", "c", "d", "e", "f", "g", "h"})))),
        (0, 0),
        "hash-order",
    ),
    "a forgetful state": (Forgetful, (0,), "resume"),
}


@pytest.mark.parametrize("name", GUILTY)
def test_what_is_not_the_same_is_convicted_for_what_it_did(name: str) -> None:
    make_loader, workers, code = GUILTY[name]
    verdict = penstock.verify(
        make_loader, workers=workers, epochs=1, new_process=code == "hash-order"
    )
    assert not verdict
    assert "differs" in outcomes(verdict).values()
    difference = verdict.difference
    assert difference is not None
    assert difference.cause.code == code, str(verdict)
    assert difference.how
    assert str(difference) in str(verdict)


def test_the_difference_names_the_sample_and_the_field() -> None:
    dataset = Samples(lambda i: {"x": torch.zeros(3), "noise": {"y": np.random.rand(2)}}, 8)
    difference = penstock.verify(theirs(dataset), workers=(0, 1), new_process=False).difference
    assert difference is not None
    assert (difference.epoch, difference.batch, difference.row) == (0, 0, 0)
    assert difference.field == "['noise']['y']"
    assert (difference.one, difference.other) == ("0 workers", "1 worker")
    assert difference.left != difference.right


# -- settings --------------------------------------------------------------------------------------


def test_settings_that_a_factory_does_not_take_are_skipped_and_said() -> None:
    rows = {
        row.setting: row for row in penstock.verify(ours(), workers=(0, 2), new_process=False).rows
    }
    assert rows["2 workers, threads"].outcome == "skipped"
    assert "does not accept pool" in rows["2 workers, threads"].note
    handed_on = penstock.verify(
        lambda **settings: TorchDataLoader(Numbers(), **settings),
        workers=(0,),
        max_batches=2,
        start_methods=["fork"],
        new_process=False,
    )
    threads = next(row for row in handed_on.rows if row.setting == "2 workers, threads")
    assert (threads.outcome, threads.note) == ("skipped", "the loader does not accept pool")


def test_a_setting_that_fails_is_told_with_its_error() -> None:
    def make_loader(num_workers: int = 0) -> Any:
        if num_workers == 2:
            raise OSError("no workers here")
        return [1, 2]

    verdict = penstock.verify(make_loader, workers=(0, 2))
    row = next(row for row in verdict.rows if row.setting == "2 workers")
    assert (row.outcome, row.note) == ("failed", "OSError: no workers here")
    assert not verdict


def test_only_the_first_batches_are_compared_when_asked() -> None:
    verdict = penstock.verify(
        ours(Numbers(50)), workers=(0, 1), max_batches=3, epochs=1, new_process=False
    )
    assert verdict, str(verdict)
    assert {row.num_batches for row in verdict.rows if row.outcome == "same"} == {3}


def test_progress_is_told() -> None:
    told: list[str] = []
    penstock.verify(lambda: [1], tell=told.append)
    assert told[:2] == ["as given", "as given, again"]


@pytest.mark.parametrize(
    ("make_loader", "arguments", "words"),
    [
        (5, {}, "must be a function"),
        (lambda dataset: dataset, {}, "requires dataset"),
        (list, {}, "gave no batch"),
        (lambda: [1], {"epochs": 0}, "epochs=0"),
        (lambda: [1], {"workers": ()}, "nothing to compare"),
        (lambda: [1], {"workers": (-1,)}, "workers=-1"),
    ],
)
def test_bad_arguments_are_refused(make_loader: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        penstock.verify(make_loader, **arguments)


def test_an_exception_of_the_user_s_own_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        penstock.verify(lambda: [1 / 0])


def test_the_package_can_be_called_whatever_was_imported_first() -> None:
    import penstock.verify.verdict
    from penstock import verify

    assert verify is penstock.verify
    assert verify(lambda: [1], new_process=False)
    assert cloudpickle.loads(cloudpickle.dumps(verify)) is verify
