"""Async samples whose server fails, that block or crash their worker, or lose it from outside."""

from __future__ import annotations

import asyncio
import ctypes
import http
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader, rng
from penstock.errors import SampleTimeout, WorkerDied, WorkerTimeout
from penstock.order.event_loop import loop_of_thread
from support.datasets import assert_same, collect

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

LIMIT_S = 3.0
"""On a busy machine, samples that are answered must not take this long twice."""


@pytest.fixture(scope="module", autouse=True)
def event_loop_of_this_thread() -> None:
    """Create it before the first test, because it is kept."""
    loop_of_thread()


class Server:
    """A web server in a thread of this process. It answers the number of the page.

    Attributes:
        silent: Pages that are never answered.
        refusals: How often each page is refused first, with 429 or 503.
        num_requests: Requests of each page so far.
    """

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.refusals: dict[int, int] = {}
        self.num_requests: Counter[int] = Counter()
        self.most_open = self.num_open = 0
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(60)

    def _run(self) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            self._stop, self._server = asyncio.Event(), server
            self._is_ready.set()
            await self._stop.wait()
            server.close()
            mine = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not mine]
            await asyncio.gather(*others, return_exceptions=True)

        self._loop.run_until_complete(listen())
        self._loop.close()

    async def _answer(self, reader: Any, writer: Any) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            page = int(head.split(b" ")[1][1:])
            self.num_requests[page] += 1
            await asyncio.sleep(0.005)
            if page in self.silent:
                await self._stop.wait()
                return
            status = http.HTTPStatus.OK
            if self.refusals.get(page, 0) > 0:
                self.refusals[page] -= 1
                status = random.choice([http.HTTPStatus(429), http.HTTPStatus(503)])
            body = str(page).encode()
            line = f"HTTP/1.0 {status.value} x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            writer.write(line + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


class Refused(Exception):
    pass


class Pages(Dataset):
    """Page i of the server, and a random number. Refused requests are repeated."""

    def __init__(self, port: int, length: int = 256, max_tries: int = 5) -> None:
        self.port, self.length, self.max_tries = port, length, max_tries

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> Any:
        for attempt in range(self.max_tries):
            status, body = await self.fetch(index)
            if status == 200:
                return torch.tensor([int(body)]), rng().random()
            await asyncio.sleep(0.002 * 2**attempt * random.SystemRandom().random())
        raise Refused(f"page {index}: {status}")

    async def fetch(self, index: int) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"GET /{index} HTTP/1.0\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body


class Local(Pages):
    """The same samples without a server."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return torch.tensor([index]), rng().random()


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    return collect(
        DataLoader(dataset, **{"batch_size": 8, "shuffle": True, "seed": 3, **arguments})
    )


WORKERS = {"num_workers": 2, "in_flight": 64}


@pytest.mark.parametrize("arguments", [WORKERS, {"num_workers": 0, "in_flight": 64}])
def test_pages_of_a_real_server_arrive_in_order(server: Server, arguments: Any) -> None:
    assert_same(batches(Pages(server.port), **arguments), batches(Local(0)))
    assert set(server.num_requests.values()) == {1}
    assert server.most_open > 2  # more than there are workers


@pytest.mark.parametrize("arguments", [WORKERS, {"num_workers": 0}])
def test_a_server_that_stops_answering_is_named_in_time(server: Server, arguments: Any) -> None:
    server.silent = {13}
    with pytest.raises(SampleTimeout, match="sample 13 did not finish within 3 s") as caught:
        batches(Pages(server.port), sample_timeout_s=LIMIT_S, **arguments)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  File")]
    assert lines[0].endswith("in __getitem__")
    assert lines[1].endswith("in fetch")
    assert server.num_requests[13] == 2  # loaded again once


def test_pages_that_are_not_answered_can_be_skipped(server: Server) -> None:
    server.silent = {13, 100, 101}
    loader = DataLoader(Pages(server.port), 8, sample_timeout_s=LIMIT_S, on_error="skip", **WORKERS)
    pages = [int(page) for batch in loader for page in batch[0]]
    assert pages == [page for page in range(256) if page not in server.silent]
    assert [bad.index for bad in loader.bad_samples] == [13, 100, 101]
    assert all("SampleTimeout" in bad.error for bad in loader.bad_samples)
    assert loader.num_restarts == 0  # other samples in flight were not lost


def test_the_loaders_timeout_names_the_page_that_is_awaited(server: Server) -> None:
    server.silent = {13}
    with pytest.raises(WorkerTimeout, match="is loading sample 13"):
        batches(Pages(server.port), timeout=5, shuffle=False, num_workers=1, in_flight=64)


@pytest.mark.legacy
def test_a_storm_of_429_and_503_is_the_business_of_the_users_retries(server: Server) -> None:
    server.refusals = {page: page % 4 for page in range(256)}
    assert_same(batches(Pages(server.port), **WORKERS), batches(Local(0)))
    assert sum(server.num_requests.values()) == 256 + sum(page % 4 for page in range(256))


def test_control_without_retries_the_storm_is_an_error(server: Server) -> None:
    server.refusals = {page: page % 4 for page in range(256)}
    with pytest.raises(Refused, match="page"):
        batches(Pages(server.port, max_tries=1), **WORKERS)


class Doomed(Local):
    """Samples that wait together. Sample 40 does something to its process, ``num_times`` times."""

    def __init__(self, what: str, folder: Path, num_times: int) -> None:
        super().__init__(0)
        self.what, self.folder, self.num_times = what, folder, num_times

    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.01)
        if index == 40 and len(list(self.folder.iterdir())) < self.num_times:
            (self.folder / str(time.monotonic_ns())).touch()
            if self.what == "crash":
                ctypes.string_at(0)
            elif self.what == "block":
                time.sleep(600)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize("what", ["kill", "crash", "block"])
def test_a_worker_lost_with_64_in_flight_changes_nothing(what: str, tmp_path: Path) -> None:
    limit = {"sample_timeout_s": LIMIT_S} if what == "block" else {}
    found = batches(Doomed(what, tmp_path, 1), **WORKERS, **limit)
    assert_same(found, batches(Local(0)))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["crash", "block"])
def test_a_sample_that_always_loses_its_worker_is_named(what: str, tmp_path: Path) -> None:
    limit = {"sample_timeout_s": LIMIT_S} if what == "block" else {}
    error = SampleTimeout if what == "block" else WorkerDied
    with pytest.raises(error, match="while loading sample 40"):
        batches(Doomed(what, tmp_path, 99), **WORKERS, **limit)


@pytest.mark.slow
def test_a_sample_that_always_loses_its_worker_can_be_skipped(tmp_path: Path) -> None:
    loader = DataLoader(Doomed("crash", tmp_path, 99), 8, on_error="skip", **WORKERS)
    pages = [int(page) for batch in loader for page in batch[0]]
    assert pages == [page for page in range(256) if page != 40]
    assert [bad.index for bad in loader.bad_samples] == [40]


def test_kills_from_outside_change_nothing(server: Server) -> None:
    # Not all batches are in flight at once, so that the workers are needed after the last kill.
    loader = DataLoader(Pages(server.port, 640), 8, shuffle=True, seed=3, **WORKERS)
    found, iterator = [], iter(loader)
    for number, batch in enumerate(iterator):
        found.append(batch)
        if number in (2, 9):
            os.kill(iterator._workers[number % 2].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert_same(collect(found), batches(Local(0, 640)))
    assert loader.num_restarts == 2
