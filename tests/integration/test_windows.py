"""Programs and files as on Windows: no fork, open files that stay, paths of every form.

The windows leg runs these tests with CPython for Windows (``make test-windows``). The core leg runs
most of them too, because they must hold everywhere. Few programs make many checks, because
each one imports torch, which takes seconds, and a quarter of a minute in translated code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import DataLoader, Packed, cached, pack
from penstock.errors import AlreadyThere
from penstock.sources.file_locks import packing_lock
from support import command_line, leftovers, scripts
from support.datasets import Numbers, Samples, assert_same, collect

pytestmark = [pytest.mark.windows, pytest.mark.timeout(300)]

IS_WINDOWS = sys.platform == "win32"
NAMES = ["with spaces", "größe-数据", "x" * 120 + "/" + "y" * 120]
"""Names of folders. The last one makes a path longer than the 260 characters of old Windows."""


def is_wine() -> bool:
    return IS_WINDOWS and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")  # type: ignore[attr-defined]


GUARDLESS = """
import glob, json, os, random, sys, tempfile
import torch
from penstock import DataLoader, cached

print("main runs", flush=True)
scale = 3.0

class Data(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return self.transform(float(i)) + torch.rand(2), random.random(), os.getpid()

def load(num_workers, **more):
    torch.manual_seed(0)
    return DataLoader(Data(lambda x: x * scale), batch_size=4, shuffle=True,
                      num_workers=num_workers, **more)

def bits(loader):
    return [(x.tolist(), y.tolist()) for x, y, _ in loader]

def shared_files():
    return glob.glob(os.path.join(tempfile.gettempdir(), "penstock-*"))

report = {}
inline = bits(load(0))
loader = load(2, persistent_workers=True)
batches = list(loader)
report["same bits"] = [(x.tolist(), y.tolist()) for x, y, _ in batches] == inline
pids = sorted({pid for batch in batches for pid in batch[2].tolist()})
report["elsewhere"] = len(pids) == 2 and os.getpid() not in pids
report["files in use"] = bool(shared_files())
again = list(loader)
report["persistent"] = sorted({pid for batch in again for pid in batch[2].tolist()}) == pids
del batches, again
loader.close()
del loader
report["files left"] = len(shared_files())
kept = cached([[float(i)] for i in range(8)], "ram")
still_open = iter(DataLoader(kept, num_workers=1))
report["cached"] = [next(still_open)[0].item() for _ in range(4)]
print(json.dumps(report), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_piped", [False, True], ids=["a file", "python -"])
def test_a_script_without_a_guard_gives_the_same_bits_with_workers(
    is_piped: bool, tmp_path: Path
) -> None:
    folder = tmp_path / NAMES[0] / NAMES[1]
    folder.mkdir(parents=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = scripts.run(
        GUARDLESS, folder, piped=is_piped, TMP=str(scratch), TEMP=str(scratch), TMPDIR=str(scratch)
    )
    assert result.returncode == 0, result.stderr
    first, report = result.stdout.splitlines()  # a main module that runs again would print more
    assert first == "main runs"
    assert json.loads(report) == {
        "same bits": True,
        "elsewhere": True,
        "files in use": IS_WINDOWS,  # control: there, batches are in a named file
        "persistent": True,
        "files left": 0,
        "cached": [0.0, 1.0, 2.0, 3.0],
    }
    assert os.listdir(scratch) == []
    assert result.stderr == ""


TORCH = """
import torch
from torch.utils.data import DataLoader
print("main runs", flush=True)
list(DataLoader(range(4), num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn"))
"""


@pytest.mark.slow
def test_control_torch_s_own_loader_needs_a_guard_and_no_lambda(tmp_path: Path) -> None:
    result = scripts.run(TORCH, tmp_path)
    assert result.returncode != 0
    assert "lambda" in result.stderr


# -- pipes that hold 8 KiB -------------------------------------------------------------------------


@pytest.mark.skipif(not IS_WINDOWS, reason="other systems have non-blocking pipes")
def test_messages_without_a_reader_wait_in_order() -> None:
    from penstock.engine.memory.windows_handles import Writer

    reader, ours = multiprocessing.Pipe()
    messages = [bytes([number]) * 20_000 for number in range(3)]
    writer = Writer(ours)
    for message in messages:
        writer.send_bytes(message)
    assert [reader.recv_bytes() for _ in messages] == messages
    plain = threading.Thread(target=ours.send_bytes, args=(messages[1],))
    plain.start()
    plain.join(1.0)
    assert plain.is_alive()  # control: multiprocessing waits for a reader
    assert reader.recv_bytes() == messages[1]
    plain.join()
    reader.close()
    with pytest.raises(OSError, match=r"(?i)pipe"):
        writer.send_bytes(b"x")
    writer.close()
    ours.close()


class Waiting(Samples):
    """Reaches its worker only after the file ``path`` exists."""

    def __init__(self, path: Path) -> None:
        super().__init__(float, length=40_000)
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        limit = time.monotonic() + 240.0
        while not self.path.exists():
            if time.monotonic() > limit:
                raise TimeoutError("the program waited for its worker")
            time.sleep(0.01)


@pytest.mark.slow
def test_a_program_goes_on_while_its_workers_start(tmp_path: Path) -> None:
    """The indices of a batch do not fit in the pipe of a worker that is not there yet."""
    loader = DataLoader(Waiting(tmp_path / "go on"), batch_size=10_000, num_workers=1)
    iterator = iter(loader)
    (tmp_path / "go on").touch()
    assert sum(len(batch) for batch in iterator) == 40_000


class Verbose(Samples):
    """Every 20th sample fails with a long message."""

    def __getitem__(self, index: int) -> Any:
        if index % 20 == 0:
            raise ValueError(f"{index}: " + "x" * 400)
        return super().__getitem__(index)


@pytest.mark.slow
def test_long_requests_and_long_replies_do_not_block_each_other() -> None:
    loader = DataLoader(
        Verbose(float, length=40_000), batch_size=5_000, num_workers=1, on_error="skip"
    )
    assert sum(len(batch) for batch in loader) == 38_000
    assert len(loader.bad_samples) == 2_000  # control: the replies were long


# -- kills and hangs -------------------------------------------------------------------------------


class Fatal(Samples):
    """Ends its worker at one sample, once. ``marker`` remembers it."""

    def __init__(self, marker: Path, *, hangs: bool) -> None:
        super().__init__(float, length=24)
        self.marker, self.hangs = marker, hangs

    def __getitem__(self, index: int) -> Any:
        if index == 13 and not self.marker.exists():
            self.marker.touch()
            if self.hangs:
                time.sleep(3600)
            psutil.Process().kill()  # TerminateProcess on Windows
        return super().__getitem__(index)


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hung"])
def test_a_worker_that_is_lost_is_replaced_and_the_bits_are_the_same(
    hangs: bool, tmp_path: Path
) -> None:
    marker = tmp_path / "met"
    loader = DataLoader(
        Fatal(marker, hangs=hangs),
        batch_size=4,
        num_workers=1,
        sample_timeout_s=3.0 if hangs else None,
        on_error="skip",
    )
    found = collect(loader)
    assert marker.exists()  # control: the sample was met
    assert_same(found, collect(DataLoader(Samples(float, length=24), batch_size=4)))
    assert loader.bad_samples == []


INTERRUPTED = """
import ctypes, threading, time, torch
from penstock import DataLoader

class Slow:
    def __len__(self):
        return 10_000
    def __getitem__(self, i):
        time.sleep(0.05)
        return i

def interrupt():
    ctypes.WinDLL("kernel32").GenerateConsoleCtrlEvent(0, 0)  # to all programs of this console

loader = DataLoader(Slow(), num_workers=1)
try:
    for i, batch in enumerate(loader):
        if i == 2:
            threading.Thread(target=interrupt).start()
except KeyboardInterrupt:
    print("interrupted")
print([batch.item() for batch, _ in zip(loader, range(2))])
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_WINDOWS, reason="other systems send a signal")
def test_ctrl_c_interrupts_the_loop_and_no_worker(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(INTERRUPTED)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        creationflags=0x08000000,  # CREATE_NO_WINDOW: with a console of its own
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    assert ended.stdout.splitlines() == ["interrupted", "[0, 1]"], ended.stderr
    assert (ended.returncode, ended.stderr) == (0, "")


KILLED = """
import os, time, torch
from penstock import DataLoader
loader = DataLoader(range(100), num_workers=1, persistent_workers=True)
iterator = iter(loader)
next(iterator)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.fault
@pytest.mark.slow
def test_nothing_outlives_a_program_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("TMP", "TEMP", "TMPDIR"):
        monkeypatch.setenv(name, str(scratch))
    with scripts.running(KILLED, tmp_path) as program:
        scripts.read_line(program, "ready")
        family = scripts.family_of(program.pid)
        assert family  # control: there was a worker
        assert bool(os.listdir(scratch)) is IS_WINDOWS  # control: its shared files
        program.kill()
        program.wait()
        assert leftovers.wait_until_gone(family) == []
    assert os.listdir(scratch) == []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES, ids=["spaces", "non-ASCII", "long"])
def test_sets_and_caches_work_under_every_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    kept = cached(Numbers(12), folder / "cache")
    datasets: list[Any] = [kept, kept]
    if not is_wine() or len(name) < 200:  # its GetFinalPathNameByHandle fails for long paths
        datasets += [pack(Numbers(12), folder / "set", workers=0), Packed(folder / "set")]
    for dataset in datasets:
        assert [int(dataset[index][1]) for index in range(12)] == [*range(12)]


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_workers_pack_the_same_files_and_leave_no_others(tmp_path: Path) -> None:
    for workers in (0, 2):
        pack(Numbers(24), tmp_path / str(workers), workers=workers, shard_bytes=1)
    found = content_of(tmp_path / "2")
    assert found == content_of(tmp_path / "0")
    assert len(found) > 10  # control: the workers had several shards
    assert not [name for name in found if name.startswith(".")]


def test_a_set_that_nobody_uses_any_more_can_be_deleted_and_packed_again(tmp_path: Path) -> None:
    packed = pack(Numbers(12), tmp_path / "set", workers=0)
    sample = packed[3][0].clone()
    if IS_WINDOWS:
        with pytest.raises(PermissionError):  # control: the files are mapped
            shutil.rmtree(tmp_path / "set")
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
    del packed
    shutil.rmtree(tmp_path / "set")
    again = pack(Numbers(12), tmp_path / "set", workers=0)
    assert (again[3][0] == sample).all()


def test_two_workers_fill_one_cache_and_read_a_packed_set(tmp_path: Path) -> None:
    packed = pack(Numbers(24), tmp_path / "set", workers=0)
    kept = cached(Numbers(24), tmp_path / "cache")
    both = torch.utils.data.ConcatDataset([packed, kept])
    inline = collect(DataLoader(Numbers(24), batch_size=4))
    for _ in range(2):  # computed, then cached
        assert_same(collect(DataLoader(both, batch_size=4, num_workers=2)), inline + inline)


def test_paths_with_drive_letters_are_taken(tmp_path: Path) -> None:
    """``C:/set`` must not be read as a scheme or as ``script.py:dataset``."""
    packed = pack(Numbers(4), (tmp_path / "set").as_posix(), workers=0)
    assert len(Packed((tmp_path / "set").as_posix())) == len(packed) == 4
    (tmp_path / "data.py").write_text("dataset = [1, 2, 3]\n")
    done = command_line.invoke("pack", f"{tmp_path / 'data.py'}:dataset", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert len(Packed(tmp_path / "out")) == 3
    wrong = command_line.invoke("pack", f"{tmp_path / 'data.py'}:nothing", str(tmp_path / "no"))
    assert wrong.exit_code == 2  # control


def test_two_programs_cannot_pack_into_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    with packing_lock(str(tmp_path)):
        ended = subprocess.run(command, input="", capture_output=True, text=True, check=False)
        assert "AlreadyThere" in ended.stderr, ended.stderr
    assert os.listdir(tmp_path) == []
    free = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert free.returncode == 0, free.stderr  # control


LOCKED = """
import sys
from penstock.sources.file_locks import packing_lock
with packing_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_program_is_free(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", LOCKED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == b"locked"
        with pytest.raises(AlreadyThere), packing_lock(str(tmp_path)):
            pass  # control
        program.kill()
    with packing_lock(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == []


def test_a_trace_that_another_program_reads_costs_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for _ in DataLoader(range(4), trace=str(path)):
        pass
    gc.collect()
    loader = DataLoader(range(4), trace=str(path))
    with path.open("rb") as reader:
        # Windows does not replace an open file.
        warns = pytest.warns(UserWarning, match="run.json cannot be written")
        with warns if IS_WINDOWS else contextlib.nullcontext():
            assert len(list(loader)) == 4
        assert reader.read(1)
    assert os.listdir(tmp_path) == ["run.json"]


# -- commands --------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(range(8), batch_size=4, collate_fn=lambda b: torch.tensor(b))
print("batches", [b.tolist() for b in loader])
"""


@pytest.mark.slow
def test_penstock_run_runs_a_script_with_workers(tmp_path: Path) -> None:
    (tmp_path / "train it.py").write_text(TRAINING)
    command = [sys.executable, "-m", "penstock", "run", "--workers", "1", "train it.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "batches [[0, 1, 2, 3], [4, 5, 6, 7]]" in ended.stdout


def test_doctor_describes_this_machine() -> None:
    done = command_line.invoke("doctor")
    assert done.exit_code == 0, done.output
    assert ("win32" in done.output) is IS_WINDOWS
