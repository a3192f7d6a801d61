"""Batches equal torch's, in order, for any dataset length, batch size, workers and depth."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from support.datasets import Numbers, assert_same, collect

pytestmark = pytest.mark.legacy


@settings(max_examples=25)
@given(
    length=st.integers(0, 40),
    batch_size=st.one_of(st.none(), st.integers(1, 9)),
    num_workers=st.integers(1, 4),
    prefetch_factor=st.one_of(st.none(), st.integers(1, 5)),
    drop_last=st.booleans(),
    size=st.sampled_from([1, 3000]),
)
@pytest.mark.parametrize("pool", ["thread", "process"])
def test_the_batches_are_torch_s_whatever_the_numbers(
    pool: str,
    length: int,
    batch_size: int | None,
    num_workers: int,
    prefetch_factor: int | None,
    drop_last: bool,
    size: int,
) -> None:
    dataset: Any = Numbers(length, (size,))
    arguments = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    ours = DataLoader(
        dataset, num_workers=num_workers, prefetch_factor=prefetch_factor, pool=pool, **arguments
    )
    assert_same(collect(ours), collect(TorchDataLoader(dataset, **arguments)))
