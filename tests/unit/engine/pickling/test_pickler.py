"""User objects are pickled once and rebuilt elsewhere, with large buffers outside the stream."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import io
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.pickling.pickler import PickledObjects, PickleFile
from penstock.engine.pickling.unpickling import unpickle_objects
from support.datasets import Numbers, assert_same, draw
from support.pickling import arrive, worker_side

pytestmark = pytest.mark.legacy


@contextmanager
def packing(**objects: Any) -> Iterator[PickleFile]:
    pickle_file = PickledObjects(objects).to_shared_file()
    yield pickle_file
    pickle_file.close()


def round_trip(value: Any) -> Any:
    with packing(value=value) as pickle_file:
        return unpickle_objects(worker_side(pickle_file), [])["value"]


def local_class() -> type:
    class Local:
        scale = 3

        def __init__(self, fn: Any) -> None:
            self.fn = fn

        def __getitem__(self, index: int) -> Any:
            return self.fn(index) * self.scale

    return Local


def test_a_dataset_comes_back_with_its_state() -> None:
    dataset = round_trip(Numbers(5, (2, 3)))
    assert type(dataset) is Numbers
    assert (dataset.length, dataset.shape) == (5, (2, 3))


def test_local_classes_lambdas_and_closures_come_back() -> None:
    offset = 100
    dataset = round_trip(local_class()(lambda index: index + offset))
    assert dataset[1] == 303


def test_arrays_and_tensors_come_back_to_the_bit() -> None:
    value = {
        "array": np.arange(10_000.0),
        "tensor": torch.arange(10_000),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "strided": torch.arange(100.0).reshape(10, 10).t(),
        "grad": torch.ones(3, requires_grad=True),
    }
    assert_same(round_trip(value), value)


def test_big_buffers_are_not_in_the_stream() -> None:
    with packing(
        value=[np.zeros(1 << 20, np.uint8), torch.zeros(1 << 20, dtype=torch.uint8)]
    ) as it:
        assert it.location.stream_bytes < 4096
        assert [length for _, length in it.location.spans] == [1 << 20, 1 << 20]


def test_every_worker_may_write_to_its_copy_and_nobody_else_sees_it() -> None:
    original = np.zeros(10_000)
    with packing(value=original) as pickle_file:
        one = unpickle_objects(worker_side(pickle_file), [])["value"]
        other = unpickle_objects(worker_side(pickle_file), [])["value"]
    one += 1
    assert one.sum() == 10_000
    assert other.sum() == 0
    assert original.sum() == 0


def test_the_modules_that_a_worker_must_import_are_listed() -> None:
    with packing(dataset=Numbers()) as pickle_file:
        names = [entry[0] for entry in pickle_file.location.modules]
    assert "support.datasets" in names
    assert "__main__" not in names


def test_the_modules_of_functions_are_listed_too() -> None:
    bound = functools.partial(textwrap.indent, prefix=" ")
    with packing(worker_init_fn=draw, collate_fn=bound) as pickle_file:
        names = [entry[0] for entry in pickle_file.location.modules]
    assert {"support.datasets", "textwrap"} <= set(names)


def test_objects_of_one_pickle_that_share_something_share_it_still() -> None:
    shared = [1, 2, 3]
    with packing(dataset={"list": shared}, collate_fn=shared) as pickle_file:
        objects = unpickle_objects(worker_side(pickle_file), [])
    assert objects["dataset"]["list"] is objects["collate_fn"]


PLUGIN = """
TIMES = 3
class Plugged:
    def __len__(self): return 4
    def __getitem__(self, index): return index * TIMES
"""


@pytest.mark.parametrize("name", ["plugged", "plugs.deep"])
def test_a_module_that_no_import_finds_travels_by_value(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        pickle_file = PickledObjects({"value": module.Plugged()}).to_shared_file()
        # The registration was temporary.
        assert name not in cloudpickle.list_registry_pickle_by_value()
    finally:
        del sys.modules[name]
    # The fork server does not import it either.
    assert name not in dict(pickle_file.location.modules)
    assert arrive(pickle_file)[2] == 6
    pickle_file.close()


def test_a_module_of_a_package_that_was_made_by_hand_travels_by_value(tmp_path: Path) -> None:
    """The parent module has a path that contains the module, but the parent cannot be imported."""
    (tmp_path / "deep.py").write_text(PLUGIN)
    package = ModuleType("by_hand")
    package.__path__ = [str(tmp_path)]
    sys.modules["by_hand"] = package
    try:
        module = importlib.import_module("by_hand.deep")
        pickle_file = PickledObjects({"value": module.Plugged()}).to_shared_file()
    finally:
        del sys.modules["by_hand"]
        sys.modules.pop("by_hand.deep", None)
    assert arrive(pickle_file)[2] == 6
    pickle_file.close()


def test_a_module_that_is_found_travels_by_name() -> None:
    with packing(value=Numbers(3)) as pickle_file:
        assert ("support.datasets", 0) in pickle_file.location.modules


def collect_unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run the garbage collector, and return what finalizers raised."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    gc.collect()
    monkeypatch.undo()
    return found


def test_a_stream_that_is_garbage_with_an_error_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(SharedFile, "append", fail)
    with pytest.raises(OSError, match="full") as caught:
        PickledObjects({"value": [1]}).to_shared_file()
    cycle = [caught.value]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle, caught
    assert collect_unraisable(monkeypatch) == []


def test_a_view_of_such_a_stream_raises_from_python_3_14_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control."""
    stream = io.BytesIO(b"text")
    cycle: list[Any] = [stream, stream.getbuffer()]
    cycle.append(cycle)
    del cycle, stream
    found = [type(one.exc_value) for one in collect_unraisable(monkeypatch)]
    assert found == ([BufferError] if sys.version_info >= (3, 14) else [])
