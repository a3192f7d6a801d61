"""The documented rules for objects that reach a worker, one test per statement."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tarfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader
from penstock.engine.parent.launcher import Launcher
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel
from support.paths import DOCS
from support.pickling import Holder, arrived, round_trip
from support.scripts import run

pytestmark = pytest.mark.legacy

PAGE = DOCS / "errors" / "T01.md"


# -- errors/T01.md: objects that cannot be sent ----------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def memory_of_values() -> None:
    """Allocate multiprocessing's shared heap, which is created with the first value and kept."""
    multiprocessing.get_context("fork").Value("i", 0)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda", 0)


def files(stack: ExitStack, folder: Path) -> Iterator[Any]:
    path = folder / "written"
    with open(path, "w") as file, tarfile.open(folder / "written.tar", "w") as archive:
        yield file
        yield archive
    with open(path, "rb") as file:
        path.unlink()
        yield file


def connections(stack: ExitStack, folder: Path) -> Iterator[Any]:
    one, other = socket.socketpair()
    yield stack.enter_context(one)
    yield Holder(pool=[Holder(sock=stack.enter_context(other))])


def pipes(stack: ExitStack, folder: Path) -> Iterator[Any]:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "wb") as writer:
        yield reader
        yield writer
    for end in multiprocessing.Pipe():
        yield stack.enter_context(closing(end))


def children(stack: ExitStack, folder: Path) -> Iterator[Any]:
    command = [sys.executable, "-c", "input()"]
    child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
    yield child


def running(stack: ExitStack, folder: Path) -> Iterator[Any]:
    yield (number for number in range(3))
    over = threading.Event()
    stack.callback(over.set)
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield thread


def gpu_tensors(stack: ExitStack, folder: Path) -> Iterator[Any]:
    yield torch.zeros(2).as_subclass(OnGpu)


def fork_primitives(stack: ExitStack, folder: Path) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    stack.callback(queue.close)
    yield from (context.Lock(), context.Value("i", 0), queue)


def without_content(stack: ExitStack, folder: Path) -> Iterator[Any]:
    target = Thing()
    stack.callback(lambda: target)  # keeps it alive
    yield from (weakref.ref(target), random.SystemRandom())


class Thing:
    pass


def on_windows(stack: ExitStack, folder: Path) -> Iterator[Any]:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    stack.callback(queue.close)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(sys, "platform", "win32")
    yield queue


def stand_in(stack: ExitStack, module: str, name: str) -> Any:
    """Return an object of a class of a library. ``test_format_libraries.py`` has the real ones."""
    made = types.ModuleType(module)
    kind = type(name, (), {"__module__": module})
    setattr(made, name, kind)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setitem(sys.modules, module, made)
    return kind()


def without_path(stack: ExitStack, folder: Path) -> Iterator[Any]:
    yield stand_in(stack, "torchcodec.decoders", "VideoDecoder")
    yield stand_in(stack, "pyarrow.parquet", "ParquetFile")
    yield stand_in(stack, "pyarrow.ipc", "RecordBatchFileReader")
    yield stand_in(stack, "lance.file", "LanceFileReader")


def in_memory(stack: ExitStack, folder: Path) -> Iterator[Any]:
    yield stand_in(stack, "obstore.store", "MemoryStore")
    yield stand_in(stack, "fsspec.implementations.memory", "MemoryFileSystem")


ROWS: dict[str, Callable[[ExitStack, Path], Iterator[Any]]] = {
    "an open file, archive or database that is written to, or whose file was deleted": files,
    "a torchcodec decoder, a `pq.ParquetFile`, a reader of Arrow IPC or Lance files": without_path,
    "a `MemoryStore` of obstore, a memory file system of fsspec": in_memory,
    "a socket, also inside a connection, a pool or a driver of a library": connections,
    "an end of a pipe (`os.pipe`, `multiprocessing.Pipe`)": pipes,
    "a running child process (`subprocess.Popen`, `multiprocessing.Process`)": children,
    "a generator, a running thread": running,
    "a weak reference, a `random.SystemRandom`": without_content,
    "a tensor on a GPU": gpu_tensors,
    "a lock, value or queue of multiprocessing's *fork* context": fork_primitives,
    "on Windows: any multiprocessing primitive that holds a handle": on_windows,
}


def test_every_row_of_the_table_has_its_case_here() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [row for row in rows if row not in ("object", "---")] == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_lists_is_refused_by_its_attribute(row: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for part in ROWS[row](stack, tmp_path):
            with pytest.raises(CannotTravel) as info:
                PickledObjects({"dataset": Holder(plain=1, part=part)})
            assert info.value.path.startswith("dataset.part")  # type: ignore[attr-defined]
            assert "Try: " in str(info.value)
    PickledObjects({"dataset": Holder(plain=1, part=None)})  # control: the rest can be sent


def test_it_is_raised_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(Launcher, "start", lambda *_, **__: started.append(1))
    with pytest.raises(CannotTravel):
        iter(DataLoader([(number for number in range(3))], num_workers=1))
    assert started == []


class Counting:
    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.table[f"seen {index}"] = True
        return int(self.table["offset"]) + index


def test_objects_of_a_manager_travel() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        table = manager.dict(offset=10)
        batches = list(DataLoader(Counting(table), batch_size=4, num_workers=1))
        assert batches[0].tolist() == [10, 11, 12, 13]
        assert "seen 3" in table


def test_threads_are_sent_nothing() -> None:
    """An iterator that cannot be sent to a process is used in place."""
    numbers = iter([5, 6, 7, 8])
    dataset = Counting({"offset": 0})
    dataset.draw = lambda: next(numbers)  # type: ignore[attr-defined]
    assert list(DataLoader(dataset, batch_size=4, num_workers=1, pool="thread"))
    assert dataset.table["seen 3"] is True  # the same object


# -- sharing.md ------------------------------------------------------------------------------------


def test_a_tensor_made_from_a_memmap_travels_by_value(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r+")
    for value, is_copied in ((torch.from_numpy(mapped), True), (mapped, False)):
        back, pickle_file = round_trip(value)
        assert (pickle_file.location.num_bytes > mapped.nbytes) == is_copied
        np.testing.assert_array_equal(np.asarray(back), np.arange(100_000))
        pickle_file.close()


def test_a_plain_list_is_a_copy_of_its_own() -> None:
    names = ["a", "b"]
    back = arrived(names)
    back.append("c")
    assert names == ["a", "b"]


# -- compatibility.md: objects that reach a worker -------------------------------------------------

HELPER = 'VALUE = "as imported"\n'
PROGRAM = """
import json, logging, multiprocessing, os, sys
import numpy as np
import psutil
import torch
import helper
from penstock import DataLoader

TABLE = {"a": 1}
helper.VALUE = "changed"
torch.use_deterministic_algorithms(True)
logging.getLogger().addHandler(logging.NullHandler())
os.environ["SET_LATE"] = "yes"
sys.path.append("/added")

def num_threads():
    return len(os.listdir("/proc/self/task"))

class Facts:
    def __len__(self): return 1
    def __getitem__(self, index):
        before = num_threads()
        np.ones((400, 400)) @ np.ones((400, 400))
        TABLE["a"] = "changed by the worker"
        return json.dumps({
            "globals": [TABLE["b"], helper.VALUE],
            "main": hasattr(sys.modules["__main__"], "TABLE"),
            "argv": sys.argv[1:],
            "path": "/added" in sys.path,
            "environ": os.environ.get("SET_LATE"),
            "folder": os.getcwd(),
            "stdin": sys.stdin.read(),
            "hash": hash("penstock"),
            "torch_threads": torch.get_num_threads(),
            "blas_threads": num_threads() - before,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "handlers": len(logging.getLogger().handlers),
            "pid": os.getpid(),
        })

TABLE["b"] = "as it is now"
batches = iter(DataLoader(Facts(), batch_size=None, num_workers=1))
facts = json.loads(next(batches))
facts["is_listed"] = facts["pid"] in [child.pid for child in multiprocessing.active_children()]
family = psutil.Process().children(recursive=True)
facts["is_seen"] = facts["pid"] in [child.pid for child in family]
facts["table"] = TABLE["a"]
facts["own_hash"] = hash("penstock")
facts["own"] = [torch.are_deterministic_algorithms_enabled(), len(logging.getLogger().handlers)]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module", params=["copy", "fresh"])
def facts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What a worker sees whose fork server is a copy of the program, or a fresh Python."""
    if sys.platform != "linux":
        pytest.skip("about the fork server, and reads /proc")
    folder = tmp_path_factory.mktemp("program")
    (folder / "helper.py").write_text(HELPER)
    variables = {"PYTHONHASHSEED": ""} if "PYTHONHASHSEED" in os.environ else {}
    if request.param == "fresh":
        variables["PENSTOCK_FORK_SERVER"] = "fresh"
    done = run(PROGRAM, folder, "one", "two", stdin="not for workers", **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["wanted_folder"] = str(folder)
    found["is_copy"] = request.param == "copy"
    return found


def test_globals_of_the_script_are_there_as_they_are_now(facts: dict[str, Any]) -> None:
    assert facts["globals"][0] == "as it is now"


def test_changes_that_a_worker_makes_to_them_stay_there(facts: dict[str, Any]) -> None:
    assert facts["table"] == 1


def test_modules_are_copied_with_their_changes_or_imported_afresh(facts: dict[str, Any]) -> None:
    assert facts["globals"][1] == ("changed" if facts["is_copy"] else "as imported")


def test_main_in_a_worker_is_not_the_script(facts: dict[str, Any]) -> None:
    assert facts["main"] is False


def test_variables_folder_path_and_arguments_are_those_of_now(facts: dict[str, Any]) -> None:
    assert facts["environ"] == "yes"
    assert os.path.samefile(facts["folder"], facts["wanted_folder"])
    assert facts["path"] is True
    assert facts["argv"] == ["one", "two"]


def test_other_settings_of_torch_and_handlers_of_logging_are_copied_or_stay_behind(
    facts: dict[str, Any],
) -> None:
    assert facts["own"] == [True, 1]
    found = [facts["deterministic"], facts["handlers"]]
    assert found == (facts["own"] if facts["is_copy"] else [False, 0])


def test_torch_and_numpy_have_one_thread_in_a_worker(facts: dict[str, Any]) -> None:
    assert (facts["torch_threads"], facts["blas_threads"]) == (1, 0)


def test_standard_input_is_empty_in_a_worker(facts: dict[str, Any]) -> None:
    assert facts["stdin"] == ""


def test_the_order_of_sets_is_that_of_the_program_or_does_not_depend_on_chance(
    facts: dict[str, Any],
) -> None:
    code = "print(hash('penstock'))"
    fixed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        check=True,
    )
    assert facts["hash"] == (facts["own_hash"] if facts["is_copy"] else int(fixed.stdout))


def test_workers_are_seen_by_psutil_and_not_among_the_active_children(
    facts: dict[str, Any],
) -> None:
    assert (facts["is_listed"], facts["is_seen"]) == (False, True)
