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


HIDDEN = """
import sys, torch
import numpy as np
from penstock import DataLoader
first = {first}

class Draws:
    def __len__(self): return 64
    def __getitem__(self, index):
        if index < first:
            return 0.0
        return float(getattr(np, "".join(["ran", "dom"])).rand())  # no search of the code finds it

def load(**way):
    print(torch.cat(list(DataLoader(Draws(), batch_size=16, seed=7, **way))).tolist())

assert "numpy.random" not in sys.modules
"""
INLINE_FIRST = """
load(num_workers=0)
assert ("numpy.random" in sys.modules) == (first < 64)
load(num_workers=0)
load(num_workers=2)
load(num_workers=2, pool="thread")
"""
WORKERS_FIRST = """
load(num_workers=2)
load(num_workers=1)
assert "numpy.random" not in sys.modules
load(num_workers=0)
"""


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports numpy.random itself")
@pytest.mark.parametrize("first", [0, 3, 20, 64], ids=["first", "observed", "unseeded", "never"])
@pytest.mark.parametrize("loads", [INLINE_FIRST, WORKERS_FIRST], ids=["inline", "in workers"])
def test_a_sample_that_imports_it_is_loaded_again(first: int, loads: str, tmp_path: Path) -> None:
    program = HIDDEN.replace("{first}", str(first)) + loads
    told = scripts.run(program, tmp_path, PYTHONPATH=str(REPO / "src"))
    assert told.returncode == 0, told.stderr
    cold, *others = told.stdout.splitlines()
    assert others == [cold] * (loads.count("load(") - 1)
    assert len(set(cold.strip("[]").split(", "))) == min(65 - first, 64)


CALLERS = """
import sys, torch
import numpy as np
from penstock import DataLoader

class Imports:
    def __len__(self): return 4
    def __getitem__(self, index):
        import numpy.random
        return index

list(DataLoader(Imports(), batch_size=2, seed=7))
print(np.random.rand())
"""


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports numpy.random itself")
def test_the_caller_finds_an_unseeded_generator(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(REPO / "src")}
    told = {scripts.run(CALLERS, tmp_path, **env).stdout for _ in range(2)}
    assert len(told) == 2


WHO_IMPORTS = """
import sys, torch
from penstock import DataLoader

class Imported:
    def __len__(self): return 4
    def __getitem__(self, index):
        {code}
        return int("numpy.random" in sys.modules)

print(torch.cat(list(DataLoader(Imported(), batch_size=2, num_workers=2, {options}))).tolist())
"""


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports numpy.random itself")
@pytest.mark.parametrize(
    ("code", "options", "imported"),
    [
        ("pass", "", 0),
        ("random = __import__('random').random", "", 1),
        ("pass", "worker_init_fn=print", 1),
        ("pass", "randomness='worker'", 1),
        ("pass", "collate_fn=torch.tensor", 1),
    ],
    ids=["draws nothing", "names random", "init", "worker's seeds", "collate"],
)
def test_workers_import_it_only_where_it_may_be_used(
    code: str, options: str, imported: int, tmp_path: Path
) -> None:
    program = WHO_IMPORTS.replace("{code}", code).replace("{options}", options)
    told = scripts.run(program, tmp_path, PYTHONPATH=str(REPO / "src"))
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == str([imported] * 4)
