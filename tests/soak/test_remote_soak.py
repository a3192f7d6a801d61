"""Sets in object storage: kills and restarts by the hundred, and every sample as on the disk."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support.range_server import RangeServer
from support.remote_sets import (
    NUM_SAMPLES,
    RemoteSet,
    ended_downloaders,
    is_same,
    kill_downloader,
    needs_obstore,
    table_of,
)

pytestmark = [pytest.mark.soak, pytest.mark.remote, needs_obstore]
Note = Callable[[str], None]
NUM_KILLS = 100
CACHE_BYTES = 20 << 20
"""About half of the set, so that blocks are always downloaded."""


@pytest.fixture
def slow_set(photos: Path, tmp_path: Path) -> Iterator[RemoteSet]:
    with ended_downloaders(), RangeServer(photos, 0.01, 40e6) as server:
        yield RemoteSet(photos, tmp_path / "cache", server)


def read_during(disturb: Callable[[], None], remote: RemoteSet) -> int:
    """Compare random samples with the local set while ``disturb`` runs. Returns how many."""
    ours, local = remote.open(cache_bytes=CACHE_BYTES), remote.open_local()
    chosen, num_read = np.random.default_rng(0), 0
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(disturb)
        while not disturbed.done():
            index = int(chosen.integers(0, NUM_SAMPLES))
            assert is_same(ours[index], local[index]), index
            num_read += 1
        disturbed.result()  # its own failures count too
    return num_read


def test_the_downloader_is_killed_100_times(slow_set: RemoteSet, note: Note) -> None:
    ours, chance = slow_set.open(cache_bytes=CACHE_BYTES), random.Random(1)
    ours[0]

    def kill() -> None:
        for _ in range(NUM_KILLS):
            table, deadline_s = table_of(ours), time.monotonic() + 120
            while not table.is_served():
                assert time.monotonic() < deadline_s, "no downloader started"
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 1.0))  # while it downloads
            kill_downloader(ours)
            killed = int(table.header["pid"][0])
            # The heartbeat of the one that was killed ages, or the next one has started already.
            while table.is_served() and int(table.header["pid"][0]) == killed:
                assert time.monotonic() < deadline_s, "the heartbeat goes on after a kill"
                time.sleep(0.05)

    num_read = read_during(kill, slow_set)
    note(f"remote: {NUM_KILLS} kills of the downloader, {num_read} samples, all as on the disk")


def test_the_server_is_restarted_50_times_in_mid_range(slow_set: RemoteSet, note: Note) -> None:
    chance = random.Random(2)

    def restart() -> None:
        for _ in range(50):
            time.sleep(chance.uniform(0.1, 1.0))
            slow_set.server.stop()
            time.sleep(chance.uniform(0.0, 0.5))
            slow_set.server.start()

    num_read = read_during(restart, slow_set)
    num_requests = len(slow_set.server.requests)
    note(f"remote: 50 restarts of the server, {num_read} samples, {num_requests} requests")


PROGRAM = """
import hashlib, sys, penstock
data = penstock.Packed(sys.argv[1], cache_folder=sys.argv[2], cache_bytes=int(sys.argv[3]))
data = data.select("pixels", "label")
digest = hashlib.sha256()
loader = penstock.DataLoader(data, batch_size=32, sampler=data.block_order(seed=1, num_mixed=2))
for batch in loader:
    digest.update(batch["pixels"].numpy().tobytes() + batch["label"].numpy().tobytes())
print(digest.hexdigest(), flush=True)
"""


def test_the_program_is_killed_100_times(slow_set: RemoteSet, note: Note) -> None:
    chance, num_whole, printed = random.Random(3), 0, set()
    command = [sys.executable, "-c", PROGRAM, slow_set.server.url, str(slow_set.folder)]
    command.append(str(CACHE_BYTES))
    for _ in range(NUM_KILLS):
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            printed.add(program.communicate(timeout=chance.uniform(1.0, 12.0))[0])
            num_whole += 1
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate(timeout=60)
    printed.add(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280).stdout)
    command[3] = str(slow_set.source.as_uri())
    command[4] = str(slow_set.folder) + "-other"
    printed.add(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280).stdout)
    assert len(printed) == 1, printed
    note(
        f"remote: {NUM_KILLS - num_whole} of {NUM_KILLS} programs killed, {num_whole} ended, "
        "all with one digest"
    )
