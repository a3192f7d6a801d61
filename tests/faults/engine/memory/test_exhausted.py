"""Exhausted resources during loading: batch memory, file descriptors, temporary folders.

Each case ends in a working fallback or in an error that names the missing resource, never in a hang
or SIGBUS.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from support.datasets import PROCESS_WAYS, WAYS, WORKER_WAYS, Numbers, collect

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

MIB = 1 << 20


# -- batch memory ----------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size in a folder while the context is active."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if result.returncode:
        pytest.skip(f"no file system can be mounted here: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder that holds batches, because memfd is disabled. Not mounted yet."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class Growing(Numbers):
    """Samples of half a megabyte, and of eight megabytes in the second half."""

    def __getitem__(self, index: int) -> Any:
        rows = 128 if 2 * index < self.length else 2048
        return torch.full((rows, 1024), float(index)), int(index)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    try:
        with open(path, "wb", buffering=0) as file:
            while file.write(bytes(MIB)):
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def labels_of(batches: Any) -> list[int]:
    """Return the labels in order, checked against the images, without keeping a batch."""
    labels: list[int] = []
    for image, label in batches:
        assert image.min() == image.max() == label.item()
        labels += label.tolist()
    return labels


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_disk_too_small_for_all_slots_costs_speed_and_not_the_epoch(way: str, disk: Path) -> None:
    with mounted(disk, 8 * MIB):
        loader = DataLoader(Numbers(30, (128, 1024)), batch_size=1, **WAYS[way])
        assert labels_of(loader) == list(range(30))
        assert any("No space left" in note for note in loader.plan.notes)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_batches_that_outgrow_the_disk_half_way_still_come(way: str, disk: Path) -> None:
    with mounted(disk, 8 * MIB):
        assert labels_of(DataLoader(Growing(10), batch_size=1, **WAYS[way])) == list(range(10))


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_somebody_else_fills_the_disk_half_way(way: str, disk: Path) -> None:
    with mounted(disk, 32 * MIB):
        iterator = iter(DataLoader(Growing(16), batch_size=1, **WAYS[way]))
        first = next(iterator)[1].tolist()
        fill(disk / "of another")
        assert [*first, *labels_of(iterator)] == list(range(16))


def test_all_batches_may_be_kept_although_the_disk_is_full(disk: Path) -> None:
    with mounted(disk, 8 * MIB):
        batches = list(DataLoader(Numbers(30, (128, 1024)), batch_size=1, num_workers=2))
        assert labels_of(batches) == list(range(30))
        del batches


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_disk_without_room_for_a_single_batch_is_an_error_that_says_so_each_time(
    way: str, disk: Path
) -> None:
    with mounted(disk, 128 << 10):
        loader = DataLoader(Numbers(8, (128, 1024)), batch_size=1, **WAYS[way])
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device") as caught:
                next(iter(loader))
            assert caught.value.errno == errno.ENOSPC
            assert "TMPDIR=" in str(caught.value)
            del caught


def test_an_iterator_without_room_says_so_again_and_goes_on_when_there_is_some(
    disk: Path,
) -> None:
    with mounted(disk, 4 * MIB):
        blocker = disk / "of another"
        blocker.write_bytes(bytes(3 * MIB + (512 << 10)))
        iterator = iter(DataLoader(Numbers(8, (300,)), batch_size=1, num_workers=2))
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device"):
                next(iterator)
        blocker.unlink()
        assert labels_of(iterator) == list(range(8))


# -- file descriptors ------------------------------------------------------------------------------


@contextmanager
def few_descriptors_left(num_left: int = 0) -> Iterator[None]:
    """Leave this process only ``num_left`` file descriptors to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 64, hard))
        while True:
            try:
                taken.append(os.dup(taken[0]))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                break
        for _ in range(num_left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_descriptors_that_run_out_half_way_do_not_matter_to_the_epoch(way: str) -> None:
    iterator = iter(DataLoader(Numbers(400, (300,)), batch_size=2, **WAYS[way]))
    first = next(iterator)[1].tolist()
    with few_descriptors_left():
        rest = []
        for image, label in iterator:
            assert image.unique().tolist() == label.tolist()
            rest += label.tolist()
            del image, label
    assert [*first, *rest] == list(range(400))


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_without_a_descriptor_the_next_epoch_is_an_error_that_says_so_and_later_it_works(
    way: str,
) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, **WAYS[way])
    assert len(collect(loader)) == 10  # imports everything and starts the fork server
    with (
        few_descriptors_left(),
        pytest.raises((OSError, RuntimeError), match="Too many open files"),
    ):
        next(iter(loader))
    assert len(collect(loader)) == 10


def test_wherever_they_run_out_while_workers_start_it_is_an_error_and_not_a_hang() -> None:
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=2)
    assert len(collect(loader)) == 10
    outcomes = []
    for num_left in range(12):
        with few_descriptors_left(num_left):
            try:
                outcomes.append(len(collect(loader)))
            except (OSError, RuntimeError) as error:
                outcomes.append("Too many open files" in str(error))
    assert outcomes[0] is True
    assert outcomes[-1] == 10
    assert set(outcomes) == {True, 10}


def test_persistent_workers_need_no_descriptor_for_the_next_epoch() -> None:
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=2, persistent_workers=True)
    assert len(collect(loader)) == 10
    with few_descriptors_left():
        assert len(collect(loader)) == 10
    loader.close()


# -- folders ---------------------------------------------------------------------------------------

# In a private mount namespace: /dev/shm is full, and the temporary folder is read-only.
NOWHERE = """
mount -t tmpfs -o size=4k tmpfs /dev/shm && (cat /dev/zero > /dev/shm/full 2>/dev/null; true) \\
&& mount -t tmpfs -o ro tmpfs "$TMPDIR" && exec "$0" "$1"
"""
PROGRAM = """
import os, tempfile, torch
from penstock import DataLoader, SharedList
class Data(torch.utils.data.Dataset):
    def __init__(self): self.names = SharedList(str(i) for i in range(20))
    def __len__(self): return 20
    def __getitem__(self, i): return torch.full((3000,), float(self.names[i])), i
def check(**more):
    for n, (image, label) in enumerate(DataLoader(Data(), batch_size=2, num_workers=2, **more)):
        assert image.unique().tolist() == label.tolist() == [2*n, 2*n+1]
def is_refused(path):
    try:
        open(path, "w").close()
    except OSError:
        return True
assert os.statvfs("/dev/shm").f_bfree == 0 and is_refused(os.environ["TMPDIR"] + "/x")
tempfile._candidate_tempdir_list = lambda: [os.environ["TMPDIR"]]  # there is no other
check()
check(multiprocessing_context="fork")
print("works")
del os.memfd_create  # a system without it needs a folder, and there is none
try:
    check()
except OSError as error:
    print(type(error).__name__, error)
"""


def test_a_full_dev_shm_and_a_read_only_folder_do_not_matter_where_there_is_a_memfd(
    tmp_path: Path,
) -> None:
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare command here")
    program, folder = tmp_path / "program.py", tmp_path / "read-only"
    program.write_text(PROGRAM)
    folder.mkdir()
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", NOWHERE, sys.executable, str(program)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if result.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no private file system can be made here: {result.stderr.strip()}")
    works, _, refusal = result.stdout.partition("\n")
    assert works == "works", result.stderr
    assert refusal.startswith("FileNotFoundError"), result.stderr  # the error without a folder
    assert "TMPDIR=" in refusal
