"""The arguments that a factory takes, and a factory made from a loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from penstock.errors import BadArgument
from penstock.verify.factory import factory_of, is_not_taken, taken_by

pytestmark = pytest.mark.legacy


def test_which_arguments_a_factory_takes() -> None:
    assert taken_by(lambda num_workers: [])("num_workers")
    assert not taken_by(lambda num_workers: [])("pool")
    assert taken_by(lambda **settings: [])("pool")


@pytest.mark.parametrize("factory", [7, lambda dataset: [], lambda dataset, /: []])
def test_a_factory_that_cannot_be_called_without_arguments_is_refused(factory: Any) -> None:
    with pytest.raises(BadArgument, match="make_loader"):
        taken_by(factory)


def test_a_loader_that_does_not_know_a_setting_is_told_from_one_that_fails() -> None:
    def make(**settings: Any) -> Any:
        return DataLoader([1], **settings)

    with pytest.raises(TypeError) as unknown:
        make(pool="thread")
    assert is_not_taken(unknown.value)
    assert not is_not_taken(TypeError("'int' object is not callable"))


def test_a_loader_is_made_again_with_its_arguments_and_its_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(range(8), 3, shuffle=True, drop_last=True, generator=generator)
    make = factory_of(loader)
    first, second = ([batch.tolist() for batch in make()] for _ in range(2))
    assert first == second
    again = make(num_workers=0, prefetch_factor=4)
    assert (again.batch_size, again.drop_last, again.num_workers) == (3, True, 0)
    assert factory_of(make) is make
