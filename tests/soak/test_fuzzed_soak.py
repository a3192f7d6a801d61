"""2,000 broken JPEG files with "skip" and "replace". Needs pillow: see `make soak`."""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import DataLoader
from penstock.engine.loading.bad_sample_file import read
from support import fuzzed_jpegs

pytest.importorskip("PIL")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # pillow warns about odd tags
]

NUM_BROKEN = 2000


def test_2_000_broken_files_are_all_listed(
    tmp_path: Path, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    (tmp_path / "images").mkdir()
    files = fuzzed_jpegs.make_folder(tmp_path / "images", NUM_BROKEN, num_good=2 * NUM_BROKEN)
    images = fuzzed_jpegs.Images(files)
    bad = fuzzed_jpegs.bad_ones(images)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most_kb, started = 0, time.monotonic()
    for on_error in ("skip", "replace"):
        path = tmp_path / f"{on_error}.jsonl"
        loader = DataLoader(
            images,
            batch_size=32,
            shuffle=True,
            seed=1,
            num_workers=2,
            on_error=on_error,
            bad_samples_file=path,
            sample_timeout_s=20,
        )
        indices, pixels, peak_kb = fuzzed_jpegs.load(loader)
        most_kb = max(most_kb, peak_kb)
        assert set(pixels) == set(range(len(images))) - bad
        assert len(indices) == len(images) - (len(bad) if on_error == "skip" else 0)
        assert {one.index for one in loader.bad_samples} == bad
        assert {one.index for one in read(path).samples} == bad
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    kinds = ", ".join(fuzzed_jpegs.WAYS)
    note(
        f"2,000 broken JPEG files ({kinds}) among 4,000 good ones: {len(bad)} cannot be decoded, "
        f"all are listed, by skip and by replace, all others loaded; no worker lost, "
        f"{time.monotonic() - started:.0f} s; a worker held {most_kb >> 10} MB at most, this "
        f"process grew by {grown_kb >> 10} MB"
    )
    assert not any("a new worker replaces it" in text for text in caplog.messages)
    assert most_kb < before_kb + (300 << 10)
    assert grown_kb < 300 << 10
