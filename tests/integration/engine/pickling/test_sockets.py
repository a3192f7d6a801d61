"""A dataset with a live connection is refused before a worker starts, or named if shared."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import DataLoader
from penstock.errors import CannotTravel
from support.datasets import WAYS

pytestmark = pytest.mark.legacy


@pytest.fixture
def address() -> Iterator[Any]:
    """Address of a server that answers line ``i`` with ``10 * i``, one thread per connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    connection.sendall(b"%d\n" % (int(line) * 10))

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # closed
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


class Asking:
    """Sample i is the server's answer. The connection is opened at the start or on first use."""

    def __init__(self, address: Any, *, is_lazy: bool) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.connection = None if is_lazy else socket.create_connection(address)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        with self.lock:
            if self.connection is None:
                self.connection = socket.create_connection(self.address)
            self.connection.sendall(b"%d\n" % index)
            answer = b""
            while not answer.endswith(b"\n"):
                answer += self.connection.recv(1)
        return index, int(answer)


def count_wrong(loader: Any) -> int:
    return sum(int((answers != 10 * indices).sum()) for indices, answers in loader)


@pytest.mark.parametrize("way", ["forkserver", "spawn"])
def test_a_socket_is_refused_before_a_worker_starts(address: Any, way: str) -> None:
    dataset = Asking(address, is_lazy=False)
    assert dataset.connection is not None
    with dataset.connection, pytest.raises(CannotTravel) as info:
        iter(DataLoader(dataset, batch_size=10, **WAYS[way]))
    assert info.value.path == "dataset.connection"  # type: ignore[attr-defined]
    assert f"connected to {address[0]}:{address[1]}" in str(info.value)
    assert "keep dataset.connection = None in __init__" in str(info.value)


@pytest.mark.parametrize("way", ["forkserver", "fork"])
def test_opened_on_first_use_as_the_error_says_every_answer_is_right(
    address: Any, way: str
) -> None:
    loader = DataLoader(Asking(address, is_lazy=True), batch_size=10, **WAYS[way])
    assert count_wrong(loader) == 0


@pytest.mark.parametrize("way", ["inline", "thread"])
def test_within_one_process_the_socket_and_its_lock_work(address: Any, way: str) -> None:
    dataset = Asking(address, is_lazy=False)
    assert dataset.connection is not None
    with dataset.connection:
        assert count_wrong(DataLoader(dataset, batch_size=10, **WAYS[way])) == 0


def test_forked_workers_inherit_it_and_a_warning_and_the_plan_name_it(address: Any) -> None:
    dataset = Asking(address, is_lazy=False)
    assert dataset.connection is not None
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    with dataset.connection:
        loader = DataLoader(dataset, batch_size=10, **options)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match=r"dataset\.connection \(socket\.socket\) is shared"):
            batches = iter(loader)
        assert any("dataset.connection" in note for note in loader.plan.notes)
        assert count_wrong(batches) == 0  # only one worker uses it


def test_a_running_child_process_is_refused() -> None:
    class Dataset(Asking):
        def __init__(self) -> None:
            self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    dataset = Dataset()
    try:
        with pytest.raises(CannotTravel, match="child process") as info:
            iter(DataLoader(dataset, num_workers=1))
        assert info.value.path == "dataset.child"  # type: ignore[attr-defined]
    finally:
        dataset.child.communicate(b"\n", timeout=240)
