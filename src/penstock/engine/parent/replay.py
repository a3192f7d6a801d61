"""Replays one sample exactly as training saw it, in this process, without loading earlier samples.

The sample's position in the epoch is the inverse of the order, and its random numbers are a
function of (seed, epoch, position). So nothing else needs to be loaded.
"""

from __future__ import annotations

import copy
from typing import Any

from penstock.engine.loading.async_samples import AsyncSamples
from penstock.engine.loading.fetch import (
    async_one_getter,
    fetch_map,
    in_flight_of,
    takes_batches,
)
from penstock.errors import BadArgument
from penstock.options import check_count
from penstock.order.async_randomness import AsyncRandomness
from penstock.order.base_order import Order
from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.sample_randomness import SampleRandomness


def replay(loader: Any, epoch: int, index: int) -> Any:
    """Return ``dataset[index]`` as it was in that epoch, before collation.

    The caller's generators are left unchanged. If the dataset loads whole batches
    (``__getitems__``), the sample's whole batch is loaded. If padding gave the sample to several
    ranks, the first occurrence is replayed.

    Args:
        loader: A Penstock loader created with ``seed=`` and without a sampler. The number of
            workers, the pool and the ranks do not matter.
        epoch: The epoch, counted from 0 as the loader does.
        index: The sample's index in the dataset.

    Raises:
        BadArgument: The loader's order cannot be inverted, or the sample is not in the epoch.

    Example:
        >>> import random, penstock
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 100
        ...     def __getitem__(self, i):
        ...         return i, random.random()
        >>> loader = penstock.DataLoader(Noisy(), batch_size=10, shuffle=True, seed=0)
        >>> indices, noise = next(iter(loader))
        >>> penstock.replay(loader, 0, int(indices[3])) == (int(indices[3]), float(noise[3]))
        True
    """
    order = _order_of(loader, check_count("epoch", epoch))
    if not order.length:
        raise BadArgument("the loader has no samples", remedy="a dataset that is not empty")
    index = check_count("index", index, 0, len(loader.dataset) - 1)
    position = order.position_of(index)
    first, last = _rows_beside(order, loader, position)
    if not takes_batches(loader.dataset) or loader.batch_size is None:
        first, last = position, position + 1
    indices = [order.index_at(place % order.length) for place in range(first, last)]
    if in_flight_of(loader.dataset, loader.in_flight) is not None:
        return _replay_async(loader, epoch, indices, first)[position - first]
    own = DatasetGenerators(loader.dataset)
    randomness = SampleRandomness(loader.seed, dataset_generators=own)
    randomness.begin(epoch)
    with randomness.preserved():
        return fetch_map(loader.dataset, indices, first, randomness)[position - first]


def _replay_async(loader: Any, epoch: int, indices: list[int], position: int) -> Any:
    samples = AsyncSamples(
        1, randomness=AsyncRandomness(loader.seed, loader.dataset), is_shared=True
    )
    if takes_batches(loader.dataset) and loader.batch_size is not None:
        get_many = loader.dataset.__getitems__
        samples.start_batch(None, get_many, indices, position, epoch)
        return next(samples.results(None))
    get = async_one_getter(loader.dataset)
    return [samples.fetch(None, get, indices[0], position, epoch)]


def _order_of(loader: Any, epoch: int) -> Any:
    """Return a copy of the loader's order, set to ``epoch``. The loader's own is unchanged."""
    if getattr(loader, "seed", None) is None:
        raise BadArgument(
            "replay needs a loader with a seed",
            remedy="penstock.DataLoader(..., seed=0)",
        )
    if loader.randomness != "sample":
        raise BadArgument(
            f"randomness={loader.randomness!r}: a sample's random numbers depend on its worker",
            remedy="DataLoader(..., randomness='sample')",
        )
    if not isinstance(loader.sampler, Order) or not hasattr(loader.sampler, "position_of"):
        kind = type(loader.batch_sampler if loader.batch_size is None else loader.sampler).__name__
        raise BadArgument(
            f"{kind} does not support looking up the position of an index",
            remedy="DataLoader(..., shuffle=True, seed=0) without sampler and batch_sampler",
        )
    order = copy.copy(loader.sampler)
    order.set_epoch(epoch)
    return order


def _rows_beside(order: Order, loader: Any, position: int) -> tuple[int, int]:
    """Return the first and last (exclusive) position of the batch that contains ``position``."""
    rows = loader.batch_size or 1
    start = position // (rows * order.world_size) * rows * order.world_size
    drops = loader.drop_last and loader.batch_size is not None
    for rank in range(order.world_size):
        part = order.for_rank(rank).starting_at(start)
        last = min(rows, len(part))
        if not last or not part.global_position(0) <= position <= part.global_position(last - 1):
            continue
        if last < rows and drops:
            break
        return part.global_position(0), part.global_position(last - 1) + 1
    raise BadArgument(
        f"position {position} of {order.length} is dropped in this epoch by drop_last=True",
        remedy="DataLoader(..., drop_last=False) to train on every sample",
    )
