"""Values with equal hashes, and values whose hashes must differ."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from penstock.verify.hashing import digest, leaves_of, samples_of

pytestmark = pytest.mark.legacy

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class HashedRun:
    x: Any
    y: Any


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


DIFFERENT: list[Any] = [
    0,
    1,
    True,
    0.0,
    -0.0,
    float("nan"),
    1.0,
    1 + 0j,
    None,
    "",
    "1",
    b"1",
    [],
    (),
    {},
    set(),
    [1],
    [[1]],
    [1, 2],
    [2, 1],
    (1, 2),
    {1: 2},
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {1, 2},
    Pair(1, 2),
    HashedRun(1, 2),
    Plain(1),
    Plain(2),
    torch.tensor(1),
    torch.tensor([1]),
    torch.tensor([1, 2]),
    torch.tensor([[1, 2]]),
    torch.tensor([1, 2], dtype=torch.int32),
    torch.tensor([1.0, 2.0]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
    torch.zeros(0),
    torch.zeros(0, 3),
    np.array([1, 2]),
    np.array([1, 2], dtype=np.uint8),
    np.array(["a", "b"], dtype=object),
    np.float32(1.0),
]


def test_different_things_have_different_hashes() -> None:
    hashes = [digest(value) for value in DIFFERENT]
    alike = [
        (DIFFERENT[i], DIFFERENT[j])
        for i, j in itertools.combinations(range(len(hashes)), 2)
        if hashes[i] == hashes[j]
    ]
    assert alike == []


@pytest.mark.parametrize("place", range(len(DIFFERENT)))
def test_a_thing_has_the_same_hash_twice(place: int) -> None:
    assert digest(DIFFERENT[place]) == digest(DIFFERENT[place])


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    assert digest(tensor.t().contiguous()) == digest(tensor.t())
    assert digest(tensor[::2].clone()) == digest(tensor[::2])
    assert digest(torch.tensor([1j]).conj()) == digest(torch.tensor([complex(0, -1)]))


def test_sets_have_no_order() -> None:
    names = [str(number) for number in range(50)]
    backwards: set[str] = set()
    backwards.update(reversed(names))
    assert digest(set(names)) == digest(backwards)


def test_one_bit_of_a_large_tensor_matters() -> None:
    tensor = torch.zeros(100_000)
    other = tensor.clone()
    other[77_777] = torch.finfo(torch.float32).tiny
    assert digest(tensor) != digest(other)


def test_endless_nesting_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        digest(loop)


def test_the_hash_is_the_same_everywhere() -> None:
    value = {"x": torch.arange(6).reshape(2, 3), "name": ["a", "é"], "n": (1, 2.5, None, True)}
    assert digest(value).hex() == "b7651740b85e21c2"


# -- samples ---------------------------------------------------------------------------------------


def test_a_collated_batch_is_taken_apart() -> None:
    batch = [torch.arange(6).reshape(3, 2), {"y": torch.arange(3), "name": ["a", "b", "c"]}]
    rows = samples_of(batch)
    assert rows is not None
    assert len(rows) == 3
    assert digest(rows[1]) == digest([torch.tensor([2, 3]), {"y": torch.tensor(1), "name": "b"}])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(4, 2), 4),
        (torch.zeros(0, 2), 0),
        (torch.tensor(1), None),
        ([torch.zeros(2), torch.zeros(3), torch.zeros(2)], 3),
        (["a", "b"], 2),
        ("text", None),
        (5, None),
        (Pair(torch.zeros(2), torch.zeros(2, 3)), 2),
        (HashedRun(torch.zeros(2), ["a", "b"]), 2),
        ({"x": 1}, None),
    ],
)
def test_how_many_samples_a_batch_has(batch: Any, count: int | None) -> None:
    rows = samples_of(batch)
    assert (None if rows is None else len(rows)) == count


def test_paths_are_written_as_one_would() -> None:
    value = {"a": [1, Pair(2, HashedRun(3, 4))]}
    assert [path for path, _ in leaves_of(value)] == [
        "['a'][0]",
        "['a'][1].x",
        "['a'][1].y.x",
        "['a'][1].y.y",
    ]
