"""Thousands of batches with deaths and hangs give the fault-free stream without leaks.

Each epoch has the hash of the same epoch of a fault-free loader. The two loaders alternate.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import DataLoader
from support import leftovers, stream_hash
from support.fault_file import DEATHS, HANGS, Tolled, Tolls, spread

pytestmark = [pytest.mark.soak, pytest.mark.fault, pytest.mark.timeout(1800)]

BATCH = 4
GAP = 50 * BATCH
"""Average number of samples between two deaths (50 batches)."""
MAX_GROWTH_BYTES = 20 << 20


def make(tolls: Tolls, *, wait_s: float, **arguments: Any) -> Any:
    arguments = {"num_workers": 2, "persistent_workers": True, "max_restarts": 10**6, **arguments}
    return DataLoader(Tolled(tolls, wait_s=wait_s), batch_size=BATCH, seed=3, **arguments)


def timed(loader: Any) -> tuple[str, int, float]:
    """Return the hash, the number of batches and the duration of an epoch."""
    started, count = time.perf_counter(), 0

    def counted() -> Any:
        nonlocal count
        for batch in loader:
            count += 1
            yield batch

    found = stream_hash.hashed(counted())
    return found, count, time.perf_counter() - started


def census() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    fds = [name for name in leftovers.look().fds.values() if "memfd" not in name]
    fork_server = psutil.Process(leftovers.fork_server_pid())
    return {
        "descriptors": len(fds),
        "threads": threading.active_count() + process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "descriptors of the fork server": fork_server.num_fds(),
        "bytes": process.memory_full_info().uss,
        "bytes of the fork server": fork_server.memory_full_info().uss,
    }


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    room = {"bytes": MAX_GROWTH_BYTES, "bytes of the fork server": MAX_GROWTH_BYTES}
    return [
        f"{name}: {before[name]} to {after[name]}"
        for name in before
        if after[name] > before[name] + room.get(name, 0)
    ]


def race(
    tmp_path: Path, *, num_rounds: int, num_batches: int, wait_s: float
) -> tuple[list[float], int, list[str]]:
    """Alternate fault-free and killed epochs. Returns speed ratios, deaths and leaks."""
    chance = random.Random(1)
    num_samples = num_batches * BATCH
    quiet_tolls, tolls = (Tolls(tmp_path / name, num_samples) for name in ("quiet", "killed"))
    quiet, killed = make(quiet_tolls, wait_s=wait_s), make(tolls, wait_s=wait_s)
    ratios, num_deaths, before = [], 0, {}
    for number in range(num_rounds + 1):  # the first round is a warm-up
        codes = spread(chance, num_samples, GAP, DEATHS)
        tolls.set(codes)
        runs = {}
        for name in ("quiet", "killed") if number % 2 else ("killed", "quiet"):
            runs[name] = timed(quiet if name == "quiet" else killed)
        assert runs["killed"][:2] == runs["quiet"][:2], f"round {number}"
        assert runs["quiet"][1] == num_batches
        assert tolls.unpaid() == 0  # all deaths happened
        if number:
            ratios.append(runs["quiet"][2] / runs["killed"][2])
            num_deaths += len(codes)
        else:
            before = census()
    left = grown(before, census())
    quiet.close()
    killed.close()
    return ratios, num_deaths, left


def test_20_000_batches_with_a_death_every_50(tmp_path: Path, note: Any) -> None:
    ratios, num_deaths, left = race(tmp_path, num_rounds=10, num_batches=2000, wait_s=0.003)
    ratio = statistics.median(ratios)
    note(
        f"20,000 batches on the fork server, {num_deaths} deaths (SIGKILL, SIGSEGV, os._exit, "
        f"abort, and SIGALRM at random moments): hash of each epoch equal to a quiet run's; "
        f"throughput {ratio:.2f} of it (median of 10 rounds in turn, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; samples wait 3 ms, batches of {BATCH}); "
        f"grown: {left or 'nothing'}"
    )
    assert left == []
    assert num_deaths > 350
    assert ratio >= 0.7


def test_the_same_with_tiny_batches_for_the_record(tmp_path: Path, note: Any) -> None:
    ratios, num_deaths, left = race(tmp_path, num_rounds=4, num_batches=1000, wait_s=0.0001)
    note(
        f"4,000 batches of samples that wait 0.1 ms, {num_deaths} deaths: hashes equal; throughput "
        f"{statistics.median(ratios):.2f} of a quiet run's, which loads 50 batches in the time of "
        "two or three restarts: no promise there"
    )
    assert left == []


def test_another_seed_or_sample_has_another_hash(tmp_path: Path) -> None:
    def hashed(**arguments: Any) -> str:
        tolls = Tolls(tmp_path / "tolls", 400)
        return stream_hash.hashed(DataLoader(Tolled(tolls, wait_s=0.0), **{"seed": 3, **arguments}))

    assert hashed() == hashed()
    assert hashed() != hashed(seed=4)
    assert hashed() != hashed(sampler=[0, 0, *range(2, 400)])


def test_1_000_batches_under_spawn(tmp_path: Path, note: Any) -> None:
    tolls = Tolls(tmp_path / "tolls", 1000 * BATCH)
    quiet, count, _ = timed(make(tolls, wait_s=0.0, num_workers=0, persistent_workers=False))
    codes = spread(random.Random(2), 1000 * BATCH, GAP, DEATHS)
    tolls.set(codes)
    spawned = make(tolls, wait_s=0.003, multiprocessing_context="spawn")
    found, num_batches, seconds = timed(spawned)
    spawned.close()
    assert (found, num_batches, count) == (quiet, 1000, 1000)
    assert tolls.unpaid() == 0
    note(f"1,000 batches under spawn, {len(codes)} deaths: hash equal, {seconds:.0f} s")


def test_hangs_of_an_hour_with_a_limit_of_a_second(
    tmp_path: Path, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    tolls = Tolls(tmp_path / "tolls", 2000 * BATCH)
    quiet, _, _ = timed(make(tolls, wait_s=0.0, num_workers=0, persistent_workers=False))
    codes = spread(random.Random(3), 2000 * BATCH, 400, HANGS)
    tolls.set(codes)
    loader = make(tolls, wait_s=0.001, sample_timeout_s=1.0)
    found, num_batches, seconds = timed(loader)
    loader.close()
    assert (found, num_batches) == (quiet, 2000)
    assert tolls.unpaid() == 0
    told = [text for text in caplog.messages if "has made no progress" in text]
    after_s = [float(text.split("made no progress for ")[1].split(" s")[0]) for text in told]
    assert len(told) == len(codes)
    assert all(" in hang" in text for text in told)
    assert max(after_s) < 2.0
    note(
        f"2,000 batches on the fork server, {len(codes)} hangs of an hour (in Python, in C): hash "
        f"equal, {seconds:.0f} s; each named with its stack after {min(after_s)} to "
        f"{max(after_s)} s, at a limit of 1 s"
    )


def test_growth_would_be_noticed() -> None:
    next(iter(DataLoader(Tolled(Tolls(Path(os.devnull), 0), wait_s=0.0), num_workers=1)), None)
    before = census()
    kept = [os.dup(1), os.dup(1)]
    assert grown(before, census()) != []
    for fd in kept:
        os.close(fd)
