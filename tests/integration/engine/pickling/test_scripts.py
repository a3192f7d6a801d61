"""Scripts without a main guard, with lambdas and their own classes, run unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import scripts

pytestmark = pytest.mark.timeout(300)  # the programs share one setup

PROGRAM = """
print("main runs", flush=True)
import collections, json, sys, warnings
warnings.filterwarnings("ignore", "This DataLoader will create")  # said on machines with 2 cores
from dataclasses import dataclass
import torch
from {package} import DataLoader

scale = 2.0
Pair = collections.namedtuple("Pair", "x y")

@dataclass
class Record:
    a: torch.Tensor
    n: int

class Bag:
    __slots__ = ("images",)
    def __init__(self, samples):
        self.images = torch.utils.data.default_collate([s[0] for s in samples])

class Failure(ValueError):
    pass

class Data(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 20
    def __getitem__(self, i):
        if i < 0:
            raise Failure("negative", i)
        return self.transform(torch.full((3,), float(i))), Pair(i, "s%d" % i), {record}

context = sys.argv[1] if len(sys.argv) > 1 else None
most, few = (4, 4) if context is None else (1, 1)  # the others start slowly
data = Data(lambda x: x * scale)

def load(num_workers, **arguments):
    return DataLoader(data, num_workers=num_workers, multiprocessing_context=context, **arguments)

first = list(load(most, batch_size=5))
second, caught = [], "nothing"
try:
    for bag in load(few, batch_size=10, sampler=[*range(20), -1], collate_fn=lambda l: Bag(l)):
        second.append(bag)
except Failure as error:
    caught = [type(error).__name__, list(error.args)]
print(json.dumps({{
    "sums": [b[0].sum().item() for b in first],
    "names": first[1][1].y[0],
    "classes": [type(first[0][1]) is Pair, type(first[0][2]) is Record,
                type(second[0]) is Bag],
    "bags": [list(b.images.shape) for b in second],
    "caught": caught,
}}), flush=True)
"""

ANSWER = {
    "sums": [2.0 * 3 * sum(range(n, n + 5)) for n in (0, 5, 10, 15)],
    "names": "s5",
    "classes": [True, True, True],
    "bags": [[10, 3], [10, 3]],
    "caught": ["Failure", ["negative", -1]],
}


def program(package: str = "penstock", record: str = "Record(torch.ones(2) * i, i)") -> str:
    return PROGRAM.format(package=package, record=record)


CELLS = [
    program().replace("len(sys.argv) > 1", "False"),
    # A class that is redefined, as in a notebook. The loader must use the new one.
    """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * 1000
print("again", [b.tolist() for b in DataLoader(Data(), batch_size=4, num_workers=4)][0])
""",
    # A global that changes between cells.
    """
scale = -1.0
print("changed", sum(b.sum().item() for b in DataLoader(
    [torch.ones(1)] * 4, num_workers=2, collate_fn=lambda l: l[0] * scale)))
""",
]


NOTEBOOK = """
import json, sys, nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

notebook = new_notebook(cells=[new_code_cell(cell) for cell in json.load(sys.stdin)])
NotebookClient(notebook, kernel_name="python3", timeout=240).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


PACKAGE = """
from . import parts
import sys, torch
from penstock import DataLoader
print("parent", end=" ")  # stays in the buffer while workers start
class D(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): print("sample", i); return i + parts.offset
print(*[b.tolist() for b in DataLoader(D(), batch_size=2, num_workers=2)])
sys.exit(5)
"""


def run_package(folder: Path) -> Any:
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("offset = 100\n")
    (package / "train.py").write_text(PACKAGE)
    runner = "import runpy; runpy.run_module('mine.train', run_name='__main__', alter_sys=True)"
    return scripts.run(runner, folder, PYTHONUNBUFFERED="")  # buffered, so lines do not mix


def run_piped_under_spawn(folder: Path) -> Any:
    return scripts.run(program(), folder, "spawn", piped=True)


PROGRAMS: dict[str, Callable[[Path], Any]] = {
    "a file, spawn": lambda folder: scripts.run(program(), folder, "spawn"),
    "a file, fork server": lambda folder: scripts.run(program(), folder),
    "a file, fork": lambda folder: scripts.run(program(), folder, "fork"),
    "piped, fork server": lambda folder: scripts.run(program(), folder, piped=True),
    "piped, spawn": run_piped_under_spawn,
    "torch's own loader, spawn": lambda folder: scripts.run(
        program("torch.utils.data", record="i"), folder, "spawn"
    ),
    "a module of a package": run_package,
    "a notebook": lambda folder: scripts.run(NOTEBOOK, folder, stdin=json.dumps(CELLS)),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all programs in this file, run to completion."""
    return scripts.run_all(
        lambda name: PROGRAMS[name](scripts.make_folder(tmp_path_factory, "program")),
        list(PROGRAMS),
    )


@pytest.mark.parametrize(
    "name",
    ["a file, fork server", "a file, spawn", "a file, fork", "piped, fork server", "piped, spawn"],
)
def test_a_program_without_a_guard_runs(name: str, results: dict[str, Any]) -> None:
    result = scripts.told(results[name])
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines.count("main runs") == 1, "the main module was run again"
    assert json.loads(lines[-1]) == ANSWER
    assert result.stderr == ""


def test_torch_s_own_loader_cannot_run_that_program_under_spawn(results: dict[str, Any]) -> None:
    result = scripts.told(results["torch's own loader, spawn"])
    assert result.returncode != 0
    assert "lambda" in result.stderr


def test_a_program_that_is_a_module_of_a_package_runs(results: dict[str, Any]) -> None:
    result = scripts.told(results["a module of a package"])
    assert "[100, 101] [102, 103]" in result.stdout, result.stderr


def test_a_notebook_runs_with_classes_and_lambdas_of_its_cells(results: dict[str, Any]) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    result = scripts.told(results["a notebook"])
    assert result.returncode == 0, result.stderr
    printed = []
    for outputs in json.loads(result.stdout.splitlines()[-1]):
        assert {output["name"] for output in outputs} <= {"stdout"}, outputs
        printed.append("".join(output["text"] for output in outputs))
    assert json.loads(printed[0].splitlines()[-1]) == ANSWER
    assert printed[0].count("main runs") == 1
    assert printed[1].strip() == "again [0, 1000, 2000, 3000]"
    assert printed[2].strip() == "changed -4.0"


def test_exit_code_and_output_are_the_program_s_own_and_come_once(results: dict[str, Any]) -> None:
    result = scripts.told(results["a module of a package"])
    words = "parent [100, 101] [102, 103] sample 0 sample 1 sample 2 sample 3"
    assert sorted(result.stdout.split()) == sorted(words.split())
    assert (result.returncode, result.stderr) == (5, "")


OBJECTS = """
import collections, sys
import torch
import torch.backends.cudnn as cudnn
from penstock import DataLoader

Pair = collections.namedtuple("Pair", "x y")

class Counted(dict):
    __slots__ = ("count",)

class Slotted:
    __slots__ = ("x", "y")

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        torch.backends.mkldnn.enabled
        counted, slotted = Counted(i=i), Slotted()
        counted.count, slotted.x = i, i
        return Pair(i, [Pair(i, counted)]), slotted

def init(worker):
    torch.backends.cudnn.deterministic = True
    cudnn.benchmark = False
    assert torch.backends.cudnn.deterministic and torch.ops.aten.add

method = sys.argv[1] if sys.argv[1:] else None
given = dict(collate_fn=list, worker_init_fn=init, multiprocessing_context=method)
for batch in DataLoader(Data(), 2, num_workers=2, **given):
    for pair, slotted in batch:
        assert type(pair) is Pair and type(slotted) is Slotted
        assert not hasattr(pair, "__dict__") and not hasattr(slotted, "y")
        counted = pair.y[0].y
        print(pair.x, slotted.x, type(counted) is Counted, counted, counted.count)
"""


@pytest.mark.parametrize("method", [[], ["spawn"]])
def test_named_tuples_and_slots_come_back_and_torch_s_own_modules_travel(
    method: list[str], tmp_path: Path
) -> None:
    done = scripts.run(OBJECTS, tmp_path, *method)
    lines = [f"{i} {i} True {{'i': {i}}} {i}" for i in range(4)]
    assert done.stdout.splitlines() == lines, done.stderr
