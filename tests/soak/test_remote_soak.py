"""Sets in object storage: kills and restarts by the hundred, and every sample as on the disk."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock
from support.remote_readers import RemoteReaders, digests_of
from support.remote_sets import (
    HALF_BYTES,
    RemoteSet,
    kill_often,
    needs_obstore,
    read_during,
    restart_often,
)

pytestmark = [pytest.mark.soak, pytest.mark.remote, needs_obstore]
Note = Callable[[str], None]
NUM_KILLS = 100
NUM_CACHES = 5
"""A killed downloader is missed after 5 s, so several are killed at the same time."""


def test_the_downloader_is_killed_100_times(slow_remote: RemoteSet, note: Note) -> None:
    def kill(number: int) -> int:
        remote = RemoteSet(slow_remote.source, slow_remote.folder / str(number), slow_remote.server)
        ours = remote.open(cache_bytes=HALF_BYTES)
        ours[0]
        return read_during(lambda: kill_often(ours, NUM_KILLS // NUM_CACHES, number), remote, ours)

    with ThreadPoolExecutor(NUM_CACHES) as pool:
        num_read = sum(pool.map(kill, range(NUM_CACHES)))
    note(f"remote: {NUM_KILLS} kills of the downloader, {num_read} samples, all as on the disk")


def test_the_server_is_restarted_50_times_in_mid_range(slow_remote: RemoteSet, note: Note) -> None:
    ours = slow_remote.open(cache_bytes=HALF_BYTES)
    num_read = read_during(lambda: restart_often(slow_remote, ours, 50, 2), slow_remote, ours)
    num_retries = int(ours.count_network()["num_retries"])
    assert num_retries >= 50
    note(f"remote: 50 restarts of the server, {num_read} samples, {num_retries} retries")


def test_the_program_is_killed_100_times(slow_remote: RemoteSet, note: Note) -> None:
    """Two programs at a time share one cache. A program that is done waits for its kill."""
    expected = list(digests_of(penstock.Packed(slow_remote.source), {"seed": 1}))

    def kill(number: int) -> tuple[int, int, int]:
        chance, num_killed, num_within, num_read = random.Random(number), 0, 0, 0
        with RemoteReaders(slow_remote, step_s=0.02) as readers:
            for _ in range(NUM_KILLS // 2):
                pid = readers.start(seed=1, stay_s=600.0)
                readers.wait_for(pid, chance.randrange(len(expected)))
                time.sleep(chance.uniform(0, 0.1))
                os.kill(pid, signal.SIGKILL)
                num_killed += readers.end(pid) == -signal.SIGKILL
                found = readers.digests[pid]
                assert found == expected[: len(found)]
                num_within += pid not in readers.whole
                num_read += len(found)
            last = readers.start(seed=1)
            assert readers.end(last) == 0
            assert readers.digests[last] == expected
        return num_killed, num_within, num_read

    with ThreadPoolExecutor(2) as pool:
        num_killed, num_within, num_read = map(sum, zip(*pool.map(kill, range(2)), strict=True))
    assert num_killed == NUM_KILLS
    note(
        f"remote: {num_killed} of {NUM_KILLS} programs killed, {num_within} of them within an "
        f"epoch; their {num_read} batches and two whole epochs afterwards as on the disk"
    )
