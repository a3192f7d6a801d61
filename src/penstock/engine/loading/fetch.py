"""Calls the user's dataset: by sample, by batch (``__getitems__``) or as a stream.

Called by a worker (process or thread), or by the parent when it loads inline.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from penstock.errors import BadArgument, NoStopIteration
from penstock.order.sample_randomness import SampleRandomness
from penstock.user_objects import probe

EXPECTED_IN_FLIGHT = 64
"""With ``in_flight="auto"``, plans and the first leases count with this many async samples in
flight in a worker. It finds its own number, see :mod:`penstock.engine.loading.async_limit`."""


class EndOfStream(Exception):
    """The worker's share of an iterable dataset has ended."""


class PassOver(Exception):
    """The parent has started a new pass. The rest of this pass is not needed."""


class EmptyBatch(Exception):
    """Every sample of a batch was bad, so there is nothing to deliver."""


def call_user(
    function: Callable[[Any], Any],
    index: Any,
    position: int,
    randomness: SampleRandomness | None,
    name: str = "dataset[i]",
) -> Any:
    """Call user code with the randomness of the sample (or batch) at ``position``.

    Args:
        name: The name of the function in error messages.
    """
    try:
        if randomness is None:
            return function(index)
        return randomness.call(function, index, position)
    except StopIteration as error:
        raise NoStopIteration.error_for(name) from error


def getter(dataset: Any) -> Callable[[Any], Any]:
    """Return ``dataset[i]`` as a function.

    ``__getitem__`` is looked up on the class, as the interpreter does. A wrapper that forwards
    unknown attributes to an inner dataset therefore does not bypass its own ``__getitem__``.
    """
    found = getattr(type(dataset), "__getitem__", None)
    if isinstance(found, FunctionType):
        return MethodType(found, dataset)
    return functools.partial(operator.getitem, dataset)


def one_getter(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads one sample, also for datasets with ``__getitems__``."""
    if not takes_batches(dataset):
        return getter(dataset)
    return lambda index: dataset.__getitems__([index])[0]


def takes_batches(dataset: Any) -> bool:
    """Return True if the dataset supports torch's batched ``__getitems__``.

    torch's own Subset defines it (since 2.0), but only forwards to the dataset it wraps.
    """
    from torch.utils.data import Subset

    while type(dataset) is Subset and hasattr(dataset, "__getitems__"):
        dataset = dataset.dataset
    return callable(probe(dataset, "__getitems__"))


def in_flight_of(dataset: Any, in_flight: int | str) -> int | str | None:
    """Return ``in_flight`` if the samples of ``dataset`` are async, else None.

    A number makes any dataset count as async: a wrapper of the user's own may return what the async
    ``__getitem__`` of the dataset inside returns.

    Raises:
        BadArgument: A number was given for an iterable dataset.

    Example:
        >>> class Pages:
        ...     async def __getitem__(self, index):
        ...         return index
        >>> in_flight_of(Pages(), "auto"), in_flight_of(range(4), "auto")
        ('auto', None)
    """
    from torch.utils.data import ConcatDataset, IterableDataset, Subset

    is_given = not isinstance(in_flight, str)
    if isinstance(dataset, IterableDataset):
        if is_given:
            raise BadArgument(
                f"in_flight={in_flight} applies to datasets with async __getitem__, not to an "
                "iterable dataset",
                remedy="async def __getitem__(self, index) in a dataset with a length",
            )
        return None
    while type(dataset) in (Subset, ConcatDataset):
        dataset = dataset.dataset if type(dataset) is Subset else dataset.datasets[0]
    functions = getattr(type(dataset), "__getitem__", None), probe(dataset, "__getitems__")
    is_async = any(map(inspect.iscoroutinefunction, functions))
    return in_flight if is_given or is_async else None


def expected_in_flight(in_flight: int | str | None) -> int:
    """Return how many samples a worker has in flight. 0 if the dataset is not async."""
    return EXPECTED_IN_FLIGHT if in_flight == "auto" else int(in_flight or 0)


def async_one_getter(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads one sample of an async dataset."""
    if not takes_batches(dataset):
        return getter(dataset)

    async def load(index: Any) -> Any:
        return (await dataset.__getitems__([index]))[0]

    return load


def fetch_map(
    dataset: Any,
    indices: list[Any],
    position: int,
    randomness: SampleRandomness | None,
    get: Callable[[Any], Any] | None = None,
) -> Any:
    """Load the samples of ``indices``. ``position`` is the position of the first one.

    Args:
        get: Loads one sample. None: ``dataset[i]``. Not used if there is ``__getitems__``.

    Returns a list, or the object that ``__getitems__`` returns.
    """
    if takes_batches(dataset):
        if randomness is not None:
            randomness.snapshot()
        get_many, name = dataset.__getitems__, "dataset.__getitems__"
        return call_user(get_many, indices, position, randomness, name)
    get = getter(dataset) if get is None else get
    with NoStopIteration("dataset[i]"):
        if randomness is None:
            return [get(index) for index in indices]
        return randomness.call_many(get, indices, position)


def as_indices(batch: Any) -> Any:
    """Return a batch of indices as a sequence. torch also accepts sets, iterators and dicts."""
    is_sequence = hasattr(batch, "__getitem__") and not isinstance(batch, Mapping)
    return batch if is_sequence else list(batch)


TakeNext = Callable[[Iterator[Any], int], list[Any]]
"""Returns the next sample of an iterator in a list, or an empty list to skip a bad one."""


class Stream:
    """One pass over an iterable dataset.

    Args:
        take_next: Applies the bad-sample policy. If None, bad samples raise.
        has_ended: The stream ended before a resume. The dataset is not read.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        auto_collation: bool,
        drop_last: bool,
        take_next: TakeNext | None = None,
        has_ended: bool = False,
    ) -> None:
        with NoStopIteration("dataset.__iter__"):
            self._samples = iter(()) if has_ended else iter(dataset)
        self._take_next = take_next
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self.has_ended = has_ended
        """True if the dataset has no more samples, which a batch that is not full shows."""

    def fetch(self, index: Any, position: int = 0) -> Any:
        """Return the next batch as a list of samples, or the next sample if batching is off.

        Raises:
            EndOfStream: No samples are left or, with ``drop_last``, too few for a batch.
            EmptyBatch: All samples of the batch were bad and are skipped.
        """
        if self.has_ended:
            raise EndOfStream
        samples: list[Any] = []
        num_taken = 0
        for place, _ in enumerate(index if self._auto_collation else (None,), position):
            try:
                if self._take_next is None:
                    samples.append(next(self._samples))
                else:
                    samples.extend(self._take_next(self._samples, place))
                num_taken += 1
            except StopIteration:
                self.has_ended = True
                break
        if not num_taken or (self._drop_last and self._auto_collation and num_taken < len(index)):
            raise EndOfStream
        if not samples:
            raise EmptyBatch
        return samples if self._auto_collation else samples[0]


def seed_pipes(dataset: Any, shared_seed: int | None) -> Any:
    """Set the seed shared by all workers in torch's DataPipes. Other datasets are unchanged."""
    if shared_seed is None:
        return dataset
    import torch
    from torch.utils.data.graph_settings import apply_random_seed

    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    return apply_random_seed(dataset, generator)
