"""One sample, exactly as training saw it: alone, in this process, without the samples before it.

Its position in the epoch is the inverse of the order, and what it draws is a function of (seed,
epoch, position): nothing else has to be loaded.
"""

from __future__ import annotations

import copy
from typing import Any

from penstock.engine.loading.fetch import fetch_map, takes_batches
from penstock.errors import BadArgument
from penstock.options import check_count
from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.sample_randomness import SampleRandomness
from penstock.order.samplers import SeededOrder


def replay(loader: Any, epoch: int, index: int) -> Any:
    """``dataset[index]`` as it was in that epoch, before it was put into a batch.

    The caller's own generators are left as they were. A dataset that loads whole batches
    (``__getitems__``) loads the batch that the sample was in. Of a sample that padding gave to
    several ranks, the first is replayed.

    Args:
        loader: A Penstock loader made with ``seed=`` and without a sampler. Workers, pool and ranks
            do not matter.
        epoch: Counted from 0, as the loader counts.
        index: The dataset's.

    Raises:
        BadArgument: The loader's order cannot be run backwards, or the epoch leaves the sample out.

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
        raise BadArgument("the loader has no samples", remedy="a dataset that has some")
    index = check_count("index", index, 0, order.length - 1)
    position = order.position_of(index)
    first, last = _rows_beside(order, loader, position)
    if not takes_batches(loader.dataset) or loader.batch_size is None:
        first, last = position, position + 1
    own = DatasetGenerators(loader.dataset)
    randomness = SampleRandomness(loader.seed, dataset_generators=own)
    randomness.begin(epoch)
    indices = [order.index_at(place % order.length) for place in range(first, last)]
    with randomness.preserved():
        return fetch_map(loader.dataset, indices, first, randomness)[position - first]


def _order_of(loader: Any, epoch: int) -> SeededOrder:
    """The loader's order, turned to ``epoch``; the loader's own stays where it is."""
    if getattr(loader, "seed", None) is None:
        raise BadArgument(
            "a sample can be replayed only where the loader was given a seed",
            remedy="penstock.DataLoader(..., seed=0)",
        )
    if loader.randomness != "sample":
        raise BadArgument(
            f"randomness={loader.randomness!r}: what a sample draws depends on its worker",
            remedy="DataLoader(..., randomness='sample')",
        )
    if not isinstance(loader.sampler, SeededOrder):
        kind = type(loader.batch_sampler if loader.batch_size is None else loader.sampler).__name__
        raise BadArgument(
            f"{kind} cannot be asked at which position an index came",
            remedy="DataLoader(..., shuffle=True, seed=0) without sampler and batch_sampler",
        )
    order = copy.copy(loader.sampler)
    order.set_epoch(epoch)
    return order


def _rows_beside(order: SeededOrder, loader: Any, position: int) -> tuple[int, int]:
    """First and (exclusive) last position of the batch that holds ``position``."""
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
        f"position {position} of {order.length} is left out in this epoch by drop_last=True",
        remedy="DataLoader(..., drop_last=False) to train on every sample",
    )
