"""The image folder example, run plain and then packed, as a new user runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import EXAMPLES

pytestmark = pytest.mark.vision
EXAMPLE = EXAMPLES / "image_folder.py"
NAME = "image_folder"


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="makes its images with Pillow")
def test_a_folder_trains_and_packed_it_trains_to_the_same_loss(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss ([\d.]+)", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert (tmp_path / "packed" / "manifest.json").exists()
