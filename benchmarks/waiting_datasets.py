"""Datasets of waiting.py, in a module that spawned workers can import. Each has an async twin."""

from __future__ import annotations

import asyncio
import copy
import http.client
import threading
import time
from typing import Any

import torch

from datasets import ENDLESS

SHAPE = (3, 32, 32)


def _image(index: int) -> torch.Tensor:
    return torch.full(SHAPE, index % 256, dtype=torch.uint8)


def _compute(seconds: float) -> None:
    """Use a core for ``seconds``, as decoding does."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Delayed:
    """Samples that wait for ``wait_s`` and then compute for ``work_s``."""

    def __init__(self, wait_s: float, work_s: float = 0.0) -> None:
        self.wait_s, self.work_s = wait_s, work_s

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        _compute(self.work_s)
        return _image(index)


class AsyncDelayed(Delayed):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(self.wait_s)
        _compute(self.work_s)
        return _image(index)


class Fetched:
    """Samples from a web server, over one connection for each worker."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port)
        self.connection.request("GET", f"/{index}")
        body = self.connection.getresponse().read()
        return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(SHAPE)


class AsyncFetched(Fetched):
    """The same, over as many connections as there are samples in flight."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.free: list[Any] = []

    async def __getitem__(self, index: int) -> Any:
        reader, writer = self.free.pop() if self.free else await self._connect()
        writer.write(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % index)
        head = await reader.readuntil(b"\r\n\r\n")
        num_bytes = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(num_bytes)
        self.free.append((reader, writer))
        return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(SHAPE)

    async def _connect(self) -> Any:
        return await asyncio.open_connection("127.0.0.1", self.port)


class InThreads:
    """A short copy of a dataset for loaders with threads. Each thread has its own connection."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.own = data, threading.local()

    def __len__(self) -> int:
        return 200_000

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self.own, "data"):
            self.own.data = copy.copy(self.data)
        return self.own.data[index]
