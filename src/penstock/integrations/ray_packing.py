"""Packing on a Ray cluster: shards are Ray tasks, written by the nodes to a shared path.

    pack(map=ray_map()) -- one task per shard --> nodes: load, write, commit by rename
                        <-- its record ---------- a task whose node dies is run again elsewhere

A node that is killed costs the shards it was writing. Ray runs them again, on another node, and
what it had half written is never taken for a shard.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import MissingExtra
from penstock.sources.packed_writer import Map

MAX_RETRIES = 10
_MAX_AHEAD = 4
"""Tasks under way for each CPU of the cluster: a million shards must not all wait at once."""


def ray_map(address: str | None = None, *, max_retries: int = MAX_RETRIES) -> Map:
    """A map for :func:`penstock.pack` that runs on a Ray cluster.

    Args:
        address: Of the cluster, for ``ray.init``; None: the one this program is connected to, or
            the one that ``RAY_ADDRESS`` names, or a new one on this machine.
        max_retries: Times that a shard is tried again when its node died.

    Raises:
        MissingExtra: Ray is not installed.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtra(
            "Ray is not installed here", remedy='pip install "penstock[ray]"'
        ) from None

    def run(function: Callable[[int], Any], items: Iterable[int]) -> Iterator[Any]:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        shared = ray.put(function)  # the dataset travels to each node once

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
                raise error.cause from error  # as if it had been raised here

    return run
