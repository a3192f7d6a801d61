"""Measures the benefit of remote workers when loading JPEGs, on a Ray cluster of two nodes.

python benchmarks/ray_workers.py --local 1 --remote 1 --save my-laptop

Both nodes are in this machine, on separate cores: the training process, its workers and Ray's head
on the first ``--local`` cores, the second node on the next ``--remote``. Needs Ray and Pillow.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError as error:
    raise SystemExit("this needs Ray: pip install ray") from error

from front import run
from jpeg_images import Photographs, draw_photographs
from measure import Case, Contender, Pace, Target
from penstock import DataLoader

QUESTION = __doc__.splitlines()[0]
BATCH = 32
NUM_FILES = 384
NUM_BATCHES = 1200
JOIN_LIMIT_S = 240.0
STORE_BYTES = 256 << 20


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--local", type=int, default=1)
    parser.add_argument("--remote", type=int, default=1)
    asked, others = parser.parse_known_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < asked.local + asked.remote:
        raise SystemExit(f"this needs {asked.local + asked.remote} cores")
    with tempfile.TemporaryDirectory() as folder:
        paths = draw_photographs(Path(folder), NUM_FILES)
        dataset = Photographs((paths * (NUM_BATCHES * BATCH // NUM_FILES))[: NUM_BATCHES * BATCH])
        here, there = cores[: asked.local], cores[asked.local : asked.local + asked.remote]
        cluster = start_cluster(here, there)
        try:
            sizes = (asked.local, asked.remote)
            cases = {
                "a": lambda pace: throughput(dataset, pace, *sizes),
                "b": lambda pace: first_batch(dataset, *sizes),
                "c": lambda pace: parent_cpu(dataset, pace, *sizes),
            }
            return run("ray_workers", f"{QUESTION} --local N, --remote M: cores.", cases, others)
        finally:
            ray.shutdown()
            cluster.shutdown()


def start_cluster(here: list[int], there: list[int]) -> Cluster:
    """Start two nodes and connect. Each inherits the cores of this process at that moment."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # as on a node that does nothing else
    node: dict[str, Any] = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    os.sched_setaffinity(0, here)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": len(here), **node})
    os.sched_setaffinity(0, there)
    cluster.add_node(num_cpus=len(there), **node)
    os.sched_setaffinity(0, here)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def make(dataset: Photographs, **options: Any) -> DataLoader:
    return DataLoader(dataset, BATCH, shuffle=True, persistent_workers=True, **options)


def endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def joined(loader: DataLoader, batches: Iterator[Any], num_remote: int) -> None:
    """Load until all remote workers have joined."""
    limit_s = time.monotonic() + JOIN_LIMIT_S
    while sum(" runs on node " in note for note in loader.plan.notes) < num_remote:
        if time.monotonic() > limit_s:
            raise SystemExit(f"{num_remote} remote workers did not join: {loader.plan.notes}")
        next(batches)


def measured(
    dataset: Photographs, pace: Pace, num_remote: int, *, is_cpu: bool = False, **options: Any
) -> Callable[[], float]:
    """Return batches per second, or the CPU milliseconds of this process for each batch."""

    def measure() -> float:
        loader = make(dataset, **options)
        batches = endless(loader)
        next(batches)
        joined(loader, batches, num_remote)
        until_s = time.perf_counter() + 2 * pace.window_s  # uses up prefetched batches
        while time.perf_counter() < until_s:
            next(batches)
        start_s, cpu_s, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start_s < 4 * pace.window_s:
            next(batches)
            count += 1
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        batches.close()  # type: ignore[attr-defined]
        loader.close()
        return 1e3 * cpu_s / count if is_cpu else count / elapsed_s

    return measure


def throughput(dataset: Photographs, pace: Pace, num_local: int, num_remote: int) -> Case:
    """(a) Local workers alone, and with remote ones."""
    alone, mixed = f"{num_local} local", f"{num_local} local + {num_remote} remote"
    remote = {"num_workers": num_local, "remote_workers": num_remote}
    bound = round(0.85 * (num_local + num_remote) / num_local, 2)
    contenders = [
        Contender(name=alone, turn=measured(dataset, pace, 0, num_workers=num_local)),
        Contender(
            name=mixed,
            turn=measured(dataset, pace, num_remote, **remote),
            against=(alone,),
            target=Target(bound=bound),
        ),
    ]
    return Case(key="a", title="JPEGs", unit="batches/s", contenders=contenders)


def first_batch(dataset: Photographs, num_local: int, num_remote: int) -> Case:
    """(b) The first batch of a new loader on a running cluster."""
    ways: dict[str, dict[str, Any]] = {
        "local": {"num_workers": num_local},
        "local, remote workers join later": {
            "num_workers": num_local,
            "remote_workers": num_remote,
        },
        'pool="ray"': {"num_workers": num_remote, "pool": "ray"},
    }

    def timed(options: dict[str, Any]) -> Callable[[], float]:
        def measure() -> float:
            start_s = time.perf_counter()
            loader = make(dataset, **options)
            next(iter(loader))
            elapsed_s = time.perf_counter() - start_s
            loader.close()
            return elapsed_s

        return measure

    contenders = [Contender(name=name, turn=timed(options)) for name, options in ways.items()]
    return Case(key="b", title="the first batch", unit="s", contenders=contenders)


def parent_cpu(dataset: Photographs, pace: Pace, num_local: int, num_remote: int) -> Case:
    """(c) CPU time of the training process for each batch, including Ray's threads."""
    remote: dict[str, Any] = {"num_workers": num_remote, "pool": "ray"}
    contenders = [
        Contender(
            name="local", turn=measured(dataset, pace, 0, is_cpu=True, num_workers=num_local)
        ),
        Contender(
            name='pool="ray"', turn=measured(dataset, pace, num_remote, is_cpu=True, **remote)
        ),
    ]
    title = f"CPU time of the training process for a batch of {BATCH}"
    return Case(key="c", title=title, unit="ms", contenders=contenders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
