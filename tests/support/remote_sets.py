"""A packed set behind a server, a cache folder, and downloaders that end with the test."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.range_server import RangeServer

needs_obstore = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="obstore is not installed"
)
NUM_SAMPLES, SHAPE = 1200, (96, 96, 3)
"""About 33 MB of pixels: 9 blocks in 3 shards, and files of one block."""
EVERY = range(0, NUM_SAMPLES, 29)
HALF_BYTES = 20 << 20
"""A cache of about half the set, so that blocks are always downloaded."""


class Photos:
    """Pixels of fixed size, a number, text and arrays of different shapes."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        return {
            "pixels": random.integers(0, 256, SHAPE, dtype=np.uint8),
            "label": index,
            "text": "é" * (index % 40),
            "boxes": random.random((index % 5, 4), dtype=np.float32),
        }


def pack_photos(folder: Path) -> Path:
    """Pack the samples, in this process."""
    import penstock

    penstock.pack(Photos(), folder, workers=0, shard_bytes=12 << 20)
    return folder


def is_same(one: Any, other: Any) -> bool:
    """Return True for samples with equal types and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and np.array_equal(one, other)


@contextlib.contextmanager
def ended_downloaders() -> Iterator[None]:
    """End the downloaders that this process starts."""
    from penstock.sources.remote import downloader_start

    try:
        yield
    finally:
        downloader_start._stop_children()


class RemoteSet:
    """A packed set behind a server, with a cache of its own.

    Args:
        source: The packed set.
        folder: For the cache.
    """

    def __init__(self, source: Path, folder: Path, server: RangeServer) -> None:
        self.source, self.folder, self.server = source, folder, server

    def open(self, **options: Any) -> Any:
        import penstock

        return penstock.Packed(self.server.url, cache_folder=self.folder, **options)

    def open_local(self) -> Any:
        import penstock

        return penstock.Packed(self.source)

    def cache(self) -> Path:
        """Return the folder of the set in the cache."""
        (found,) = self.folder.glob("*/*/manifest.json")
        return found.parent


def table_of(dataset: Any) -> Any:
    return dataset._files[0].files.current_table()


def kill_downloader(dataset: Any) -> int:
    """Send SIGKILL to the downloader of a set, once there is one. Returns its process ID."""
    table, deadline_s = table_of(dataset), time.monotonic() + 240
    while not table.is_served():
        assert time.monotonic() < deadline_s, "no downloader started"
        time.sleep(0.01)
    pid = int(table.header["pid"][0])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


def cached_bytes(blocks: Path, limit: int) -> int:
    """Return the bytes of the block files. A sum above the limit counts only if it stays.

    Files come and go while their sizes are read, so one that was evicted and the one that has
    replaced it can both be in the sum.
    """
    num_bytes = 0
    for _ in range(20):
        num_bytes = 0
        for entry in os.scandir(blocks):
            with contextlib.suppress(FileNotFoundError):  # evicted, or renamed
                num_bytes += entry.stat().st_size
        if num_bytes <= limit:
            break
        time.sleep(0.01)
    return num_bytes


def assert_same(remote: RemoteSet, ours: Any, indices: Any = EVERY) -> None:
    """Compare samples with those of the local set."""
    local = remote.open_local()
    for index in indices:
        assert is_same(ours[index], local[index]), index


def read_during(disturb: Callable[[], None], remote: RemoteSet, ours: Any) -> int:
    """Compare random samples with the local set while ``disturb`` runs. Returns how many."""
    local, chosen, num_read = remote.open_local(), np.random.default_rng(0), 0
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        while not disturbed.done():
            index = int(chosen.integers(0, NUM_SAMPLES))
            assert is_same(ours[index], local[index]), index
            num_read += 1
        disturbed.result()  # its own failures count too
    return num_read


def kill_often(dataset: Any, num_kills: int, seed: int) -> None:
    """Kill the downloader of a set at random times, each time after the next one has started."""
    chance = random.Random(seed)
    for _ in range(num_kills):
        table, deadline_s = table_of(dataset), time.monotonic() + 240
        while not table.is_served():
            assert time.monotonic() < deadline_s, "no downloader started"
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1.0))  # while it downloads
        killed = kill_downloader(dataset)
        # The heartbeat of the one that was killed ages, or the next one has started already.
        while table.is_served() and int(table.header["pid"][0]) == killed:
            assert time.monotonic() < deadline_s, "the heartbeat goes on after a kill"
            time.sleep(0.05)


def restart_often(remote: RemoteSet, dataset: Any, num_restarts: int, seed: int) -> None:
    """Kill a server in the middle of requests, and start it again. Some are answered between.

    It is down until a request has failed.
    """
    chance, server = random.Random(seed), remote.server
    for _ in range(num_restarts):
        num_sent, deadline_s = server.num_sent, time.monotonic() + 240
        while server.num_sent == num_sent or not server.num_at_once:
            assert time.monotonic() < deadline_s, "no request came"
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        num_retries = dataset.count_network()["num_retries"]
        server.stop()
        while dataset.count_network()["num_retries"] == num_retries:
            assert time.monotonic() < deadline_s, "no request failed"
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        server.start()


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed set in a local folder."""
    return pack_photos(tmp_path_factory.mktemp("packed") / "photos")


@pytest.fixture
def remote(photos: Path, tmp_path: Path) -> Iterator[RemoteSet]:
    """The packed set behind a server, with an empty cache."""
    with ended_downloaders(), RangeServer(photos) as server:
        yield RemoteSet(photos, tmp_path / "cache", server)


@pytest.fixture
def slow_remote(photos: Path, tmp_path: Path) -> Iterator[RemoteSet]:
    """The same behind a slow server."""
    with ended_downloaders(), RangeServer(photos, 0.01, 40e6) as server:
        yield RemoteSet(photos, tmp_path / "cache", server)
