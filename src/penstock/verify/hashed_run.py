"""Runs a loader under one setting and hashes its batches.

    seed generators -> factory -> loader -> batch, batch, ...           normal run
                                    | state_dict, workers killed        in the middle, if requested
                       factory -> loader, load_state_dict -> batch ...  the rest

The caller's generators are set to the same state before each run, so a loader that draws its seeds
from them draws the same seeds. They are restored afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.order.global_generators import preserved_generators
from penstock.verify.factory import Factory
from penstock.verify.hashing import digest, samples_of
from penstock.verify.settings import Setting

MAX_DELAY_S = 0.004
NUM_DELAYS = 200
"""Delays in one run or one worker: enough to change the order of arrival, and 0.4 s in total."""


@dataclass(frozen=True, kw_only=True)
class HashedBatch:
    """The hash of a batch, and those of its samples. None if it cannot be split."""

    whole: bytes
    samples: tuple[bytes, ...] | None


@dataclass
class HashedRun:
    """The hashes of all batches of a run, by epoch."""

    epochs: list[list[HashedBatch]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def digest(self) -> str:
        """One hash over everything, for comparison by eye."""
        return digest([[batch.whole for batch in epoch] for epoch in self.epochs]).hex()

    @property
    def num_batches(self) -> int:
        return sum(map(len, self.epochs))

    @property
    def num_samples(self) -> int:
        return sum(len(self.samples(epoch)) for epoch in range(len(self.epochs)))

    def batches(self, epoch: int) -> list[HashedBatch]:
        """Return the batches of an epoch. Empty if the run did not reach it."""
        return self.epochs[epoch] if epoch < len(self.epochs) else []

    def samples(self, epoch: int) -> list[bytes]:
        """Return the hashes of an epoch's samples. A batch that cannot be split counts as one."""
        found: list[bytes] = []
        for batch in self.batches(epoch):
            found += (batch.whole,) if batch.samples is None else batch.samples
        return found


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The part of a loader to run.

    Args:
        max_batches: Maximum per epoch. None: all.
        stops: Number of batches in each epoch after which an interrupted run is killed.
        seed: Seed of the caller's generators.
    """

    num_epochs: int = 2
    max_batches: int | None = None
    stops: tuple[int, ...] = ()
    seed: int = 0


def run_and_hash(factory: Factory, setting: Setting, extent: Extent) -> HashedRun:
    """Run a loader and hash its batches."""
    found, start_s = HashedRun(), time.perf_counter()
    for epoch, _, batch in iterate(factory, setting, extent):
        while len(found.epochs) <= epoch:
            found.epochs.append([])
        samples = samples_of(batch)
        hashes = None if samples is None else tuple(digest(sample) for sample in samples)
        found.epochs[epoch].append(HashedBatch(whole=digest(batch), samples=hashes))
    found.took_s = time.perf_counter() - start_s
    return found


def capture_batch(
    factory: Factory, setting: Setting, extent: Extent, place: tuple[int, int]
) -> Any:
    """Return the batch at ``place`` (epoch, number) of a new run, or None if there is none."""
    for epoch, number, batch in iterate(factory, setting, extent):
        if (epoch, number) == place:
            samples = samples_of(batch)  # as lists, because the batch's class may not be picklable
            plain = batch if samples is None else samples
            return pickle.loads(pickle.dumps(plain))  # shares no memory with the loader
    return None


def iterate(factory: Factory, setting: Setting, extent: Extent) -> Iterator[tuple[int, int, Any]]:
    """Yield (epoch, number, batch) of a run. Everything it started ends with the iterator."""
    with _generators_at(extent.seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every setting would repeat them
        run = _Run(factory, setting, extent)
        try:
            yield from run.iterate()
        finally:
            run.close()


class _Run:
    def __init__(self, factory: Factory, setting: Setting, extent: Extent) -> None:
        self._factory, self._setting, self._extent = factory, setting, extent
        self._batches: Any = None
        self._loader = factory(**setting.arguments)
        if setting.delays == "samples":
            _delay_samples(self._loader)

    def iterate(self) -> Iterator[tuple[int, int, Any]]:
        for epoch in range(self._extent.num_epochs):
            self._batches, number = iter(self._loader), 0
            stop = self._stop_in(epoch)
            while number != self._extent.max_batches:
                if number == stop:
                    self._die_and_resume()
                try:
                    batch = next(self._batches)
                except StopIteration:
                    break
                yield epoch, number, batch
                del batch  # so that a loader that reuses memory is not blocked
                number += 1
                if self._setting.delays == "consumer" and number < NUM_DELAYS:
                    time.sleep(_random_s())
            if self._batches is self._loader:
                return  # an iterator has only one epoch
            self._batches = None

    def _stop_in(self, epoch: int) -> int | None:
        """Return the batch at which to kill the run, or None.

        Without a seed, only the last epoch is interrupted, because a resumed loader would draw
        different seeds for the epochs after it.
        """
        if self._setting.resumed_with is None or epoch >= len(self._extent.stops):
            return None
        is_last = epoch == self._extent.num_epochs - 1
        has_seed = getattr(self._loader, "seed", None) is not None
        return self._extent.stops[epoch] if is_last or has_seed else None

    def _die_and_resume(self) -> None:
        state = pickle.loads(pickle.dumps(self._loader.state_dict()))
        kill_workers(self._batches)
        self.close()
        self._loader = self._factory(**(self._setting.resumed_with or {}))
        self._loader.load_state_dict(state)
        self._batches = iter(self._loader)

    def close(self) -> None:
        """End this run's workers, including persistent ones."""
        batches, self._batches = self._batches, None
        for name, owner in (("_shutdown_workers", batches), ("close", self._loader)):
            with suppress(Exception):  # with dead workers it may raise
                getattr(owner, name, lambda: None)()


@contextmanager
def _generators_at(seed: int) -> Iterator[None]:
    import torch

    with preserved_generators():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


def kill_workers(batches: Any) -> None:
    """Kill the worker processes of an iterator, as a container's memory limit would."""
    import psutil

    workers = [worker for worker in getattr(batches, "_workers", ()) if hasattr(worker, "pid")]
    try:
        own = {child.pid for child in psutil.Process().children(recursive=True)}
    except psutil.Error:  # /proc is missing
        own = {worker.pid for worker in workers if worker.pid is not None}
    try:
        for worker in workers:
            if worker.pid in own:
                os.kill(worker.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        time.sleep(0.05)
    except (RuntimeError, ProcessLookupError):
        pass  # torch's loader raises from its signal handler, at any point of the program


# -- delays ----------------------------------------------------------------------------------------


def _random_s() -> float:
    """Return a random delay. Uses no generator: delays must vary, and must not move any state."""
    return int.from_bytes(os.urandom(2), "little") / 65536 * MAX_DELAY_S


class Delayed:
    """A dataset with a random delay for each of its first samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.num_left = NUM_DELAYS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if self.num_left:
            self.num_left -= 1
            time.sleep(_random_s())
        return self.dataset[index]


class AsyncDelayed(Delayed):
    """The same for an async dataset."""

    async def __getitem__(self, index: Any) -> Any:
        if self.num_left:
            self.num_left -= 1
            await asyncio.sleep(_random_s())
        return await self.dataset[index]


class CannotDelay(Exception):
    """The loader's samples cannot be delayed."""


def _delay_samples(loader: Any) -> None:
    from torch.utils.data import IterableDataset

    dataset = vars(loader).get("dataset") if hasattr(loader, "__dict__") else None
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_stream or hasattr(dataset, "__getitems__"):
        raise CannotDelay("its samples are not loaded one by one from a .dataset")
    is_async = inspect.iscoroutinefunction(getattr(type(dataset), "__getitem__", None))
    # torch's class refuses a normal assignment.
    vars(loader)["dataset"] = AsyncDelayed(dataset) if is_async else Delayed(dataset)
