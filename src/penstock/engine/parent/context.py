"""Objects that a loader passes to its iterators, and iterators to their batch producers.

    DataLoader --LoaderParts, EngineSettings--> LoaderIterator --LoadContext--> BatchProducer

None of them holds a loader or an iterator. So dropping the last reference to an iterator ends its
workers immediately, without the garbage collector.

Tested by ``tests/integration/test_loader.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader

from penstock.engine.loading.default_collate import custom_collators, is_default_collate
from penstock.errors import warn_user
from penstock.named_tuple import NamedTuple
from penstock.order.dataset_generators import NamedGenerators, name_generators
from penstock.order.global_generators import replaced_bit_generator

if TYPE_CHECKING:
    from penstock.device.setup import DeviceSetup
    from penstock.engine.memory.pinned_ring import Pinner
    from penstock.engine.memory.ring import Ring
    from penstock.engine.parent.faults import Faults
    from penstock.order.epoch_state import EpochState, Progress
    from penstock.trace.recorder import Recorder


class EngineSettings(NamedTuple):
    """Settings of the engine, taken from the plan."""

    pool: str
    start_method: str | None
    num_workers: int
    prefetch_factor: int | None
    per_sample: bool
    """True if randomness belongs to the sample, False if it belongs to the worker."""
    in_order: bool
    in_flight: int | str | None = None
    """Samples of an async dataset in flight at once, in each worker. None: it is not async."""
    keeps_init_seed: bool = True
    """Keep a torch seed set by worker_init_fn, although results then depend on the workers."""
    remote_workers: int | str = 0
    """Workers on the nodes of a Ray cluster, beside those of this machine. Or "auto"."""


class LoaderParts(NamedTuple):
    """State that a loader and its iterators share.

    Args:
        notes: Notes about this run that the plan shows to the user.
        worker_entry: ``worker_entry("thread")`` and ``worker_entry("fork")`` return the entry point
            of a worker that starts without a new interpreter. It is passed in because the two sides
            of the engine do not import each other.
    """

    epoch_state: EpochState
    faults: Faults
    recorder: Recorder
    notes: dict[str, None]
    device_setup: DeviceSetup
    worker_entry: Callable[[str], Callable[..., Any]]


class LoadContext:
    """The dataset, functions and settings from which a producer loads batches.

    Args:
        loader: A weak reference to the loader.
        shared_seed: The seed that torch's DataPipes share.
        settings: Replaced once ``num_workers="auto"`` has decided.
        ranks: ``world_size`` and ``rank`` as torch's iterator reads them.
    """

    def __init__(
        self,
        *,
        loader: Callable[[], Any],
        settings: EngineSettings,
        parts: LoaderParts,
        progress: Progress,
        pinner: Pinner | None,
        dataset: Any,
        collate_fn: Any,
        worker_init_fn: Any,
        auto_collation: bool,
        drop_last: bool,
        is_iterable: bool,
        is_persistent: bool,
        base_seed: int,
        shared_seed: int | None,
        timeout_s: float,
        ranks: tuple[int, int],
    ) -> None:
        self.loader = loader
        self.settings = settings
        self.parts = parts
        self.progress = progress
        self.pinner = pinner
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.worker_init_fn = worker_init_fn
        self.auto_collation = auto_collation
        self.drop_last = drop_last
        self.is_iterable = is_iterable
        self.is_persistent = is_persistent
        self.base_seed = base_seed
        self.shared_seed = shared_seed
        self.timeout_s = timeout_s
        self.ranks = ranks

    def note(self, text: str, *, instead_of: str = "") -> None:
        """Add a note to the plan, in place of the one that starts with ``instead_of``."""
        notes = self.parts.notes
        for old in [one for one in notes if instead_of and one.startswith(instead_of)]:
            del notes[old]
        notes.setdefault(text)

    def warn(self, text: str) -> None:
        """Warn the user once, and add the text to the plan."""
        if text not in self.parts.notes:
            self.note(text)
            warn_user(text)

    def worker_objects(self) -> dict[str, Any]:
        """Return the user's objects that workers need, by the names used in error messages."""
        init_fn = self.worker_init_fn
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            sharding: Any = torch_loader._sharding_worker_init_fn
            init_fn = functools.partial(sharding, init_fn, *self.ranks)
        names, states, may_draw = self._name_generators()
        # NumPy imports numpy.random on first use, which takes 10 ms.
        waits_for_numpy = not may_draw and init_fn is None and self.settings.in_flight is None
        return {
            "dataset": self.dataset,
            "collate_fn": self.collate_fn,
            "worker_init_fn": init_fn,
            "on_error": self.parts.faults.on_error,
            "collators": custom_collators(),
            "generator_states": states,
            "bit_generator": replaced_bit_generator(),
            "waits_for_numpy": waits_for_numpy,
            "generator_names": names,  # last: it refers to objects pickled before it
        }

    def _name_generators(self) -> tuple[NamedGenerators, dict[str, Any], bool]:
        if not self.settings.per_sample or self.is_iterable:
            return NamedGenerators({}), {}, True
        roots = {"dataset": self.dataset}
        if not is_default_collate(self.collate_fn):
            roots["collate_fn"] = self.collate_fn
        return name_generators(**roots)

    def make_ring(self, file: Any) -> Ring:
        """Create a ring of slots over ``file``, pinned if the loader pins memory."""
        held, note = max_held_bytes(), self.parts.notes.setdefault
        if self.pinner is None:
            from penstock.engine.memory.ring import Ring

            return Ring(file, max_held_bytes=held, note=note)
        from penstock.engine.memory.pinned_ring import PinnedRing

        return PinnedRing(file, pinner=self.pinner, max_held_bytes=held, note=note)


class EpochPass(NamedTuple):
    """The part of an epoch that a producer loads.

    Args:
        indices: Batches of indices, or single indices without batching.
        position_of: Maps a number of taken samples to a position in the epoch. None: identity.
        num_taken: Number of samples of the stream already taken.
    """

    indices: Iterator[Any]
    position_of: Callable[[int], int] | None
    num_taken: int = 0


class BatchProducer(Protocol):
    """Loads batches for an iterator: inline, with workers, or inline first and workers later."""

    @property
    def workers(self) -> list[Any]:
        """The worker processes or threads. Other libraries read them as ``iterator._workers``."""

    def start_epoch(self, epoch: EpochPass) -> None:
        """Start loading an epoch. Drops unfinished work of an earlier one."""

    def next_batch(self) -> tuple[Any, bool]:
        """Return the next batch, and whether its memory is pinned.

        Raises:
            StopIteration: The epoch is complete.
        """

    def is_ready(self) -> bool:
        """Return True if the next batch can be taken now without delaying the current one."""

    def stop(self) -> None:
        """End the workers, if there are any."""


_UNKNOWN_BYTES = 4 << 30
"""Assumed free memory if the system does not report it."""


def max_held_bytes() -> int:
    """Return the memory limit for ring slots that the user's batches keep: 1/4 of free memory."""
    from penstock.machine.host import memory_bytes  # not needed for the first batch

    _, available_bytes = memory_bytes()
    return (available_bytes or _UNKNOWN_BYTES) // 4
