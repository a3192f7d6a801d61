"""``numpy.random`` is imported by the process that loads samples, not by importing the loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support import scripts
from support.paths import REPO

PROGRAM = """
import sys, torch
from penstock import DataLoader
assert "numpy.random" not in sys.modules, "imported"

class Draws:
    def __len__(self): return 12
    def __getitem__(self, index):
        import numpy as np
        return float(np.random.rand())

ways = [dict(num_workers=2), dict(num_workers=0), dict(num_workers=2, pool="thread")]
for way in ways:
    print(torch.cat(list(DataLoader(Draws(), batch_size=4, seed=7, **way))).tolist())
"""


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports numpy.random itself")
def test_samples_draw_the_same_numbers_where_nothing_has_imported_it(tmp_path: Path) -> None:
    told = scripts.run(PROGRAM, tmp_path, PYTHONPATH=str(REPO / "src"))
    assert told.returncode == 0, told.stderr
    workers, inline, threads = told.stdout.splitlines()
    assert workers == inline == threads
    assert len(set(workers.strip("[]").split(", "))) == 12


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports numpy.random itself")
def test_control_the_program_notices_an_early_import(tmp_path: Path) -> None:
    told = scripts.run("import numpy.random\n" + PROGRAM, tmp_path, PYTHONPATH=str(REPO / "src"))
    assert told.returncode == 1
    assert "AssertionError: imported" in told.stderr
