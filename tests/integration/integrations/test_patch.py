"""penstock.patch() puts the engine under torch's own class, whenever it was imported."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data as torch_data

import penstock
from penstock.errors import BadArgument
from support.datasets import Numbers, Samples, assert_same, collect
from support.library_loaders import (
    ImportedBefore,
    InfiniteLoader,
    SubclassedBefore,
    epochs,
    is_ours,
    make,
    seeded,
)

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def is_unpatched_afterwards() -> Iterator[None]:
    yield
    penstock.unpatch()
    assert not is_ours(ImportedBefore([0])), "a test left the patch in place"


# -- loaders that use the engine -------------------------------------------------------------------


def test_it_does_not_matter_when_the_class_was_imported_or_subclassed() -> None:
    made_before = make()
    with penstock.patched():
        from torch.utils.data import DataLoader as ImportedAfter

        class SubclassedAfter(torch_data.DataLoader):
            pass

        kinds = [ImportedBefore, SubclassedBefore, ImportedAfter, SubclassedAfter]
        loaders = [made_before, *(make(kind) for kind in kinds)]
        assert [is_ours(loader) for loader in loaders] == [True] * 5
    assert [is_ours(loader) for loader in loaders] == [False] * 5


def test_a_subclass_with_attributes_under_our_names_keeps_them_and_loads() -> None:
    with penstock.patched(seed=0):
        loader = make(SubclassedBefore, 2)
        first = seeded(2, SubclassedBefore)
        assert (loader.seed, loader._epoch_state) == ("mine", "mine")
        epochs(loader)
        assert (loader.seed, loader._epoch_state) == ("mine", "mine")
    with penstock.patched(seed=0):
        assert_same(first, seeded(0))


def test_an_infinite_loader_is_reset_and_sees_the_changed_dataset() -> None:
    with penstock.patched():
        loader = InfiniteLoader(Numbers(8), batch_size=4, num_workers=2)
        assert len(collect(loader)) == 2
        loader.iterator._shutdown_workers()
        loader.dataset.shape = (7,)
        loader.reset()
        assert [batch[0].shape for batch in loader] == [(4, 7), (4, 7)]
        loader.iterator._shutdown_workers()


def test_a_class_with_its_own_iterator_is_left_alone() -> None:
    class Own(ImportedBefore):
        def _get_iterator(self) -> Any:
            return iter([7])

    class OwnIndices(ImportedBefore):
        @property
        def _index_sampler(self) -> Any:
            return [[3], [1]]

    with penstock.patched() as report:
        assert list(Own(Numbers())) == [7]
        assert [batch[1].tolist() for batch in OwnIndices(Numbers())] == [[3], [1]]
        assert is_ours(penstock.DataLoader([0]))
    assert report.num_loaders == 0


# -- patching and restoring ------------------------------------------------------------------------


def world() -> list[Any]:
    """Return every name in torch's module and classes, with the identity of its value."""
    places = [torch_data, torch_data.dataloader, ImportedBefore, torch_data.Dataset]
    return [[(name, id(value)) for name, value in vars(place).items()] for place in places]


def test_torch_is_identical_after_a_thousand_patches() -> None:
    before = world()
    for _ in range(1000):
        penstock.patch()
        penstock.unpatch()
    assert world() == before
    penstock.patch()
    assert world() != before


def test_patches_nest_and_the_options_of_the_outer_one_come_back() -> None:
    broken = Samples(lambda i: 1 // (i % 2), length=4)

    def indices() -> list[Any]:
        return [batch.tolist() for batch in ImportedBefore(broken, batch_size=2)]

    with penstock.patched(on_error="skip"):
        with penstock.patched(on_error="raise"), pytest.raises(ZeroDivisionError):
            indices()
        assert indices() == [[1], [1]]
    with pytest.raises(ZeroDivisionError):
        indices()


def test_patching_twice_needs_unpatching_twice_and_more_does_nothing() -> None:
    before = world()
    first, second = penstock.patch(), penstock.patch()
    assert first is second
    penstock.unpatch()
    assert is_ours(make())
    penstock.unpatch()
    penstock.unpatch()
    assert world() == before


def test_patching_again_with_the_same_options_goes_on_counting_epochs() -> None:
    loader = make(shuffle=False)
    with penstock.patched(seed=0):
        first = collect(loader)
        with penstock.patched(seed=0):
            second = collect(loader)
    assert first[0][1].tolist() != second[0][1].tolist()


def test_our_method_put_back_by_somebody_else_after_unpatch_is_torch_s() -> None:
    original = ImportedBefore._get_iterator
    with penstock.patched():
        kept = ImportedBefore._get_iterator
    ImportedBefore._get_iterator = kept  # type: ignore[method-assign]
    assert not is_ours(make())
    with penstock.patched():
        assert is_ours(make())
    assert ImportedBefore._get_iterator is original


def test_an_iterator_that_exists_goes_on_when_the_patch_is_gone() -> None:
    with penstock.patched(seed=0):
        batches = iter(make(num_workers=2))
        first = next(batches)
    assert len([first, *batches]) == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sead": 0}, r"unknown patch\(\) option sead"),
        ({"on_error": "ignore"}, "on_error"),
        ({"seed": 0.5}, "seed"),
        ({"num_workers": "many"}, "num_workers"),
        ({"num_workers": 2.0}, "num_workers=2.0"),
        ({"multiprocessing_context": "teleport"}, "teleport|start method"),
    ],
)
def test_options_that_make_no_sense_change_nothing(options: Any, words: str) -> None:
    with pytest.raises((BadArgument, ValueError), match=words):
        penstock.patch(**options)
    assert not is_ours(make())


# -- copies and threads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_loader_that_was_iterated_can_be_copied_and_pickled(copied: Any) -> None:
    with penstock.patched(seed=0):
        loader = make(shuffle=False)
        collect(loader)
        other = copied(loader)
        seen = collect(other)
        assert [batch[0].tolist() for batch in seen] == [b[0].tolist() for b in collect(loader)]
        assert vars(other)["_penstock_loader"] is not vars(loader)["_penstock_loader"]
        batches = iter(loader)
        next(batches)
        collect(other)  # does not affect the first
        assert len(list(batches)) == 4


def test_threads_iterate_loaders_of_their_own_at_once() -> None:
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        loader = ImportedBefore(Numbers(12 + number), batch_size=4, num_workers=number % 2)
        results[number] = [label for batch in loader for label in batch[1].tolist()]

    with penstock.patched() as report:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: list(range(12 + number)) for number in range(4)}
    assert report.num_loaders == 4
