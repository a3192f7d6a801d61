"""The contents of a dataset are found by inspection, and samples are described."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cli.doctor import contents
from penstock.cli.doctor.sample_form import devices_in, form_of, skeleton_of

pytestmark = pytest.mark.legacy

MANY = contents.MANY_ITEMS + 1


def test_arrays_and_short_lists_are_not_large() -> None:
    assert not contents.is_large(np.zeros(MANY))
    assert not contents.is_large([torch.zeros(1)] * MANY)
    assert not contents.is_large(["x"] * 10)
    assert not contents.is_large("x" * MANY)
    assert contents.is_large(dict.fromkeys(range(MANY), "x"))


def test_the_size_of_a_container_is_about_right() -> None:
    names = [f"image-{i:012}.jpg" for i in range(MANY)]
    true = sys.getsizeof(names) + sum(map(sys.getsizeof, names))
    assert 0.8 * true < contents.estimate_bytes(names) < 1.2 * true


class Slotted:
    __slots__ = ("empty", "generator")

    def __init__(self) -> None:
        self.generator = random.Random(1)


def test_generators_are_found_wherever_they_hide() -> None:
    class Data:
        def __init__(self) -> None:
            hidden = np.random.default_rng(0)
            self.transform = functools.partial(lambda x: hidden.random(), 1)
            self.nested = [{"rng": torch.Generator()}, Slotted()]
            self.old = np.random.RandomState(1)
            self.itself = self
            self.shared = (random._inst, np.random.mtrand._rand, torch.default_generator)

    found = {
        path
        for path, value in contents.walk_contents(Data())
        if contents.generator_state(value) is not None
    }
    assert found == {
        "dataset.transform.func.<closure hidden>",
        "dataset.nested[0]['rng']",
        "dataset.nested[1].generator",
        "dataset.old",
    }


def test_a_generator_that_was_drawn_from_is_told_apart() -> None:
    generators = (random.Random(1), np.random.default_rng(1), np.random.RandomState(1))
    for generator in generators:
        before = contents.generator_state(generator)
        assert contents.generator_state(generator) == before
        generator.random()  # type: ignore[attr-defined]
        assert contents.generator_state(generator) != before


def test_paths_that_exist_are_found_and_other_texts_are_not(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.touch()
    assert contents.folder_of(str(tmp_path)) == str(tmp_path)
    assert contents.folder_of(file) == str(tmp_path)
    for value in ("no such file", "", "x" * 5000, "a\0b", 7, None):
        assert contents.folder_of(value) is None


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_a_tensor_on_a_gpu_is_found_in_datasets_and_samples() -> None:
    class Data:
        def __init__(self) -> None:
            self.tables = {"x": [torch.zeros(1).as_subclass(OnGpu)]}

    found = {
        path: contents.device_of(value)
        for path, value in contents.walk_contents(Data())
        if contents.device_of(value)
    }
    assert found == {"dataset.tables['x'][0]": "cuda:1"}
    assert devices_in((torch.zeros(2), {"a": torch.zeros(1).as_subclass(OnGpu)})) == {"cuda:1"}


def test_an_object_whose_attributes_raise_is_passed_by() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert len(list(contents.walk_contents([Odd(), "x"]))) == 3


def test_a_tensor_on_the_cpu_is_on_no_gpu() -> None:
    assert contents.device_of(torch.zeros(1)) is None
    assert contents.device_of("cuda:0") is None


def test_forms_are_said_in_one_line() -> None:
    sample = (torch.zeros(3, 2), {"name": "x", "rows": list(range(9))}, None)
    assert form_of(sample) == (
        "(Tensor float32 [3, 2], {name: str, rows: [int, int, int, int, int, int, 3 more]}, None)"
    )
    assert form_of(np.zeros((1, 2), dtype=np.uint8)) == "ndarray uint8 [1, 2]"


def test_samples_that_stack_have_the_same_skeleton() -> None:
    one, other = (torch.zeros(3), "a", 1), (torch.ones(3), "long", 2.5)
    assert skeleton_of(one) == skeleton_of(other)
    assert skeleton_of(one) != skeleton_of((torch.zeros(4), "a", 1))
    assert skeleton_of({"a": 1}) != skeleton_of({"b": 1})
