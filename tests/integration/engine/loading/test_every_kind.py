"""Batches of every kind of sample, in every pool, compared with torch's default_collate.

The reference is ``default_collate`` in this process. Differences of torch's own workers (conjugated
tensors and subclasses fail there, results lose lazy bits) are not reproduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from penstock import DataLoader
from support.collate_cases import EveryKind, Index, batches, cases, compare, make_sample, outcomes
from support.datasets import WAYS
from support.pickling import round_trip

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.filterwarnings("ignore"),  # from torch and NumPy, about these samples
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread, as in a worker. torch can copy some dtypes only in a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Result of torch for each batch."""
    return [outcome_of(default_collate, batch) for batch in batches()]


def outcome_of(collate: Any, batch: list[Index]) -> Any:
    try:
        return collate([make_sample(index) for index in batch])
    except Exception as error:
        return error


def differing(found: dict[Any, str]) -> str:
    return "\n".join(f"{case}: {text}" for case, text in found.items() if text)


@pytest.mark.parametrize("way", ["inline", "thread", "forkserver"])
def test_a_batch_of_any_kind_is_torch_s(way: str, expected: list[Any]) -> None:
    loader = DataLoader(EveryKind(), batch_sampler=batches(), **WAYS[way])
    found = {}
    for batch, ours, theirs in zip(batches(), outcomes(loader), expected, strict=True):
        found[batch[0][:3]] = compare(ours, theirs)
    assert not differing(found)


def test_there_are_batches_that_torch_makes_and_some_that_it_refuses(expected: list[Any]) -> None:
    """Control: the batches include both results and errors."""
    num_refused = sum(isinstance(one, Exception) for one in expected)
    assert len(expected) // 10 < num_refused < len(expected) // 2


def test_another_batch_would_be_noticed(expected: list[Any]) -> None:
    """Control for the comparison: batches of consecutive mixes are rarely equal."""
    num_different = sum(bool(compare(one, two)) for one, two in itertools.pairwise(expected))
    assert num_different > len(expected) // 2


@pytest.mark.parametrize("way", ["thread", "forkserver", "fork"])
def test_results_of_a_collate_fn_come_as_they_went(way: str) -> None:
    special = [batch for batch in batches() if batch[0][2] == "all"]
    loader = DataLoader(EveryKind(), batch_sampler=special, collate_fn=list, **WAYS[way])
    found = {}
    for batch, ours in zip(special, outcomes(loader), strict=True):
        found[batch[0][:2]] = compare(ours, [make_sample(index) for index in batch])
    assert not differing(found)


def has_memory(tensor: Any) -> bool:
    """Return whether torch can share the tensor's memory. torch crashes on other tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
        return False
    return bool(tensor.is_cpu and not tensor._is_zerotensor())


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_that_a_dataset_holds_arrive_in_a_worker(is_shared: bool) -> None:
    found = {}
    for name in cases():
        value = make_sample((name, "small", "all", 1))
        if not isinstance(value, torch.Tensor):
            continue
        if is_shared:
            if not has_memory(value):
                continue
            value.share_memory_()
        arrived, pickle_file = round_trip(value)
        found[name] = compare(arrived, value)
        pickle_file.close()
    assert len(found) > 20
    assert not differing(found)
