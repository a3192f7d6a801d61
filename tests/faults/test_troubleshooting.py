"""Common problems with PyTorch's loader cannot happen here, or are reported.

docs/troubleshooting.md lists the problems, docs/troubleshooting-tests.md the tests. Most of these
are with the module concerned. This file has the others, and checks that the lists are true.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.errors import WorkerTimeout
from support import scripts
from support.datasets import PROCESS_WAYS, WAYS, Draws, Numbers, assert_same, collect
from support.paths import TESTS

pytestmark = pytest.mark.fault

PAGE = TESTS.parent / "docs" / "troubleshooting.md"
TESTS_PAGE = PAGE.with_name("troubleshooting-tests.md")


# -- "context has already been set" ----------------------------------------------------------------

CONTEXT = """
import multiprocessing, torch
from torch.utils.data import DataLoader as TorchDataLoader
from penstock import DataLoader

def load():
    return [batch.tolist() for batch in DataLoader(range(8), batch_size=4, num_workers=2)]

expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
assert load() == expected
assert multiprocessing.get_start_method(allow_none=True) is None, "ours settled it"
list(TorchDataLoader(range(2), num_workers=1))
try:
    multiprocessing.set_start_method("spawn")
except RuntimeError as error:
    print(error)  # control: after torch's own loader it is what people see
multiprocessing.set_start_method("spawn", force=True)
assert load() == expected
assert multiprocessing.get_start_method() == "spawn"
print("all right")
"""


def test_a_loader_neither_settles_the_start_method_nor_minds_one_that_is_settled(
    tmp_path: Path,
) -> None:
    result = scripts.run(CONTEXT, tmp_path)
    lines = result.stdout.splitlines()
    assert lines == ["context has already been set", "all right"], result.stderr


# -- workers that hang -----------------------------------------------------------------------------

GUARDED = """
import threading
LOCK = threading.Lock()
class Guarded:
    def __len__(self): return 8
    def __getitem__(self, index):
        with LOCK:
            return index
"""


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A dataset whose lock is held by a thread of this process while workers start."""
    (tmp_path / "module_with_a_lock.py").write_text(GUARDED)
    monkeypatch.syspath_prepend(str(tmp_path))
    import module_with_a_lock  # type: ignore[import-not-found]

    is_over = threading.Event()

    def hold() -> None:
        with module_with_a_lock.LOCK:
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    while not module_with_a_lock.LOCK.locked():
        time.sleep(0.001)
    yield module_with_a_lock.Guarded()
    is_over.set()
    thread.join()


def test_a_lock_that_a_thread_of_yours_holds_does_not_hang_the_workers(guarded: Any) -> None:
    loader = DataLoader(guarded, batch_size=4, num_workers=2, timeout=30)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_forked_workers_do_hang_there_and_the_error_names_the_sample(guarded: Any) -> None:
    loader = DataLoader(
        guarded, batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=2.0
    )
    with pytest.raises(WorkerTimeout, match=r"worker 0 is loading sample 0"):
        next(iter(loader))


# -- "DataLoader worker exited unexpectedly" -------------------------------------------------------


class DiesOnce(Draws):
    """Sample 7 kills the worker that loads it, once."""

    def __init__(self, mark: Path | None = None, length: int = 40) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 7 and self.mark is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def epoch(dataset: Any, **arguments: Any) -> list[Any]:
    torch.manual_seed(5)
    return collect(DataLoader(dataset, batch_size=4, shuffle=True, **arguments))


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_a_worker_that_dies_once_costs_a_retry_and_not_a_bit_of_the_epoch(
    way: str, tmp_path: Path
) -> None:
    mark = tmp_path / "died"
    assert_same(epoch(DiesOnce(mark), **WAYS[way]), epoch(DiesOnce(), num_workers=0))
    assert mark.exists()  # control: the worker did die


# -- "An attempt has been made to start a new process before ..." ----------------------------------

UNGUARDED = """
import torch
from {package} import DataLoader
print(*[batch.tolist() for batch in DataLoader(
    range(4), batch_size=2, num_workers=1, multiprocessing_context="spawn")])
"""


@pytest.mark.soak  # slow; test_scripts.py always tests the first half
def test_a_script_without_a_guard_starts_workers_and_torch_s_loader_cannot(tmp_path: Path) -> None:
    ours = scripts.run(UNGUARDED.format(package="penstock"), tmp_path)
    assert (ours.stdout, ours.stderr) == ("[0, 1] [2, 3]\n", "")
    theirs = scripts.run(UNGUARDED.format(package="torch.utils.data"), tmp_path)
    assert "finished its bootstrapping phase" in " ".join(theirs.stderr.split())
    assert "exited unexpectedly" in theirs.stderr


# -- slow start ------------------------------------------------------------------------------------


class Weighed(Numbers):
    """Counts how often it is pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.num_times = 0

    def __getstate__(self) -> dict[str, Any]:
        self.num_times += 1
        return vars(self)


def test_a_dataset_is_serialised_once_and_not_once_for_each_worker() -> None:
    dataset = Weighed()
    for num_epochs in (1, 2):
        collect(DataLoader(dataset, batch_size=2, num_workers=3))
        assert dataset.num_times == num_epochs


# -- the page --------------------------------------------------------------------------------------

SEEDS = [
    "context has already been set",
    "hang",
    "initialization error",
    "memory",
    "exited unexpectedly",
    "pickle",
    "bootstrapping phase",
    "reproduc",
    "slow",
]
NAMED = re.compile(r"`(\w+\.py)::(test_\w+)`")


def rows(page: Path = PAGE) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def missing_tests(text: str) -> list[str]:
    """Return the tests that the page names and that do not exist."""
    missing = []
    for file, name in NAMED.findall(text):
        sources = [path.read_text(encoding="utf-8") for path in TESTS.rglob(file)]
        names = [
            node.name
            for source in sources
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
        ]
        if name not in names:
            missing.append(f"{file}::{name}")
    return missing


def test_the_page_has_a_row_for_every_complaint() -> None:
    complaints = " ".join(row[0] for row in rows()).lower()
    assert [words for words in SEEDS if words not in complaints] == []


def test_every_row_says_what_happens_here_and_names_the_test_that_shows_it() -> None:
    for row, shown in zip(rows(), rows(TESTS_PAGE), strict=True):
        assert len(row) == len(shown) == 2, row
        assert row[0] == shown[0]
        assert row[1].endswith("."), row
        assert NAMED.search(shown[1]), row
        assert not NAMED.search(row[1]), row  # a reader does not need it


def test_every_test_that_the_page_names_exists() -> None:
    assert missing_tests(TESTS_PAGE.read_text(encoding="utf-8")) == []


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert missing_tests("`test_deaths.py::test_nobody_wrote`, `test_none.py::test_x`") == [
        "test_deaths.py::test_nobody_wrote",
        "test_none.py::test_x",
    ]
