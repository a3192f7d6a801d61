"""Broken JPEG files with "skip" and "replace": no crash, no hang, and every one is listed.

tests/soak/test_fuzzed_soak.py runs 2,000 files.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.engine.loading.bad_sample_file import read
from penstock.errors import TooManyBad
from support import fuzzed_jpegs
from support.datasets import WAYS

pytest.importorskip("PIL")
pytestmark = pytest.mark.vision

NUM_BROKEN, NUM_GOOD = 120, 240
MAX_GROWTH_KB = 300 << 10
"""Decoding one file with a header of 65,500 x 65,500 pixels would take 13 GB."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> fuzzed_jpegs.Images:
    folder = tmp_path_factory.mktemp("images")
    return fuzzed_jpegs.Images(fuzzed_jpegs.make_folder(folder, NUM_BROKEN, num_good=NUM_GOOD))


@pytest.fixture(scope="module")
def bad(images: fuzzed_jpegs.Images) -> set[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow warns about odd tags
        return fuzzed_jpegs.bad_ones(images)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("way", "on_error"),
    [
        *itertools.product(["inline", "thread", "forkserver"], ["skip", "replace"]),
        ("spawn", "skip"),
    ],
)
def test_every_broken_file_is_listed_and_every_good_one_is_loaded(
    on_error: str, way: str, images: fuzzed_jpegs.Images, bad: set[int], tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    limit: dict[str, Any] = {} if way == "inline" else {"sample_timeout_s": 20}
    loader = DataLoader(
        images,
        batch_size=16,
        shuffle=True,
        seed=1,
        on_error=on_error,
        bad_samples_file=path,
        **limit,
        **WAYS[way],
    )
    indices, pixels, most_kb = fuzzed_jpegs.load(loader)
    good = set(range(len(images))) - bad
    assert set(pixels) == good
    assert len(indices) == (len(good) if on_error == "skip" else len(images))
    assert {one.index for one in loader.bad_samples} == bad
    assert {one.path for one in loader.bad_samples} == {images.files[index] for index in bad}
    assert {one.index for one in read(path).samples} == bad
    assert most_kb < images[min(good)][2] + MAX_GROWTH_KB
    for index in list(good)[:20]:
        assert torch.equal(pixels[index], images[index][0])


def test_most_of_what_was_broken_is_bad_and_nothing_else(
    images: fuzzed_jpegs.Images, bad: set[int]
) -> None:
    """Control: some flipped bits have no effect, and good files are accepted."""
    names = [Path(images.files[index]).name for index in bad]
    assert not any("good" in name for name in names)
    assert len(bad) > NUM_BROKEN * 2 // 3
    for kind in ("truncated", "wrong-type", "zero-length", "huge-header", "unreadable"):
        assert sum(kind in name for name in names) > NUM_BROKEN // len(fuzzed_jpegs.WAYS) // 2, kind


def test_without_on_error_the_first_one_ends_it(images: fuzzed_jpegs.Images) -> None:
    with pytest.raises((OSError, ValueError)):
        fuzzed_jpegs.load(DataLoader(images, batch_size=16, num_workers=2))


def test_a_budget_ends_it_with_names(images: fuzzed_jpegs.Images) -> None:
    with pytest.raises(TooManyBad, match=r"\.jpg"):
        fuzzed_jpegs.load(
            DataLoader(images, batch_size=16, num_workers=2, on_error="skip", max_bad=0.05)
        )
