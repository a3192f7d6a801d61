"""Loaders survive a fork server that dies or is unsafe to fork, and users who fork."""

from __future__ import annotations

import collections
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import DataLoader
from penstock.engine.memory.control_socket import ControlSocket
from penstock.engine.memory.ring import Ring
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent import fork_server as fork_servers
from penstock.errors import StartFailed, WorkerDied
from penstock.machine.facts import Machine
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from support import leftovers, scripts
from support.datasets import Numbers, collect

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("pool", ["auto", "process", "thread"])
@pytest.mark.parametrize("start_method", [None, "forkserver", "spawn", "fork"])
@pytest.mark.parametrize("has_proc", [True, False])
@pytest.mark.parametrize("can_start_python", [True, False])
@pytest.mark.parametrize("has_gil", [True, False])
def test_it_is_started_early_exactly_if_the_plan_uses_it(
    monkeypatch: pytest.MonkeyPatch,
    pool: str,
    start_method: str | None,
    has_proc: bool,
    can_start_python: bool,
    has_gil: bool,
) -> None:
    monkeypatch.setattr(fork_servers, "has_proc", lambda: has_proc)
    monkeypatch.setattr(fork_servers, "is_gil_enabled", lambda: has_gil)
    monkeypatch.setattr(fork_servers, "can_start_python", lambda: can_start_python)
    facts = Machine(
        os=sys.platform,
        has_proc=has_proc,
        can_start_python=can_start_python,
        is_gil_enabled=has_gil,
    )
    request = LoaderRequest(num_workers=2, pool=pool, start_method=start_method)
    plan = make_plan(facts, request, Workload())
    assert fork_servers.is_needed(pool, start_method) == (plan.start_method.value == "forkserver")


def load(num_batches: int = 5) -> list[list[int]]:
    loader = DataLoader(Numbers(num_batches * 2), batch_size=2, num_workers=2)
    return [labels.tolist() for _, labels in collect(loader)]


GOOD = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_after_the_fork_server_was_killed_the_next_loader_works() -> None:
    assert load() == GOOD
    old = leftovers.fork_server_pid()
    assert old is not None
    os.kill(old, signal.SIGKILL)
    assert load() == GOOD
    assert leftovers.fork_server_pid() != old
    assert leftovers.wait_until_gone([old]) == []


def test_a_fork_server_that_is_stopped_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load() == GOOD
    old = leftovers.fork_server_pid()
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    monkeypatch.setattr(fork_servers, "STOPPED_LIMIT_S", 1.0)
    assert load() == GOOD
    assert leftovers.wait_until_gone([old]) == []
    assert "does not answer: it was stopped for 1 s" in caplog.text


def test_one_that_is_stopped_for_a_moment_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    assert load() == GOOD
    old = leftovers.fork_server_pid()
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (old, signal.SIGCONT)).start()
    assert load() == GOOD
    assert leftovers.fork_server_pid() == old
    assert caplog.text == ""


def test_one_that_never_comes_up_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_servers.close_fork_server()
    loader = DataLoader(Numbers(4), num_workers=1)
    old = leftovers.fork_server_pid()
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    monkeypatch.setattr(fork_servers, "START_LIMIT_S", 1.0)
    with pytest.raises(StartFailed, match="does not answer: no answer within 1 s") as caught:
        next(iter(loader))
    assert "it was stopped" in str(caught.value)
    assert leftovers.wait_until_gone([old]) == []
    monkeypatch.undo()
    assert load() == GOOD


def test_without_restarts_a_loader_whose_fork_server_was_killed_says_so() -> None:
    iterator = iter(DataLoader(Numbers(100_000), batch_size=2, num_workers=2, max_restarts=0))
    next(iterator)
    pids = [worker.pid for worker in iterator._workers]
    fork_server = leftovers.fork_server_pid()
    assert fork_server is not None
    os.kill(fork_server, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        collections.deque(iterator, maxlen=0)
    assert leftovers.wait_until_gone(pids) == []
    assert load() == GOOD


def test_the_fork_server_stays_the_same_from_loader_to_loader() -> None:
    load()
    pid = leftovers.fork_server_pid()
    load()
    assert leftovers.fork_server_pid() == pid


def test_a_fork_server_that_was_closed_is_started_again() -> None:
    load()
    fork_servers.close_fork_server()
    assert leftovers.fork_server_pid() is None
    assert load() == GOOD


def test_a_fork_server_that_still_imports_torch_is_not_waited_for() -> None:
    """A fork server without workers is killed. One that is ready exits on its own."""
    fork_servers.close_fork_server()
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2)
    starting = fork_servers.current_fork_server()
    fork_servers.close_fork_server()
    assert starting._process.poll() == -signal.SIGKILL
    assert [labels.tolist() for _, labels in collect(loader)] == GOOD
    ready = fork_servers.current_fork_server()
    fork_servers.close_fork_server()
    assert ready._process.poll() == 0


def test_a_loader_with_workers_starts_it_and_does_not_wait_for_it() -> None:
    fork_servers.close_fork_server()
    started = time.monotonic()
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2)
    made_s = time.monotonic() - started
    pid = leftovers.fork_server_pid()
    assert pid is not None
    until = time.monotonic() + 60.0
    while not fork_servers.current_fork_server().is_warm() and time.monotonic() < until:
        time.sleep(0.05)
    assert fork_servers.current_fork_server().is_warm()
    assert made_s < 0.5 * (time.monotonic() - started)  # a busy machine slows down both
    assert [labels.tolist() for _, labels in collect(loader)] == GOOD
    assert leftovers.fork_server_pid() == pid


@pytest.mark.parametrize(
    "keywords",
    [
        {"num_workers": 0},
        {"num_workers": 2, "pool": "thread"},
        {"num_workers": 2, "pool": "inline"},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_a_loader_that_does_not_need_it_starts_none(keywords: dict[str, Any]) -> None:
    fork_servers.close_fork_server()
    DataLoader(Numbers(10), batch_size=2, **keywords)
    assert leftovers.fork_server_pid() is None


def test_it_may_die_between_a_loader_and_its_first_batch() -> None:
    fork_servers.close_fork_server()
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2)
    pid = leftovers.fork_server_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [labels.tolist() for _, labels in collect(loader)] == GOOD


def test_a_loader_is_made_also_where_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_servers.close_fork_server()

    def fail(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(fork_servers, "start_child", fail)
        loader = DataLoader(Numbers(10), batch_size=2, num_workers=2)
        assert leftovers.fork_server_pid() is None
        with pytest.raises(OSError, match="Too many open files"):
            next(iter(loader))
    assert [labels.tolist() for _, labels in collect(loader)] == GOOD


TOP_LEVEL = """
import penstock
from penstock.engine.parent import fork_server


class Dataset:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return int(fork_server._current is not None)


loader = penstock.DataLoader(Dataset(), batch_size=2, num_workers=2)
"""


@pytest.mark.parametrize("method", [None, "spawn"])
def test_a_loader_at_the_top_of_a_module_starts_none_in_workers(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"loader_on_top_{method}"
    (tmp_path / f"{name}.py").write_text(TOP_LEVEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    dataset = importlib.import_module(name).Dataset()
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=method)
    assert [numbers.tolist() for numbers in loader] == [[0, 0], [0, 0]]
    sys.modules.pop(name)


def test_a_program_of_multiprocessing_starts_none_while_it_imports_the_script(
    tmp_path: Path,
) -> None:
    result = scripts.run(IN_A_SPAWNED_CHILD, tmp_path)
    assert result.stdout.split() == ["False", "True"]


IN_A_SPAWNED_CHILD = """
import multiprocessing
import penstock
from penstock.engine.parent import fork_server

loader = penstock.DataLoader(list(range(4)), batch_size=2, num_workers=2)


def main():
    print(fork_server._current is not None, flush=True)


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=main)
    child.start()
    child.join()
    main()
"""

THREADED = """
import threading, time, torch
thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
thread.start()
class Dataset(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index * 10, thread.is_alive()
"""


@pytest.fixture
def threaded_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "starts_a_thread.py").write_text(THREADED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("starts_a_thread")
    sys.modules.pop("starts_a_thread")


def test_a_module_that_starts_a_thread_makes_the_fork_server_step_aside(
    threaded_module: Any,
) -> None:
    load()
    before = leftovers.fork_server_pid()
    for _ in range(2):
        loader = DataLoader(threaded_module.Dataset(), batch_size=2, num_workers=2)
        assert [numbers.tolist() for numbers, _ in loader] == [[0, 10], [20, 30]]
    after = leftovers.fork_server_pid()
    assert after != before  # the old server became unsafe to fork
    assert fork_server_threads(after) == 1
    assert load() == GOOD
    assert leftovers.fork_server_pid() == after


def fork_server_threads(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_the_fork_server_has_one_thread() -> None:
    load()
    assert fork_server_threads(leftovers.fork_server_pid()) == 1


# -- users who fork --------------------------------------------------------------------------------


def in_a_fork(work: Any) -> int:
    """Run ``work`` in a forked child. Returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_that_drops_batches_does_not_free_its_parent_s_slots() -> None:
    loader = DataLoader(Numbers(400, (500,)), batch_size=2, num_workers=2)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(10)]

    def drop() -> None:
        held.clear()
        gc.collect()

    assert in_a_fork(drop) == 0
    rest = [labels.tolist() for _, labels in iterator]
    assert rest == [[2 * n, 2 * n + 1] for n in range(10, 200)]
    for number, (image, labels) in enumerate(held):
        assert labels.tolist() == [2 * number, 2 * number + 1]
        assert image.unique().tolist() == [2 * number, 2 * number + 1]


def test_a_forked_child_does_not_use_a_slot_that_its_parent_may_still_view() -> None:
    ring = Ring(SharedFile.create(), max_held_bytes=1 << 30)
    ring.fit(4096)
    slot = ring.take()
    held = [ring.lend(slot, 4096)]

    def drop_and_look() -> None:
        held.clear()
        gc.collect()
        assert all(ring.take() is not slot for _ in range(50))

    assert in_a_fork(drop_and_look) == 0
    held.clear()
    assert ring.take() is slot  # control: in this process the slot comes back
    ring.close()


def test_a_forked_child_that_goes_on_with_data_in_memory_does_not_touch_its_parent_s() -> None:
    iterator = iter(DataLoader(TensorDataset(torch.arange(1000)), batch_size=10))
    held = [next(iterator)[0] for _ in range(5)]

    def go_on() -> None:
        held.clear()
        gc.collect()
        for _ in range(50):
            next(iterator)[0].fill_(-1)

    assert in_a_fork(go_on) == 0
    assert torch.cat(held).tolist() == list(range(50))
    assert next(iterator)[0].tolist() == list(range(50, 60))


def test_a_forked_child_that_drops_the_iterator_does_not_end_its_parent_s_workers() -> None:
    holder = [iter(DataLoader(Numbers(100), batch_size=2, num_workers=2))]
    first = [next(holder[0])[1].tolist()]

    def drop() -> None:
        holder.clear()
        gc.collect()

    assert in_a_fork(drop) == 0
    rest = [labels.tolist() for _, labels in holder.pop()]
    assert first + rest == [[2 * n, 2 * n + 1] for n in range(50)]


FORKING = """
import os, sys, torch
from penstock import DataLoader
data = [torch.tensor(i) for i in range(8)]
def load():
    return [b.tolist() for b in DataLoader(data, batch_size=4, num_workers=1)]
assert load() == [[0, 1, 2, 3], [4, 5, 6, 7]]
pid = os.fork()
assert load() == [[0, 1, 2, 3], [4, 5, 6, 7]]
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_parent_and_forked_child_may_both_go_on_loading(tmp_path: Path) -> None:
    result = scripts.run(FORKING, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_forked_child_does_not_keep_the_fork_server_from_ending(
    hangs_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child holds a copy of the control socket. Control: a plain close keeps it open there."""
    assert load() == GOOD
    process = fork_servers.current_fork_server()._process
    if not hangs_up:
        monkeypatch.setattr(ControlSocket, "hang_up", ControlSocket.close)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        os.read(told, 1)
        os._exit(0)
    fork_servers.close_fork_server()
    assert process.returncode == (0 if hangs_up else -signal.SIGKILL)
    os.close(tell)
    os.close(told)
    assert os.waitpid(pid, 0)[1] == 0


HELD_OPEN = """
import os, time
from penstock import DataLoader
from penstock.engine.parent.fork_server import current_fork_server

iterator = iter(DataLoader(range(8), num_workers=1))
next(iterator)
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
print(current_fork_server().pid, child, flush=True)
time.sleep(60)
"""
WITHOUT_PIDFD = "import os\nif hasattr(os, 'pidfd_open'): del os.pidfd_open\n"


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_nor_where_its_parent_is_killed(
    has_pidfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:  # like older kernels
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_PIDFD)
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with scripts.running(HELD_OPEN, tmp_path) as program:
        assert program.stdout is not None
        fork_server, child = map(int, program.stdout.readline().split())
        program.kill()
        program.wait()
        try:
            assert leftovers.wait_until_gone([fork_server]) == []
            os.kill(child, 0)  # control: the child is alive
        finally:
            os.kill(child, signal.SIGKILL)


class Alarm(Exception):
    """What a handler of SIGALRM raises."""


class Alarming(Numbers):
    """Raises once, while it is pickled, as a signal handler does."""

    error: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return vars(self)


@pytest.mark.parametrize("kind", [TimeoutError, Alarm])
def test_an_exception_of_a_signal_handler_while_objects_are_pickled_is_raised_unchanged(
    kind: type[Exception],
) -> None:
    dataset = Alarming(8)
    dataset.error = kind("time is up")
    with pytest.raises(kind) as info:
        list(DataLoader(dataset, num_workers=1))
    assert info.value.args == ("time is up",)
    assert len(list(DataLoader(dataset, num_workers=1))) == 8


@pytest.mark.parametrize("kind", [TimeoutError, Alarm])
@pytest.mark.parametrize("name", ["_read", "is_readable", "send"])
def test_a_signal_handler_that_raises_between_messages_does_not_harm_the_next_loader(
    name: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load()
    whole, errors = getattr(ControlSocket, name), [kind("time is up")]

    def cut(control: ControlSocket, *arguments: Any) -> Any:
        found = whole(control, *arguments)
        if errors and threading.current_thread() is threading.main_thread():
            raise errors.pop()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ControlSocket, name, cut)
        with pytest.raises(kind) as info:
            load()
    assert info.value.args == ("time is up",)
    assert load() == expected
