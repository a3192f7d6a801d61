"""The first difference of two runs, and its description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.verify.differences import (
    describe,
    describe_move,
    first_difference,
    first_leaf,
    first_sample,
)
from penstock.verify.hashed_run import HashedBatch, HashedRun

pytestmark = pytest.mark.legacy


def run_of(*epochs: list[str]) -> HashedRun:
    """Return a record whose batches are words and whose samples are letters."""
    return HashedRun(
        epochs=[
            [
                HashedBatch(whole=word.encode(), samples=tuple(letter.encode() for letter in word))
                for word in epoch
            ]
            for epoch in epochs
        ]
    )


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([["ab", "cd"]], [["ab", "cd"]], None),
        ([["ab", "cd"]], [["ab", "ce"]], (0, 1)),
        ([["ab"], ["cd"]], [["ab"], ["xd"]], (1, 0)),
        ([["ab", "cd"]], [["ab"]], (0, 1)),
        ([["ab"]], [["ab"], ["cd"]], (1, 0)),
    ],
)
def test_the_first_batch_that_differs(one: Any, other: Any, place: Any) -> None:
    assert first_difference(run_of(*one), run_of(*other)) == place


@pytest.mark.parametrize(
    ("one", "other", "row"), [("abc", "axc", 1), ("abc", "ab", 2), ("abc", "abc", None)]
)
def test_the_first_sample_that_differs(one: str, other: str, row: int | None) -> None:
    assert first_sample(run_of([one]), run_of([other]), (0, 0)) == row


def test_a_batch_that_only_one_run_has_is_not_taken_apart() -> None:
    assert first_sample(run_of(["ab"]), run_of(["ab", "cd"]), (0, 1)) is None


def test_a_move_says_where_the_sample_went() -> None:
    moved = describe_move(run_of(["ab", "cd"]), run_of(["cb", "ad"]), (0, 0), 0)
    assert "a different order" in moved
    assert "sample 0 of batch 1" in moved
    assert not describe_move(run_of(["ab"]), run_of(["xb"]), (0, 0), 0)


def test_the_first_field_that_differs() -> None:
    one = {"x": torch.zeros(3), "y": 1}
    assert first_leaf(one, {"x": torch.zeros(3), "y": 2}) == ("['y']", 1, 2)
    assert first_leaf(one, one) is None
    assert first_leaf({"x": 1}, {"x": 1, "y": 2}) == ("['y']", None, 2)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (1, 2, "different values"),
        (1, "1", "int and str"),
        (torch.zeros(2), torch.zeros(3), "different shapes"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "different dtypes"),
        (
            torch.tensor([1.0, 2.0]),
            torch.tensor([1.0, 2.5]),
            "1 of 2 numbers differ, the first at [1]",
        ),
        (np.array([0.0]), np.array([-0.0]), "different bits"),
        (torch.tensor(True), torch.tensor(False), "different numbers"),
        (np.array([True, False]), np.array([True, True]), "1 of 2 numbers differ"),
        (np.array(["a"]), np.array(["b"]), "1 of 1 numbers differ"),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), "numbers"),
        (
            np.array([1, "a"], dtype=object),
            np.array([2, "a"], dtype=object),
            "1 of 2 numbers differ",
        ),
    ],
)
def test_how_two_values_differ(one: Any, other: Any, words: str) -> None:
    assert words in describe(one, other)[0]


def test_long_values_are_shortened() -> None:
    assert len(describe("x" * 1000, "y")[1]) == 100
