"""Caches reject foreign folders and reserved field names. Covers cache and cache_files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import cached, pack
from penstock.errors import AlreadyThere, CannotPack
from support.packed_sets import digest

pytestmark = pytest.mark.windows

SAMPLES = [{"x": float(index)} for index in range(5)]


def test_a_cache_leaves_the_files_of_others_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(7))
    (tmp_path / "ready.npy").write_text("mine")
    before = digest(tmp_path)
    with pytest.raises(
        AlreadyThere, match=r"is not a cache, and it is not empty: it contains 'ready.npy'"
    ):
        cached(SAMPLES, tmp_path)
    assert digest(tmp_path) == before
    pack(SAMPLES, tmp_path / "set", workers=0)
    with pytest.raises(AlreadyThere, match="not empty"):
        cached(SAMPLES, tmp_path / "set")


def test_a_cache_whose_maker_was_killed_is_made_anew(tmp_path: Path) -> None:
    cached(SAMPLES, tmp_path)
    assert not (tmp_path / ".making").exists()
    (tmp_path / "cache.json").unlink()
    (tmp_path / ".making").touch()  # killed before it wrote its description
    (tmp_path / ".part-00aa11bb-cache.json").touch()
    again = cached(SAMPLES, tmp_path)
    assert [again[index] for index in range(5)] == SAMPLES
    (tmp_path / "notes.txt").touch()  # other files next to an existing cache are allowed
    assert cached(SAMPLES, tmp_path)[4] == {"x": 4.0}


@pytest.mark.parametrize("names", [("ready", "x"), ("Checks", "x"), ("x", "x.spans"), ("x", "X")])
def test_a_field_does_not_share_a_file(names: tuple[str, str], tmp_path: Path) -> None:
    samples = [dict(zip(names, ("a" * index, index), strict=True)) for index in range(5)]
    if names[0] != "x":
        samples = [{names[0]: index + 5, "x": index} for index in range(5)]
    elif names[1] == "X":
        samples = [{"x": index, "X": index} for index in range(5)]
    with pytest.raises(CannotPack, match="a different name"):
        cached(samples, tmp_path / "cache")
    kept = cached([{"a": 1, "b": 2}] * 3, tmp_path / "other")
    assert kept[1] == {"a": 1, "b": 2}


def test_samples_of_another_form_are_computed_each_time(tmp_path: Path) -> None:
    samples = [1.5, None, "text", np.zeros(2), (1, 2)]  # the middle and last are inspected
    data = cached(samples, tmp_path)
    assert data[0] == 1.5
    assert data[2] == "text"
    assert data[4] == (1, 2)
    assert data.num_ready == 1
    with pytest.raises(TypeError, match="must be an integer, not slice"):
        data[1:3]
    assert data[np.int64(2)] == "text"
