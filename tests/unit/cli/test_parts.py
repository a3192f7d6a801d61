"""What lies in a dataset is found by looking, with the line that put it there."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cli.doctor import parts
from penstock.cli.doctor.container_lines import find_line
from penstock.cli.doctor.sample_form import are_equal, devices_in, form_of, skeleton_of

pytestmark = pytest.mark.legacy

MANY = parts.MANY_ITEMS + 1

MODULE = f"""\
import torch


class Wrapped:
    def __init__(self):
        self.samples = [str(i) for i in range({MANY})]


class Grown:
    def __init__(self):
        self.table = {{}}
        for i in range({MANY}):
            self.table[i] = "x"
        self.done = True


class Long:
    def __init__(self):
        self.samples = [
            (str(i), i)
            for i in range({MANY})
        ]


class Base:
    def load(self, n):
        self.names: list = list(map(str, range(n)))


class Derived(Base):
    def __init__(self):
        self.load({MANY})


class Bare:
    pass


bare = Bare()
bare.rows = tuple(range({MANY}))
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    path = tmp_path_factory.mktemp("parts") / "user_data_module.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("user_data_module", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules[spec.name]


def large_part(dataset: Any) -> parts.Part:
    (part,) = [part for part in parts.parts_of(dataset) if parts.is_large(part.value)]
    return part


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("Wrapped", 6, f"self.samples = penstock.SharedList([str(i) for i in range({MANY})])"),
        ("Grown", 13, "self.table = penstock.SharedDict(self.table)"),
        ("Long", 19, "self.samples = penstock.SharedList([...])"),
        ("Derived", 27, "self.names = penstock.SharedList(list(map(str, range(n))))"),
    ],
)
def test_the_line_that_fills_a_container_is_found(
    module: ModuleType, name: str, line: int, instead: str
) -> None:
    part = large_part(getattr(module, name)())
    found = find_line(part, Path(str(module.__file__)), "ds")
    assert found.where.endswith(f"user_data_module.py:{line}")
    assert found.instead.startswith(instead)
    assert found.now


def test_a_container_set_from_outside_is_found_in_the_script(module: ModuleType) -> None:
    found = find_line(large_part(module.bare), Path(str(module.__file__)), "bare")
    assert found.instead.startswith("bare.rows = penstock.SharedList(")


def test_what_a_library_s_class_holds_is_changed_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("ds = make()\n")
    data = torch.utils.data.Subset(torch.zeros(3), list(range(MANY)))  # type: ignore[arg-type]
    found = find_line(large_part(data), script, "ds")
    assert found.instead == "ds.indices = penstock.SharedList(ds.indices)"


def test_arrays_and_short_lists_are_not_large() -> None:
    assert not parts.is_large(np.zeros(MANY))
    assert not parts.is_large([torch.zeros(1)] * MANY)
    assert not parts.is_large(["x"] * 10)
    assert not parts.is_large("x" * MANY)
    assert parts.is_large(dict.fromkeys(range(MANY), "x"))


def test_the_size_of_a_container_is_about_right() -> None:
    names = [f"image-{i:012}.jpg" for i in range(MANY)]
    true = sys.getsizeof(names) + sum(map(sys.getsizeof, names))
    assert 0.8 * true < parts.estimate_bytes(names) < 1.2 * true


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
        part.path
        for part in parts.parts_of(Data())
        if parts.generator_state(part.value) is not None
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
        before = parts.generator_state(generator)
        assert parts.generator_state(generator) == before
        generator.random()  # type: ignore[attr-defined]
        assert parts.generator_state(generator) != before


def test_paths_that_exist_are_found_and_other_texts_are_not(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.touch()
    assert parts.path_in(str(tmp_path)) == str(tmp_path)
    assert parts.path_in(file) == str(tmp_path)
    for value in ("no such file", "", "x" * 5000, "a\0b", 7, None):
        assert parts.path_in(value) is None


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_a_tensor_on_a_gpu_is_found_in_datasets_and_samples() -> None:
    class Data:
        def __init__(self) -> None:
            self.tables = {"x": [torch.zeros(1).as_subclass(OnGpu)]}

    found = {
        part.path: parts.device_of(part.value)
        for part in parts.parts_of(Data())
        if parts.device_of(part.value)
    }
    assert found == {"dataset.tables['x'][0]": "cuda:1"}
    assert devices_in((torch.zeros(2), {"a": torch.zeros(1).as_subclass(OnGpu)})) == {"cuda:1"}


def test_an_object_whose_attributes_raise_is_passed_by() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert len(list(parts.parts_of([Odd(), "x"]))) == 3


def test_a_tensor_on_the_cpu_is_on_no_gpu() -> None:
    assert parts.device_of(torch.zeros(1)) is None
    assert parts.device_of("cuda:0") is None


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


def test_equal_samples_are_told_from_others() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert are_equal((nan, ["a"]), (nan.clone(), ["a"]))
    assert not are_equal(nan, torch.tensor([float("nan"), 2.0]))
    assert not are_equal(np.zeros(2), np.zeros(3))
    assert are_equal(object(), object())
    assert not are_equal({"a": 1}, {"a": 2})
