"""Packing on a Ray cluster: nodes write shards to a shared path as Ray tasks.

    pack(map=ray_map()) -- one task per shard --> nodes: load, write, commit by rename
                        <-- its record ---------- a task whose node dies runs again elsewhere

If a node dies, the shards it was writing are lost. Ray runs them again on another node. A
half-written file is never mistaken for a shard.

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import MissingExtra
from penstock.sources.packed_writer import Map

MAX_RETRIES = 10
_MAX_AHEAD = 4
"""Tasks in flight per CPU of the cluster, so that a million shards are not all queued."""


def ray_map(address: str | None = None, *, max_retries: int = MAX_RETRIES) -> Map:
    """Return a map for :func:`penstock.pack` that runs on a Ray cluster.

    Args:
        address: The cluster's address, for ``ray.init``. None means the cluster that this program
            is connected to, or the one in ``RAY_ADDRESS``, or a new one on this machine.
        max_retries: How often a shard is retried when its node dies.

    Raises:
        MissingExtra: Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtra.named("ray", "Ray is not installed") from None

    def run(function: Callable[[int], Any], items: Iterable[int]) -> Iterator[Any]:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        shared = ray.put(function)  # sends the dataset to each node only once

        def write(job: Callable[[int], Any], number: int) -> Any:
            return job(number)

        task = ray.remote(max_retries=max_retries, retry_exceptions=False)(write)
        waiting = list(items)[::-1]
        under_way: list[Any] = []
        while waiting or under_way:
            most = _MAX_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(under_way) < most:
                under_way.append(task.remote(shared, waiting.pop()))
            done, under_way = ray.wait(under_way, num_returns=1)
            try:
                yield ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error  # the original exception

    return run
