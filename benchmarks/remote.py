"""Reads a packed set over a slow network: speed, bytes and requests, with a whole and a half cache.

    python benchmarks/remote.py --latency-ms 20 --rate-mb 100
    python benchmarks/remote.py --randomness
    python benchmarks/remote.py --peers --samples 4000

The server is `tests/support/range_server.py` in a process of its own. The half cache is compared
with the best possible eviction, which knows the order, and with LRU, both computed from the order.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock

TESTS = Path(__file__).resolve().parents[1] / "tests"
SHAPE, BATCH = (3, 64, 64), 256
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from support.range_server import RangeServer
with RangeServer(sys.argv[2], float(sys.argv[3]), float(sys.argv[4])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


class Pixels:
    """Random pixels, which cannot be compressed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        random = np.random.default_rng(index)
        return random.integers(0, 256, SHAPE, dtype=np.uint8), index


@contextlib.contextmanager
def serve(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    command = [sys.executable, "-c", SERVE, str(TESTS), str(folder)]
    command += [str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def run_epoch(loader: Any) -> tuple[float, float]:
    """Return the seconds until the first batch, and of the whole epoch."""
    start_s, first_s = time.perf_counter(), None
    for _ in loader:
        first_s = first_s or time.perf_counter() - start_s
    assert first_s is not None
    return first_s, time.perf_counter() - start_s


def uses_of_epochs(dataset: Any, num_epochs: int, num_mixed: int) -> list[list[int]]:
    """Return the blocks of each batch of several epochs."""
    found: list[list[int]] = []
    for epoch in range(num_epochs):
        order = dataset.block_order(seed=0, num_mixed=num_mixed)
        order.set_epoch(epoch)
        for first in range(0, len(order), BATCH):
            rows = order.indices(first, first + BATCH)
            blocks = [part[2] for part in dataset._files[0].blocks_of(dataset, rows)]
            found.append(np.unique(np.concatenate(blocks)).tolist())
    return found


def fetched_bytes(uses: list[list[int]], sizes: np.ndarray, limit: int, *, is_lru: bool) -> int:
    """Return the bytes that a cache fetches with the best possible eviction, or with LRU."""
    following: dict[int, list[int]] = {}
    for at, blocks in enumerate(uses):
        for block in blocks:
            following.setdefault(block, []).append(at)
    cached: dict[int, int] = {}
    total = used = 0
    for at, blocks in enumerate(uses):
        for block in blocks:
            following[block].pop(0)
            if block not in cached:
                total += int(sizes[block])
                used += int(sizes[block])
            cached[block] = at
        while used > limit:
            if is_lru:
                victim = min(cached, key=cached.__getitem__)
            else:
                victim = max(cached, key=lambda one: (following[one] or [sys.maxsize])[0])
            del cached[victim]
            used -= int(sizes[victim])
    return total


def measure_randomness(length: int = 200_000, block_size: int = 341, num_labels: int = 100) -> None:
    """Print how well orders mix a set that is sorted by label."""
    labels = np.arange(length) * num_labels // length
    orders = {f"block order, {num} blocks": (block_size, num) for num in (1, 4, 16, 64, 256)}
    print(f"{length} samples sorted by {num_labels} labels, blocks of {block_size}")
    for name, settings in {"in sequence": None, **orders, "full shuffle": (1, length)}.items():
        order = np.arange(length)
        if settings is not None:
            size, num_mixed = settings
            order = np.asarray(
                penstock.BlockOrder(length, block_size=size, num_mixed=num_mixed, seed=0).at(order)
            )
        batches = labels[order][: length // BATCH * BATCH].reshape(-1, BATCH)
        in_batch = np.mean([len(np.unique(batch)) for batch in batches])
        longest = max(len(list(run)) for _, run in itertools.groupby(labels[order].tolist()))
        places = np.empty(length, np.int64)
        places[order] = np.arange(length)
        apart = np.median(np.abs(np.diff(places)))
        print(
            f"{name:24} {in_batch:6.1f} labels in a batch, longest run of a label {longest:5d}, "
            f"former neighbours {apart:8.0f} apart"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--rate-mb", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mixed", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="Keep the packed set here.")
    parser.add_argument("--randomness", action="store_true", help="Measure the mixing of orders.")
    parser.add_argument("--peers", action="store_true", help="Compare with other loaders.")
    parser.add_argument("--turns", type=int, default=3, help="Turns of --peers.")
    options = parser.parse_args()
    if options.randomness:
        measure_randomness()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.peers:
            from remote_peers import compare, write_sets

            root = folder / f"peers-{options.samples}"
            write_sets(root, options.samples)
            with serve(root, options.latency_ms / 1e3, options.rate_mb * 1e6) as url:
                compare(root, url, options.samples, options.turns)
            return
        source = folder / f"pixels-{options.samples}"
        if not source.exists():
            penstock.pack(Pixels(options.samples), source, workers=0, shard_bytes=64 << 20)
        with serve(source, options.latency_ms / 1e3, options.rate_mb * 1e6) as url:
            measure(url, source, Path(temporary), options)


def measure(url: str, source: Path, temporary: Path, options: argparse.Namespace) -> None:
    local = penstock.Packed(source)
    num_bytes = local._files[0].num_bytes
    print(
        f"{len(local)} samples, {num_bytes / 1e6:.0f} MB, {options.latency_ms:g} ms, "
        f"{options.rate_mb:g} MB/s: at least {num_bytes / options.rate_mb / 1e6:.1f} s to download"
    )

    def make_loader(dataset: Any) -> Any:
        order = dataset.block_order(seed=0, num_mixed=options.mixed)
        return penstock.DataLoader(
            dataset,
            batch_size=BATCH,
            sampler=order,
            num_workers=options.workers,
            persistent_workers=bool(options.workers),
        )

    start_s = time.perf_counter()
    remote = penstock.Packed(url, cache_folder=temporary / "whole")
    print(f"open                  {time.perf_counter() - start_s:8.2f} s")
    loader, plain = make_loader(remote), make_loader(local)
    table = remote._files[0].files.table()
    for name in ("first epoch", "second epoch", "third epoch"):
        before = table.counters()
        first_s, whole_s = run_epoch(loader)
        after = table.counters()
        local_s = run_epoch(plain)[1]
        print(
            f"{name:21} {whole_s:8.2f} s, first batch {first_s:.2f} s, "
            f"{(after['num_bytes'] - before['num_bytes']) / 1e6:.0f} MB in "
            f"{after['num_requests'] - before['num_requests']} requests; local {local_s:.2f} s"
        )
    loader.close()
    plain.close()
    limit = num_bytes // 2
    half = penstock.Packed(url, cache_folder=temporary / "half", cache_bytes=limit)
    loader = make_loader(half)
    table = half._files[0].files.table()
    for _ in range(4):
        run_epoch(loader)
    ours = table.counters()["num_bytes"]
    loader.close()
    uses, sizes = uses_of_epochs(half, 4, options.mixed), half._files[0].layout.block_bytes
    best, lru = (fetched_bytes(uses, sizes, limit, is_lru=is_lru) for is_lru in (False, True))
    print(
        f"half cache, 4 epochs  {ours / 1e6:8.0f} MB; best possible {best / 1e6:.0f} MB "
        f"(ours {ours / best:.2f}x), LRU {lru / 1e6:.0f} MB ({lru / best:.2f}x)"
    )


if __name__ == "__main__":
    main()
