"""Low limits on descriptors, address space and shared memory, and batches held for a long time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import DataLoader
from support import scripts
from support.datasets import QUICK_WAYS, WAYS, WORKER_WAYS, Numbers, collect

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]  # the programs share one setup

FEW_FDS = """
import resource, sys, torch
from {package} import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 700
    def __getitem__(self, i): return torch.full((100,), float(i)), torch.full((7,), i), i
batches = [*DataLoader(Data(), batch_size=2, num_workers=1)][:1]  # everything is imported
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
arguments = dict({arguments})
batches = list(DataLoader(Data(), batch_size=2, num_workers=2, timeout=200, **arguments))
assert len(batches) == 350
for n, (image, small, label) in enumerate(batches):
    assert image.unique().tolist() == small.unique().tolist() == label.tolist() == [2*n, 2*n+1]
print("all right")
"""


SMALL_FILES = """
import resource, sys, torch
from penstock import DataLoader
resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, 32 << 20))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return torch.full((1000,), float(i)), i
for n, (image, label) in enumerate(DataLoader(Data(), batch_size=2, num_workers=2)):
    assert image.unique().tolist() == label.tolist() == [2*n, 2*n+1]
print("all right")
"""


BARE_SYSTEM = """
import os
for name in ("fork", "forkpty", "memfd_create", "pidfd_open", "posix_fallocate",
             "sched_getaffinity"):  # register_at_fork stays: torch itself asks for it
    if hasattr(os, name):
        delattr(os, name)
"""
BARE_PROGRAM = """
import os, torch
from penstock import DataLoader
assert not hasattr(os, "fork") and not hasattr(os, "memfd_create")
class Data(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i):
        assert not hasattr(os, "fork") and not hasattr(os, "memfd_create")
        return torch.full((1000,), float(i)), i
loader = DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
for n, (image, label) in enumerate(list(loader)):
    assert image.unique().tolist() == label.tolist() == [2*n, 2*n+1]
print("all right", DataLoader(Data(), num_workers="auto").num_workers >= 1)
"""


def run_bare(folder: Path) -> Any:
    (folder / "sitecustomize.py").write_text(BARE_SYSTEM)  # every interpreter runs this first
    return scripts.run(BARE_PROGRAM, folder, PYTHONPATH=str(folder))


def run_with_few_fds(folder: Path, package: str, arguments: str = "") -> Any:
    return scripts.run(FEW_FDS.format(package=package, arguments=arguments), folder)


FORK = "multiprocessing_context='fork'"
PROGRAMS: dict[str, Callable[[Path], Any]] = {
    "few descriptors, forkserver": lambda folder: run_with_few_fds(folder, "penstock"),
    "few descriptors, fork": lambda folder: run_with_few_fds(folder, "penstock", FORK),
    "few descriptors, torch": lambda folder: run_with_few_fds(folder, "torch.utils.data", FORK),
    "small files": lambda folder: scripts.run(SMALL_FILES, folder),
    "a bare system": run_bare,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all programs in this file, run to completion."""
    return scripts.run_all(
        lambda name: PROGRAMS[name](scripts.make_folder(tmp_path_factory, "starved")),
        list(PROGRAMS),
    )


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_three_hundred_batches_are_held_with_256_descriptors(
    method: str, results: dict[str, Any]
) -> None:
    result = scripts.told(results[f"few descriptors, {method}"])
    assert result.stdout.strip() == "all right", result.stderr


def test_torch_s_own_loader_runs_out_of_descriptors_there(results: dict[str, Any]) -> None:
    result = scripts.told(results["few descriptors, torch"])
    assert result.returncode != 0
    assert "all right" not in result.stdout


def test_a_limit_on_the_size_of_files_is_no_end(results: dict[str, Any]) -> None:
    result = scripts.told(results["small files"])
    assert result.stdout.strip() == "all right", result.stderr


def test_spawn_works_in_a_system_that_has_none_of_linux_s_own_means(
    results: dict[str, Any],
) -> None:
    result = scripts.told(results["a bare system"])
    assert result.stdout.strip() == "all right True", result.stderr


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_without_memfd_a_file_does_the_same_work(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    batches = list(DataLoader(Numbers(60, (3000,)), batch_size=2, **WAYS[way]))
    for number, (image, labels) in enumerate(batches):
        assert image.unique().tolist() == labels.tolist() == [2 * number, 2 * number + 1]
    assert list(tmp_path.iterdir()) == []
    mapped = [m.path for m in psutil.Process().memory_maps(grouped=False)]
    assert any(str(tmp_path) in path for path in mapped)  # control: batches are in a file


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_sixty_four_tensors_held_for_long_stay_right(way: str) -> None:
    held: dict[int, Any] = {}
    loader = DataLoader(Numbers(2000, (300,)), batch_size=1, **WAYS[way])
    for number, (image, _) in enumerate(loader):
        if number % 30 == 0 and len(held) < 64:
            held[number] = image[0, 5:]
    assert len(held) == 64
    for number, piece in held.items():
        assert piece.unique().tolist() == [number]


@pytest.mark.slow
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_sixty_loaders_made_used_for_one_batch_and_dropped_leave_nothing(way: str) -> None:
    process = psutil.Process()

    def use(times: int) -> None:
        for _ in range(times):
            next(iter(DataLoader(Numbers(40, (1000,)), batch_size=4, **WAYS[way])))

    use(5)
    gc.collect()
    before_fds, before_bytes = process.num_fds(), process.memory_info().rss
    use(60 if way in ("inline", "forkserver") else 20)
    gc.collect()
    assert process.num_fds() <= before_fds
    assert process.memory_info().rss - before_bytes < 30 << 20


def test_a_batch_of_a_gigabyte_of_address_space_costs_only_what_is_touched() -> None:
    before = psutil.Process().memory_info().rss
    iterator = iter(DataLoader(Numbers(20, (10,)), batch_size=2, num_workers=2))
    image, _ = next(iterator)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert torch.equal(image[1], torch.ones(10))
    assert len(collect(iterator)) == 9
