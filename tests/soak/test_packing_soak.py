"""Packing that is killed a hundred times, and packing on a Ray cluster that loses a node."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import pack
from support import scripts
from support.packed_sets import Mixed, digest, pack_server
from support.paths import TESTS

pytestmark = pytest.mark.soak

NUM_KILLS = 100


def test_a_packing_killed_a_hundred_times_ends_with_the_same_bytes(
    tmp_path: Path, note: Callable[[str], None]
) -> None:
    length, shard_bytes = 400, 1500
    pack(Mixed(length), tmp_path / "whole", workers=0, shard_bytes=shard_bytes)
    whole = digest(tmp_path / "whole")
    moments, num_killed, num_sets = random.Random(0), 0, 0
    with pack_server() as server:
        server.pack(tmp_path / "warm", length=length, shard_bytes=shard_bytes)
        start = time.perf_counter()
        server.pack(tmp_path / "timed", length=length, shard_bytes=shard_bytes)
        full_s = time.perf_counter() - start
        while num_killed < NUM_KILLS:
            folder = tmp_path / f"set-{num_sets}"
            code = server.pack(
                folder,
                kill_after_s=moments.uniform(0, full_s / 3),
                length=length,
                shard_bytes=shard_bytes,
            )
            num_killed += code == -signal.SIGKILL
            if code != -signal.SIGKILL:
                assert digest(folder) == whole
                num_sets += 1
        server.pack(folder, length=length, shard_bytes=shard_bytes)
        assert digest(folder) == whole
    note(f"packing: {num_killed} kills over {num_sets + 1} sets, each the same to the byte")


def _paths() -> str:
    return os.pathsep.join([str(TESTS), *sys.path])


RAY = """
import os, signal, sys, time
import penstock
from support import packed_sets
from penstock.integrations.ray_packing import ray_map
from ray.cluster_utils import Cluster

class Slow(packed_sets.Mixed):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)
    packed_fingerprint = staticmethod(lambda: "slow")

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
inner = ray_map(cluster.address)
killed = []

def map(function, numbers):
    import ray
    for done, record in enumerate(inner(function, numbers)):
        if done == 3:
            for process in second.live_processes():
                os.kill(process[1].pid, signal.SIGKILL)
                killed.append(process[0])
        yield record

if sys.argv[2] == "ray":
    print("nodes", len(cluster.list_all_nodes()), flush=True)
    found = penstock.pack(Slow(300), sys.argv[1], map=map, shard_bytes=2000)
    print("killed", killed, flush=True)
    print("samples", len(found), flush=True)
import ray
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_ray_cluster_that_loses_a_node_packs_the_whole_set(
    tmp_path: Path, note: Callable[[str], None]
) -> None:
    start = time.perf_counter()
    result = scripts.run(RAY, tmp_path, str(tmp_path / "set"), "ray", PYTHONPATH=_paths())
    took_s = time.perf_counter() - start
    assert result.returncode == 0, result.stderr[-3000:]
    assert "nodes 2" in result.stdout
    assert "raylet" in result.stdout.partition("killed")[2]
    assert "samples 300" in result.stdout

    class Slow(Mixed):
        packed_fingerprint = staticmethod(lambda: "slow")

    Slow.__module__, Slow.__qualname__ = "__main__", "Slow"
    pack(Slow(300), tmp_path / "here", workers=0, shard_bytes=2000)
    assert digest(tmp_path / "set") == digest(tmp_path / "here")
    note(
        f"packing on Ray: two nodes, one killed; the set is whole, the same bytes ({took_s:.0f} s)"
    )
