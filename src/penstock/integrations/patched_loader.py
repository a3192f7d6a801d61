"""The Penstock loader behind a patched torch loader.

torch's loader --_penstock_loader--> PatchedLoader --> Penstock's engine
   ^    |                              |
   |    +-- dataset, sampler, ... -----+   copied each time an iterator is created
the user's code
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
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
from penstock.options import SharedOptions, check_arguments, options_of
from penstock.order.epoch_state import EpochState
from penstock.order.keys import PATCH_STREAM, make_key, mix64
from penstock.planning.inputs import LoaderRequest
from penstock.planning.plan import Plan
from penstock.planning.safety import make_safe

_PLAIN: Any = TorchDataLoader([0])  # type: ignore[arg-type]
_TORCH_NAMES = tuple(name for name in vars(_PLAIN) if name != "_iterator")
"""The attributes of torch's own class. A subclass may add names that we use too."""

SPAWNED_ANEW = (
    "workers are spawned again for each epoch, which takes seconds, because the code does not set "
    "persistent_workers. Persistent workers do not see changes that the code makes to its dataset "
    "between epochs. If it makes none, try: penstock run --persistent-workers, or "
    "penstock.patch(persistent_workers=True)"
)

_QUIET_SAMPLERS = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler),
    DistributedSampler,
)


@dataclass
class PatchReport:
    """Counters and messages of patched loaders."""

    num_loaders: int = 0
    num_epochs: int = 0
    num_restarts: int = 0
    num_bad: int = 0
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks about behavior that was not changed."""


@dataclass
class PatchLayer:
    """One patch: its options, its report, and the number of its loaders.

    Args:
        options: All of :class:`penstock.options.PatchOptions`, checked.
    """

    options: dict[str, Any]
    report: PatchReport
    num_loaders: int = 0

    def next_seed(self, generator: Any) -> int | None:
        """Return the seed of the next loader.

        Each loader has its own seed. Otherwise a loader that is created again for each epoch would
        draw the same numbers each time. If the code passes a generator, its seed is mixed in,
        because scripts use it to give ranks different seeds.
        """
        number, self.num_loaders = self.num_loaders, self.num_loaders + 1
        self.report.num_loaders += 1
        if self.options["seed"] is None:
            return None
        given = 0 if generator is None else mix64(generator.initial_seed())
        return make_key(PATCH_STREAM, self.options["seed"], number) ^ given


class PatchedLoader(DataLoader[Any]):
    """A Penstock loader with the attributes of a torch loader: dataset, sampler, workers, etc.

    Called by the patched method, which holds the lock.
    """

    def __init__(self, loader: Any, layer: PatchLayer) -> None:
        # Does not call torch's __init__, because follow() copies everything that it would set.
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
        """Pickle as None. A copy of the torch loader creates its own PatchedLoader."""
        return type(None), ()

    def belongs_to(self, loader: Any, layer: PatchLayer) -> bool:
        """Return True if this belongs to the loader and patch. ``copy.copy`` copies the link."""
        return self._owner() is loader and self._layer is layer

    def follow(self, loader: Any) -> None:
        """Copy the torch loader's current attributes, because some change between epochs."""
        for name in _TORCH_NAMES:  # not with setattr, which torch forbids for some
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
        """Return an iterator. Keeps workers if only the patch makes them persistent."""
        owner = self._owner()
        if owner is None or owner.persistent_workers or not self.persistent_workers:
            return super()._get_iterator()
        travels = (self.dataset, self.collate_fn, self.worker_init_fn)
        if self._kept is not None and _are_same(self._kept[0], travels):
            # A new iterator draws its base seed here. The next number from the code's generator
            # must not depend on whether workers persist.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._kept[1]._reset(self)
        else:
            self.close()
            self._kept = travels, super()._get_iterator()
        return self._kept[1]

    def close(self) -> None:
        """Stop workers that persist only because of the patch."""
        if self._kept is not None:
            self._kept[1]._shutdown_workers()
        self._kept = None

    def _rewind(self, loader: Any) -> None:
        """Reseed the code's generator after an iterator was abandoned.

        The abandoned iterator has drawn ahead, and how far depends on the number of workers.
        Ultralytics abandons its endless iterator when it disables its mosaic.
        """
        is_given_up = self._epoch_state.num_begun > 0 and not self._epoch_state.is_over
        if self.seed is None or loader.generator is None or not is_given_up:
            return
        if not _draws_at_start_only(loader):
            loader.generator.manual_seed(
                make_key(PATCH_STREAM, self.seed, self._epoch_state.num_begun)
            )

    def _uses_fork_server(self) -> bool:
        return False  # the plan decides, because it limits what the code requests

    def _request(self) -> LoaderRequest:
        """Return what the code requests, limited to what is safe on this machine."""
        request, machine = super()._request(), quick_facts()
        if self._layer.options["multiprocessing_context"] is not None:
            request = request._replace(start_method=self._layer.options["multiprocessing_context"])
        asked = (request.start_method, request.num_workers, machine.has_gpu_context)
        if asked not in self._granted:  # once, because free memory varies between calls
            safe, lines = make_safe(machine, request)
            self._granted[asked] = (safe.start_method, safe.num_workers)
            for line in lines:
                self._tell_change(line)
        start_method, num_workers = self._granted[asked]
        return request._replace(start_method=start_method, num_workers=num_workers)

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
        """Return the engine's settings. With a seed, seeding in worker_init_fn has no effect.

        Code that cannot be changed often seeds there. Hugging Face's Trainer always does.
        """
        is_spawned = plan.pool.value == "process" and plan.start_method.value == "spawn"
        if is_spawned and self._epoch_state.num_begun > 1 and not self.persistent_workers:
            self._tell_note(SPAWNED_ANEW)
        return super()._settings(plan)._replace(keeps_init_seed=self.seed is None)

    def _make_faults(self) -> Faults:
        return _CountedFaults(self._option_values(), self._epoch_state, self._layer.report)


class _CountedFaults(Faults):
    """Faults of a patched loader, which are also counted in the patch's report."""

    def __init__(
        self, options: dict[str, Any], epoch_state: EpochState, report: PatchReport
    ) -> None:
        super().__init__(options, epoch_state)
        self._report = report

    def record(self, found: Iterable[SampleFailure]) -> None:
        found = list(found)
        self._report.num_bad += len(found)
        super().record(found)

    def count_restart(self, *, is_hang: bool) -> None:
        self._report.num_restarts += 1
        super().count_restart(is_hang=is_hang)


def _warn(line: str) -> None:
    """Warn, or print to stderr where warnings are errors, so that the script is not stopped."""
    try:
        warn_user(f"penstock: {line}")
    except UserWarning as warning:
        print(warning, file=sys.stderr)


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _draws_at_start_only(loader: Any) -> bool:
    """Return True if the loader's sampler draws all random numbers before its first index.

    The author of any other sampler may rely on when it is called, so it runs as far ahead as in
    torch.
    """
    is_plain = type(loader.batch_sampler) in (BatchSampler, type(None))
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return loader._dataset_kind == _DatasetKind.Iterable or (
        is_plain and type(sampler) in _QUIET_SAMPLERS
    )


def _asked_prefetch(loader: Any) -> int | None:
    """Return the requested prefetch factor. torch's default of 2 counts as not requested."""
    prefetch: int | None = loader.prefetch_factor
    check_arguments(None, True, None, prefetch)
    if _draws_at_start_only(loader):
        return None if prefetch == 2 else prefetch
    return prefetch or 2
