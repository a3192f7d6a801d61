"""Sockets, pipes, processes and threads are rejected by attribute. Queues can be sent."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import queue
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch.multiprocessing

from penstock.engine.pickling.pickler import PickledObjects
from penstock.engine.pickling.process_bound import find_inherited, is_suspect, why_bound
from penstock.errors import CannotTravel
from support.pickling import Holder, arrived, refusal

pytestmark = pytest.mark.legacy


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            yield client, port


def test_a_socket_is_refused_by_attribute_with_its_peer_and_the_way_out(
    connected: tuple[socket.socket, int],
) -> None:
    client, port = connected
    text = refusal(client)
    assert "T01" in text
    assert f"a socket (connected to 127.0.0.1:{port}) used by several processes" in text
    assert "keep dataset.deep[0].handle = None in __init__" in text


def test_a_socket_that_is_not_connected_or_closed_is_refused_too(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    assert "a socket used by several" in refusal(sockets[0])
    with socket.socket() as fresh:
        assert "a socket used by several" in refusal(fresh)
    assert "a socket used by several" in refusal(fresh)


def test_a_tls_socket_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    with context.wrap_socket(sockets[0], do_handshake_on_connect=False) as wrapped:
        assert "a socket used by several" in refusal(wrapped)


def test_a_file_over_a_socket_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    for mode in ("rb", "wb", "r"):
        with sockets[0].makefile(mode) as file:
            assert "open file" in refusal(file)


def test_both_ends_of_a_pipe_of_the_system_are_refused() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "wb") as writer:
        assert "has no name" in refusal(reader)
        assert "opened for writing" in refusal(writer)


def test_an_end_of_a_multiprocessing_pipe_is_refused() -> None:
    for end in multiprocessing.Pipe():
        with closing(end):
            assert "an end of a pipe" in refusal(end)


def queues() -> Iterator[Any]:
    for library in (multiprocessing, torch.multiprocessing):
        context: Any = library.get_context("spawn")
        yield from (context.SimpleQueue(), context.Queue(), context.JoinableQueue())


def test_a_queue_of_multiprocessing_travels_although_it_holds_pipes() -> None:
    for made in queues():
        value = PickledObjects({"value": made}).to_shared_file()
        value.close()
        made.close()


def test_a_pipe_that_was_taken_out_of_its_queue_is_refused_without_it() -> None:
    made = multiprocessing.get_context("spawn").SimpleQueue()
    assert "an end of a pipe" in refusal(made._reader)
    made.close()


class Server(threading.Thread):
    """Runs until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="server", daemon=True)
        self.stop = threading.Event()

    def run(self) -> None:
        self.stop.wait()


def test_a_running_thread_is_refused_and_one_that_is_over_is_not() -> None:
    thread = Server()
    thread.start()
    try:
        assert "a running thread (server)" in refusal(thread)
    finally:
        thread.stop.set()
        thread.join()
    assert why_bound(thread) == ""


def test_a_child_process_is_refused_until_it_has_ended() -> None:
    child = subprocess.Popen.__new__(subprocess.Popen)  # looks like a started process
    vars(child).update(pid=1234, returncode=None, args=["true"], stdin=None, _child_created=False)
    assert "a child process (pid 1234)" in refusal(child)
    child.returncode = 0
    assert arrived(child).returncode == 0


def test_a_process_of_multiprocessing_is_refused_once_it_is_started() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    assert why_bound(process) == ""
    vars(process)["_popen"] = Holder(returncode=None, pid=1234)
    assert "a child process (pid 1234)" in refusal(process)
    vars(process)["_popen"] = None


def test_a_connection_of_http_is_refused_by_its_socket_and_travels_without_one(
    connected: tuple[socket.socket, int],
) -> None:
    client, port = connected
    connection = http.client.HTTPConnection("127.0.0.1", port)
    assert arrived(connection).port == port
    connection.sock = client
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(api=connection)})
    assert info.value.path == "dataset.api.sock"  # type: ignore[attr-defined]
    assert "keep dataset.api = None in __init__" in str(info.value)  # not the library's attribute


def test_a_pool_of_connections_is_refused_where_one_of_them_is_open(
    connected: tuple[socket.socket, int],
) -> None:
    urllib3 = pytest.importorskip("urllib3")
    client, port = connected
    pool = urllib3.HTTPConnectionPool("127.0.0.1", port, maxsize=1)
    assert arrived(pool).port == port
    connection = pool._new_conn()
    connection.sock = client
    pool.pool.get()
    pool.pool.put(connection)
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(pool=pool)})
    path = info.value.path  # type: ignore[attr-defined]
    assert path.startswith("dataset.pool.pool.queue[0]")
    assert path.endswith(".sock")
    assert "keep dataset.pool = None" in str(info.value)
    connection.sock = None


def test_a_session_that_drops_its_connections_when_pickled_travels() -> None:
    requests = pytest.importorskip("requests")
    with requests.Session() as session:
        session.headers["key"] = "value"
        assert arrived(session).headers["key"] == "value"


@pytest.mark.parametrize("name", ["httpx.Client", "httpx.AsyncClient"])
def test_a_session_that_cannot_be_pickled_is_refused_by_name(name: str) -> None:
    module = pytest.importorskip(name.partition(".")[0])
    client = getattr(module, name.partition(".")[2])()
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(client=client)})
    assert info.value.path.startswith("dataset.client")  # type: ignore[attr-defined]
    assert "keep dataset.client = None" in str(info.value)


def test_a_driver_that_is_written_in_python_is_refused_by_its_socket(
    connected: tuple[socket.socket, int],
) -> None:
    """Like the connections of PyMySQL, redis and pg8000, with a lock around the socket."""
    connection = Holder(_sock=connected[0], lock=threading.RLock(), pool=queue.LifoQueue())
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(db=connection)})
    assert info.value.path == "dataset.db._sock"  # type: ignore[attr-defined]


def test_classes_that_are_never_bound_are_told_apart_by_class() -> None:
    assert not any(is_suspect(kind) for kind in (int, dict, Holder, threading.Event, queue.Queue))
    assert all(is_suspect(kind) for kind in (socket.socket, ssl.SSLSocket, threading.Thread))


# -- handles that forked workers would share -------------------------------------------------------


def test_what_forks_share_is_found_by_path(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Any
) -> None:
    (tmp_path / "a.txt").write_text("x")
    one, other = sockets
    made = multiprocessing.get_context("spawn").SimpleQueue()
    with (
        open(tmp_path / "log.txt", "w") as log,
        open(tmp_path / "a.txt", "rb") as file,
        closing(made),
    ):
        dataset = Holder(parts=[Holder(c=one)], load=lambda: other, file=file, log=log, queue=made)
        dataset.me = dataset  # type: ignore[attr-defined]
        found = {path for path, _ in find_inherited({"dataset": dataset, "collate_fn": print})}
    assert found == {"dataset.parts[0].c", "dataset.load.other", "dataset.file"}


def test_a_plain_dataset_has_nothing_that_forks_share() -> None:
    plain = Holder(names=["a"] * 1000, lock=threading.Lock(), out=sys.stdout, nothing=None)
    assert list(find_inherited({"dataset": plain})) == []
