"""The loader that works for one of torch's: ours, with the other's attributes.

torch's loader --_penstock_loader--> PatchedLoader --> our engine
   ^    |                              |
   |    +-- dataset, sampler, ... -----+   taken over each time an iterator is made
the user's code
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.engine.loading.bad_samples import SampleFailure
from penstock.engine.parent.context import EngineSettings
from penstock.engine.parent.faults import Faults
from penstock.errors import warn_user
from penstock.integrations.tested_versions import untested_here
from penstock.integrations.ultralytics import settle_mosaic
from penstock.loader import DataLoader
from penstock.machine.collect import quick_facts
from penstock.options import SharedOptions, options_of
from penstock.order.epoch_state import EpochState
from penstock.order.keys import PATCH_STREAM, make_key, mix64
from penstock.planning.inputs import LoaderRequest
from penstock.planning.plan import Plan
from penstock.planning.safety import make_safe

_PLAIN: Any = TorchDataLoader([0])  # type: ignore[arg-type]
_TORCH_NAMES = tuple(name for name in vars(_PLAIN) if name != "_iterator")
"""What torch's own class keeps; a subclass may keep more, under names that are ours too."""

SPAWNED_ANEW = (
    "workers are spawned anew for each epoch, which takes seconds: the code does not ask for "
    "persistent_workers, and what it changes in its dataset between epochs would not reach those "
    "that stay. Try, if it changes nothing: penstock run --persistent-workers, or "
    "penstock.patch(persistent_workers=True)"
)

_QUIET_SAMPLERS = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
    DistributedSampler,
)


@dataclass
class PatchReport:
    """What patched loaders did since the patch."""

    num_loaders: int = 0
    num_epochs: int = 0
    num_restarts: int = 0
    num_bad: int = 0
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is not changed, but may matter."""


@dataclass
class PatchLayer:
    """One patch: its options, where its loaders are counted, and how many it has had.

    Args:
        options: All of :class:`penstock.options.PatchOptions`, checked.
    """

    options: dict[str, Any]
    report: PatchReport
    num_loaders: int = 0

    def next_seed(self, generator: Any) -> int | None:
        """The seed of the next loader.

        Each has its own, or a loader that is made anew for each epoch would draw the same numbers
        in all of them. Where the code gave its loader a generator, that one's seed counts too: it
        is how ranks are told apart.
        """
        number, self.num_loaders = self.num_loaders, self.num_loaders + 1
        self.report.num_loaders += 1
        if self.options["seed"] is None:
            return None
        given = 0 if generator is None else mix64(generator.initial_seed())
        return make_key(PATCH_STREAM, self.options["seed"], number) ^ given


class PatchedLoader(DataLoader[Any]):
    """Our loader with another's attributes: dataset, sampler, workers and all are the other's.

    Called from: the patched method, with its lock held.
    """

    def __init__(self, loader: Any, layer: PatchLayer) -> None:
        # Not torch's __init__: everything that it would make is taken over in follow().
        self._layer = layer
        self._owner = weakref.ref(loader)
        self._granted: dict[Any, tuple[str | None, int | str]] = {}
        shared = {name: layer.options[name] for name in options_of(SharedOptions)}
        shared["seed"] = layer.next_seed(loader.generator)
        self._set_options(loader.dataset, shared, _asked_prefetch(loader))
        self._is_auto = layer.options["num_workers"] == "auto"
        self._auto_workers = quick_facts().usable_cores if self._is_auto else None
        self._kept: Any = None
        for line in untested_here():
            self._tell_note(line)
        self.follow(loader)

    def __reduce__(self) -> Any:
        """Left behind when the other loader is pickled or copied; the copy gets its own."""
        return type(None), ()

    def belongs_to(self, loader: Any, layer: PatchLayer) -> bool:
        """Does this load for that loader, under that patch? ``copy.copy`` takes it along."""
        return self._owner() is loader and self._layer is layer

    def follow(self, loader: Any) -> None:
        """Take the other's attributes as they are now: some change between epochs."""
        for name in _TORCH_NAMES:  # not by setattr: torch's forbids it for some
            vars(self)[name] = getattr(loader, name)
        vars(self)["_iterator"] = None
        self._asked_prefetch = _asked_prefetch(loader)
        self._rewind(loader)
        self.in_order = getattr(loader, "in_order", True)
        workers = self._layer.options["num_workers"]
        if isinstance(workers, int):
            self.num_workers = workers
        elif self._auto_workers is not None:
            self.num_workers = int(self._auto_workers)
        if self._layer.options["persistent_workers"] and self.num_workers:
            vars(self)["persistent_workers"] = True
        line = settle_mosaic(self.dataset) if self.seed is not None else None
        if line is not None:
            self._tell_change(line)

    def _get_iterator(self) -> Any:
        """torch's class keeps workers where the code asks for it; else it asks us each time."""
        owner = self._owner()
        if owner is None or owner.persistent_workers or not self.persistent_workers:
            return super()._get_iterator()
        travels = (self.dataset, self.collate_fn, self.worker_init_fn)
        if self._kept is not None and _are_same(self._kept[0], travels):
            # A new iterator would draw its base seed here: what the code's generator gives next
            # must not depend on who stays.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._kept[1]._reset(self)
        else:
            self.close()
            self._kept = travels, super()._get_iterator()
        return self._kept[1]

    def close(self) -> None:
        """Stop workers that were kept, if the code did not ask for it."""
        if self._kept is not None:
            self._kept[1]._shutdown_workers()
        self._kept = None

    def _rewind(self, loader: Any) -> None:
        """Make good what an iterator that was given up had drawn ahead from the code's generator.

        How far ahead depends on the number of workers. Ultralytics gives up its endless one when it
        closes its mosaic.
        """
        is_given_up = self._epoch_state.num_begun > 0 and not self._epoch_state.is_over
        if self.seed is None or loader.generator is None or not is_given_up:
            return
        if not _draws_at_start_only(loader):
            loader.generator.manual_seed(
                make_key(PATCH_STREAM, self.seed, self._epoch_state.num_begun)
            )

    def _request(self) -> LoaderRequest:
        """What the code asks for, as far as it is safe here."""
        request, machine = super()._request(), quick_facts()
        if self._layer.options["multiprocessing_context"] is not None:
            request = replace(request, start_method=self._layer.options["multiprocessing_context"])
        asked = (request.start_method, request.num_workers, machine.has_gpu_context)
        if asked not in self._granted:  # once: free memory is another number each time
            safe, lines = make_safe(machine, request)
            self._granted[asked] = (safe.start_method, safe.num_workers)
            for line in lines:
                self._tell_change(line)
        start_method, num_workers = self._granted[asked]
        return replace(request, start_method=start_method, num_workers=num_workers)

    def _tell_change(self, line: str) -> None:
        if line not in self._notes:
            self._notes[line] = None
            self._layer.report.changes.append(line)
            _warn(line)

    def _tell_note(self, line: str) -> None:
        if line not in self._layer.report.notes:
            self._layer.report.notes.append(line)
            _warn(line)

    def _warn(self, plan: Plan) -> None:
        for text in plan.warnings:
            if text not in self._warned:
                self._warned.add(text)
                _warn(text)

    def _begin_epoch(self) -> None:
        self._layer.report.num_epochs += 1
        super()._begin_epoch()

    def _settings(self, plan: Plan) -> EngineSettings:
        """With a seed, what worker_init_fn seeds does not count; code that cannot be changed has
        it often, Hugging Face's Trainer always."""
        is_spawned = plan.pool.value == "process" and plan.start_method.value == "spawn"
        if is_spawned and self._epoch_state.num_begun > 1 and not self.persistent_workers:
            self._tell_note(SPAWNED_ANEW)
        return replace(super()._settings(plan), keeps_init_seed=self.seed is None)

    def _make_faults(self) -> Faults:
        return _CountedFaults(self._option_values(), self._epoch_state, self._layer.report)


class _CountedFaults(Faults):
    """Faults of a patched loader, counted for its patch, too."""

    def __init__(
        self, options: dict[str, Any], epoch_state: EpochState, report: PatchReport
    ) -> None:
        super().__init__(options, epoch_state)
        self._report = report

    def record(self, found: Iterable[SampleFailure]) -> None:
        found = list(found)
        self._report.num_bad += len(found)
        super().record(found)

    def count_restart(self) -> None:
        self._report.num_restarts += 1
        super().count_restart()


def _warn(line: str) -> None:
    """A word about code that cannot be changed must not end it where it makes warnings errors."""
    try:
        warn_user(f"penstock: {line}")
    except UserWarning as warning:
        print(warning, file=sys.stderr)


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _draws_at_start_only(loader: Any) -> bool:
    """Is all that the loader's sampler draws drawn before its first index?

    One that draws later is asked at times that its author could rely on: as far ahead as torch is.
    """
    is_plain = type(loader.batch_sampler) in (BatchSampler, type(None))
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return loader._dataset_kind == _DatasetKind.Iterable or (
        is_plain and type(sampler) in _QUIET_SAMPLERS
    )


def _asked_prefetch(loader: Any) -> int | None:
    """What the code asked for. torch fills in 2 where nothing was said, so that counts as none."""
    prefetch: int | None = loader.prefetch_factor
    if _draws_at_start_only(loader):
        return None if prefetch == 2 else prefetch
    return prefetch or 2
