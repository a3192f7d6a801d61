"""Memory-mapped arrays are mapped again in a worker, or sent by value with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.datasets import assert_same
from support.pickling import arrived, round_trip

pytestmark = pytest.mark.legacy

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")

VIEWS: dict[str, Callable[[Any], Any]] = {
    "the whole": lambda mapped: mapped,
    "rows": lambda mapped: mapped[10:200],
    "every second row": lambda mapped: mapped[::2],
    "backwards": lambda mapped: mapped[::-1, 5:290:3],
    "transposed": lambda mapped: mapped.T,
    "as a plain array": lambda mapped: np.asarray(mapped)[3:],
    "other words": lambda mapped: mapped.view(np.uint8),
}


@pytest.fixture
def mapped_path(tmp_path: Path) -> Path:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(90_000).reshape(300, 300))
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_memmap_and_its_views_are_mapped_again(mapped_path: Path, name: str, mode: Any) -> None:
    view = VIEWS[name](np.load(mapped_path, mmap_mode=mode))
    again, pickle_file = round_trip(view)
    assert pickle_file.location.num_bytes < 4096
    assert_same(np.ascontiguousarray(again), np.ascontiguousarray(view))
    assert (type(again), again.strides) == (type(view), view.strides)
    assert again.flags.writeable == view.flags.writeable
    assert not np.shares_memory(again, view)
    pickle_file.close()


def test_a_plain_array_is_not_mapped_again() -> None:
    _, pickle_file = round_trip(np.arange(90_000))
    assert pickle_file.location.num_bytes > 90_000 * 8
    pickle_file.close()


def test_a_worker_that_writes_to_a_memmap_changes_its_own_view_only(mapped_path: Path) -> None:
    original = np.load(mapped_path, mmap_mode="r+")
    again = arrived(original)
    again[:] = -1
    assert original.min() == 0
    assert np.load(mapped_path).min() == 0
    original[0, 0] = 7  # visible immediately to later mappings of the file
    assert arrived(original)[0, 0] == 7


@linux_only
def test_a_private_memmap_travels_by_value_once_it_was_written_to(mapped_path: Path) -> None:
    private = np.load(mapped_path, mmap_mode="c")
    assert private.sum() == 90_000 * 89_999 // 2
    _, pickle_file = round_trip(private)
    assert pickle_file.location.num_bytes < 4096
    pickle_file.close()
    private[5, 5] = -1
    again, pickle_file = round_trip(private)
    assert again[5, 5] == -1
    assert pickle_file.location.num_bytes > 90_000 * 8
    assert any("contain) writes that are not in the file" in note for note in pickle_file.notes)
    pickle_file.close()


@linux_only
def test_a_memmap_whose_file_is_gone_or_replaced_travels_by_value(mapped_path: Path) -> None:
    mapped = np.load(mapped_path, mmap_mode="r")
    kept = mapped_path.rename(mapped_path.with_suffix(".old"))
    assert_same(np.asarray(arrived(mapped)), np.load(kept))
    np.save(mapped_path, np.zeros((300, 300), int))
    again, pickle_file = round_trip(mapped)
    assert_same(np.asarray(again), np.load(kept))
    assert any("a different file" in note for note in pickle_file.notes)
    pickle_file.close()
