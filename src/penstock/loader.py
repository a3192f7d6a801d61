"""DataLoader: torch's signature plus the options in :mod:`penstock.options`.

A loader connects the layers. It makes the plan, creates iterators, and tracks the epoch and the
state. :mod:`penstock.engine` loads and transports the batches. Modules that a loader without
workers does not use are imported on first use.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock.device.setup import DeviceSetup
from penstock.engine.loading.fetch import expected_in_flight, in_flight_of
from penstock.engine.parent.context import EngineSettings, LoaderParts, max_held_bytes
from penstock.engine.parent.faults import Faults
from penstock.engine.parent.iterator import LoaderIterator
from penstock.errors import BadArgument, NoStopIteration, warn_user
from penstock.importing import importing, note_imports
from penstock.options import (
    DocWithOptions,
    LoaderOptions,
    Tracing,
    check_arguments,
    check_count,
    check_num_workers,
    options_of,
    read_options,
    refuse_unknown,
    takes_options,
)
from penstock.order.base_order import Order, ShardedOrder
from penstock.order.epoch_state import (
    SAMPLING,
    EpochIndices,
    EpochPosition,
    EpochState,
    has_own_state,
)
from penstock.trace.recorder import Recorder, make_recorder
from penstock.user_objects import offers, probe

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.engine.loading.bad_sample_file import BadSample
    from penstock.engine.parent.auto_workers import Measured
    from penstock.order.loader_state import LoaderState
    from penstock.planning.inputs import LoaderRequest, Workload
    from penstock.planning.plan import Plan
    from penstock.trace.metrics import Metrics
    from penstock.trace.timeline import Timeline

note_imports()
_HAS_IN_ORDER = "in_order" in TorchDataLoader.__init__.__code__.co_varnames
_T_co = TypeVar("_T_co", covariant=True)


def _worker_entry(kind: str) -> Callable[..., Any]:
    from penstock.engine.remote.entry_points import entry_point

    return entry_point(kind)


class DataLoader(TorchDataLoader[_T_co]):
    """Drop-in replacement for ``torch.utils.data.DataLoader``.

    All of torch's arguments keep their meaning. ``num_workers="auto"`` chooses the number of
    workers. See :attr:`plan` for the reason.

    Example:
        >>> import torch
        >>> from penstock import DataLoader
        >>> data = [(torch.full((2,), float(i)), i) for i in range(6)]
        >>> for x, y in DataLoader(data, batch_size=3, num_workers=2):
        ...     print(tuple(x.shape), y.tolist())
        (3, 2) [0, 1, 2]
        (3, 2) [3, 4, 5]
    """

    on_error: Any
    max_bad: float | None
    bad_samples_file: Any
    max_restarts: int
    sample_timeout_s: float | None
    pool: str
    randomness: str
    seed: int | None
    shard: bool
    rank: int | None
    world_size: int | None
    padding: bool
    in_flight: int | str
    remote_workers: int | str
    device: torch.device | None
    device_prefetch: int
    finish: Callable[[Any], Any] | None
    trace: Any

    @takes_options(LoaderOptions)
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | str = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        **options: Unpack[LoaderOptions],
    ) -> None:
        self._set_options(dataset, options, prefetch_factor)
        has_sampler = sampler is not None or batch_sampler is not None
        check_arguments(dataset, has_sampler, batch_size, prefetch_factor)
        self._is_auto = check_num_workers("num_workers", num_workers) == "auto"
        if self._is_auto:
            from penstock.machine.collect import quick_facts

            facts = quick_facts()
            num_workers = facts.usable_cores  # until the first batches show how many are needed
            persistent_workers = persistent_workers or facts.os != "linux"  # spawning is slow
        keywords: dict[str, Any] = {"prefetch_factor": prefetch_factor, "in_order": in_order}
        if not _HAS_IN_ORDER:  # torch 1.13, which does not accept prefetch_factor=None either
            keywords = {} if prefetch_factor is None else {"prefetch_factor": prefetch_factor}
        self._auto_workers = num_workers if self._is_auto else None
        order, is_iterable = None, isinstance(dataset, torch.utils.data.IterableDataset)
        has_ranks = self.shard or self.rank is not None or self.world_size is not None
        if has_sampler or is_iterable:
            if has_ranks:
                from penstock.order.ranks import refuse_ranks

                raise refuse_ranks(sampler if batch_sampler is None else batch_sampler)
        elif has_ranks or self.seed is not None or "penstock.order.mixture" in sys.modules:
            from penstock.order.samplers import make_order

            with NoStopIteration("dataset.__len__"):
                is_shuffled = bool(shuffle)
                order = make_order(dataset, self, is_shuffled, batch_size, drop_last)
        with NoStopIteration("dataset.__len__"):
            super().__init__(
                dataset,
                batch_size,
                shuffle if order is None else None,
                sampler if order is None else order,
                batch_sampler,
                num_workers,  # type: ignore[arg-type]
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                **keywords,
            )
        self.in_order, self.shuffle = in_order, shuffle
        if self._is_auto:  # until there are measurements
            self.num_workers = self._auto_workers = self.plan.num_workers.value
        elif self._uses_fork_server():
            from penstock.engine.parent.fork_server import warm_up

            warm_up(self.dataset)

    def _set_options(
        self, dataset: Any, options: Mapping[str, Any], prefetch_factor: int | None
    ) -> None:
        """Set the options and state that torch's DataLoader does not have."""
        if options:
            refuse_unknown("DataLoader", options, inspect.signature(DataLoader).parameters)
        for name, value in read_options(LoaderOptions, options).items():
            setattr(self, name, value)
        if self.finish is not None and self.device is None:
            raise BadArgument(
                "finish= runs on the target device, but no device= was given",
                remedy="DataLoader(..., device='cuda', finish=...), or device='cpu'",
            )
        self._measured: dict[str, Any] = {}  # fields of the workload
        self._tuning: Any = None  # see engine.parent.worker_tuning
        self._changes: Any = None  # see engine.parent.dataset_changes
        self._notes, self._warned = dict[str, None](), set[str]()
        self._epoch_state = EpochState(self.seed)
        self._faults, self._asked_prefetch = self._make_faults(), prefetch_factor
        self._recorder: Recorder | None = None

    def _make_faults(self) -> Faults:
        return Faults(self._option_values(), self._epoch_state)

    def _option_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options_of(LoaderOptions)}

    # -- the plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Plan of this loader on this machine. Each choice has a reason."""
        with importing():
            from penstock.machine.collect import quick_facts
            from penstock.planning.decisions import make_plan

        plan = make_plan(quick_facts(), self._request(), self._workload())
        fork_server = sys.modules.get("penstock.engine.parent.fork_server")
        if plan.start_method.value == "forkserver" and fork_server is not None:
            started = fork_server.describe_start()
            if started is not None:
                plan = plan._replace(start_method=plan.start_method._replace(reason=started))
        return plan._replace(notes=(*self._notes, *self._notes_of_dataset()))

    def _notes_of_dataset(self) -> tuple[str, ...]:
        # Only a list or tuple counts, because a wrapper may return a value for any attribute name.
        notes = probe(self.dataset, "plan_notes", ())
        return tuple(notes) if isinstance(notes, (list, tuple)) else ()

    def _chooses_workers(self) -> bool:
        """Return True if ``num_workers="auto"`` was given, and not changed since."""
        return self._is_auto and self.num_workers == self._auto_workers

    def _request(self) -> LoaderRequest:
        from penstock.planning.inputs import LoaderRequest

        context = self.multiprocessing_context
        return LoaderRequest(
            num_workers="auto" if self._chooses_workers() else self.num_workers,
            pool=self.pool,
            start_method=context.get_start_method() if context is not None else None,
            prefetch_factor=self._asked_prefetch,
            persistent_workers=self.persistent_workers,
            pin_memory=self.pin_memory,
            device=None if self.device is None else str(self.device),
            batch_size=self._rows_per_batch(),
            randomness=self.randomness,
            has_init_fn=self.worker_init_fn is not None,
            has_sample_limit=self.sample_timeout_s is not None,
        )

    def _workload(self) -> Workload:
        """Return the properties of the workload that are known so far."""
        from penstock.engine.loading.gather import is_sliced
        from penstock.planning.inputs import Workload

        return Workload(
            **self._measured,
            is_iterable=self._is_iterable(),
            is_in_memory=is_sliced(self.dataset, self.batch_sampler, self.collate_fn),
            in_flight=expected_in_flight(in_flight_of(self.dataset, self.in_flight)),
        )

    def _warn(self, plan: Plan) -> None:
        for text in plan.warnings:
            if text not in self._warned:
                self._warned.add(text)
                warn_user(text)

    # -- iterators -------------------------------------------------------------------------------

    def __len__(self) -> int:
        with NoStopIteration("dataset.__len__"):
            return super().__len__()

    def _get_iterator(self) -> Any:
        with NoStopIteration(SAMPLING):
            return self._begin_iterator()

    def _begin_iterator(self) -> Any:
        is_auto = self._chooses_workers()
        if is_auto and self.persistent_workers and self._iterator is not None:
            # The plan uses no workers. Reuse the iterator anyway, as with persistent workers. The
            # base seed is then drawn only once, so the samples do not depend on how fast this
            # machine is.
            self._iterator._reset(self)
            return self._iterator
        self._begin_epoch()
        iterator = self._make_iterator()
        self._skip_delivered(iterator)
        if is_auto and self.persistent_workers:
            self._iterator = iterator  # torch keeps an iterator only if there are workers
        return iterator

    def _make_iterator(self) -> LoaderIterator:
        if not (self.num_workers or self._is_auto or self.sample_timeout_s):
            # There is nothing to choose, and nothing to warn about. See make_plan.
            return LoaderIterator(self, self._settings_without_plan("inline", None), self._parts())
        if self._uses_fork_server():
            if self._changes is not None:
                self._changes.undo()
            settings, parts = self._settings_without_plan("process", "forkserver"), self._parts()
            return LoaderIterator(self, settings, parts)
        from penstock.machine.collect import quick_facts
        from penstock.planning.decisions import choose_start_method, make_plan
        from penstock.planning.worker_count import should_measure

        request, work, facts = self._request(), self._workload(), quick_facts()
        plan = make_plan(facts, request, work)
        self._warn(plan)
        if plan.pool.value in ("process", "ray") and self._changes is not None:
            self._changes.undo()
        settings, parts = self._settings(plan), self._parts()
        if should_measure(facts, request, work, choose_start_method(facts, request).value):
            settings = settings._replace(pool="inline", num_workers=0)
            return LoaderIterator(self, settings, parts, is_auto=True)
        return LoaderIterator(self, settings, parts)

    def _uses_fork_server(self) -> bool:
        """Return True if the plan is sure to use the fork server, and has nothing to warn about."""
        if self._is_auto or not self.num_workers:
            return False
        with importing():
            from penstock.engine.parent.fork_server import is_needed

        context = self.multiprocessing_context
        return is_needed(self.pool, None if context is None else context.get_start_method())

    def _settings_without_plan(self, pool: str, start_method: str | None) -> EngineSettings:
        """Return the settings of a plan that needs no facts. The first plan takes 10 ms to make."""
        per_sample = self.randomness == "sample" and not self._is_iterable()
        return self._make_settings(pool, start_method, self.num_workers, per_sample)

    def _settings(self, plan: Plan) -> EngineSettings:
        method, per_sample = plan.start_method.value, plan.randomness.value == "sample"
        return self._make_settings(plan.pool.value, method, plan.num_workers.value, per_sample)

    def _make_settings(
        self, pool: str, start_method: str | None, num_workers: int, per_sample: bool
    ) -> EngineSettings:
        settings = EngineSettings(
            pool=pool,
            start_method=start_method,
            num_workers=num_workers,
            prefetch_factor=self._asked_prefetch,
            per_sample=per_sample,
            in_order=self.in_order,
            in_flight=in_flight_of(self.dataset, self.in_flight),
            remote_workers=self.remote_workers,
        )
        self._record_facts(settings)
        return settings

    def _parts(self) -> LoaderParts:
        """Return the objects that an iterator shares with this loader."""
        is_tolerant = self.on_error != "raise"
        self._faults.num_samples = self._num_expected() if is_tolerant else None
        self._faults.num_indices = self._num_indices() if self.on_error == "replace" else None
        self._faults.order = self._order()
        return LoaderParts(
            epoch_state=self._epoch_state,
            faults=self._faults,
            recorder=self._get_recorder(),
            notes=self._notes,
            device_setup=DeviceSetup(
                self.device,
                self.device_prefetch,
                self.finish,
                self.pin_memory_device if self.pin_memory else None,
                self._notes.setdefault,
            ),
            worker_entry=_worker_entry,
        )

    def _learn_batch_bytes(self, batch_bytes: int) -> None:
        """Record the size of the first batch, and warn if all batches need too much memory."""
        if self._measured.get("sample_bytes") is None:
            self._measured["sample_bytes"] = batch_bytes // (self._rows_per_batch() or 1)
            in_flight_bytes = batch_bytes * self.num_workers * (self._asked_prefetch or 2)
            if in_flight_bytes > max_held_bytes():  # 1/4 of free memory; the plan warns above half
                self._warn(self.plan)

    def _decide(self, measured: Measured) -> EngineSettings:
        """Make a new plan from the measurements of the first batches. Called by AutoProducer."""
        if measured.stays_because is not None:
            self._measured = {"stays_because": measured.stays_because.what}
            warn_user(f"num_workers='auto' loads samples in this process. {measured.stays_because}")
        else:
            self._measured = {
                "sample_s": measured.sample_s,
                "busy_share": measured.busy_share,
                "sample_bytes": measured.sample_bytes,
                "step_s": measured.step_s,
                "step_busy_s": measured.step_busy_s,
                "num_samples": self._num_samples(),
            }
        return self._settings(self.plan)

    def _settle(self, settings: EngineSettings) -> None:
        self.num_workers = self._auto_workers = settings.num_workers

    def close(self) -> None:
        """Stop persistent workers. Batches already delivered stay valid."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None
        if self._recorder is not None:
            self._recorder.on_end()  # writes the trace file, if one was requested

    # -- bad samples -----------------------------------------------------------------------------

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples skipped or replaced so far, in the order they were found.

        Example:
            >>> from penstock import DataLoader
            >>> class Broken:
            ...     def __len__(self):
            ...         return 4
            ...     def __getitem__(self, i):
            ...         if i == 2:
            ...             raise ValueError("truncated")
            ...         return i
            >>> loader = DataLoader(Broken(), batch_size=2, on_error="skip")
            >>> [batch.tolist() for batch in loader]
            [[0, 1], [3]]
            >>> [(bad.index, bad.error) for bad in loader.bad_samples]
            [(2, 'ValueError: truncated')]
        """
        return self._faults.samples

    @property
    def num_restarts(self) -> int:
        """Number of lost workers replaced so far."""
        return self._faults.num_restarts

    def _num_indices(self) -> int | None:
        """Return the number of indices from which a substitute can be drawn.

        None unless the sampler visits all samples equally often.
        """
        from torch.utils.data import RandomSampler, SequentialSampler

        from penstock.order.samplers import SeededOrder

        takes_all = type(self.sampler) in (RandomSampler, SequentialSampler, SeededOrder)
        if self.batch_size is None and self.batch_sampler is not None:
            return None  # the user's batch sampler
        return len(self.dataset) if takes_all else None  # type: ignore[arg-type]

    def _num_expected(self) -> int | None:
        if not self._is_iterable():
            return self._num_samples()
        try:  # not len(loader): after that, torch warns if an iterable dataset yields more
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    # -- the timeline ----------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Return the timeline so far: of the whole run with ``trace=``, otherwise of its last part.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(range(8), batch_size=4, num_workers=1)
            >>> for batch in loader:
            ...     pass
            >>> timeline = loader.timeline()
            >>> timeline.num_batches, [lane.name for lane in timeline.lanes][:2]
            (2, ['main', 'worker 0'])
        """
        from penstock.trace.timeline import Timeline

        return Timeline((self._recorder or Recorder()).records())

    def metrics(self) -> Metrics:
        """Return rates, waits, faults and the verdict of the last 30 seconds of loading.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(range(8), batch_size=4)
            >>> for batch in loader:
            ...     pass
            >>> loader.metrics().num_batches
            2
        """
        from penstock.trace.metrics import loader_metrics

        return loader_metrics(self._recorder)

    def _repr_html_(self) -> str:
        from penstock.trace.notebook import show_loader

        return show_loader(type(self.dataset).__name__, self.plan, self._recorder)

    def _get_recorder(self) -> Recorder:
        if self._recorder is None:
            self._recorder = make_recorder(self.trace)
            self._recorder.count_sources = self._index_sampler.counter()
            self._recorder.count_faults = self._faults.counts
            self._recorder.count_network = probe(self.dataset, "count_network")
            if self._recorder.traces_steps:
                from penstock.trace.transform_spans import trace_steps

                trace_steps()  # for samples loaded in this process
            if isinstance(self.trace, Tracing) and self.trace.file is not None:
                from penstock.trace.writer import write_trace

                write_trace(self._recorder, os.fspath(self.trace.file), self)
        return self._recorder

    def _record_facts(self, settings: EngineSettings) -> None:
        """Record the settings of this loader in the timeline."""
        recorder, collate_fn = self._get_recorder(), getattr(self, "collate_fn", None)
        is_default = collate_fn is None or collate_fn is torch.utils.data.default_collate
        recorder.facts.update(
            dataset=type(self.dataset).__name__,
            batch_size=self.batch_size,
            num_workers=settings.num_workers,
            is_auto=self._is_auto,
            pool=settings.pool,
            start_method=settings.start_method,
            prefetch_factor=settings.prefetch_factor,
            in_order=settings.in_order,
            persistent_workers=bool(getattr(self, "persistent_workers", False)),
            collate_fn="default" if is_default else "own",
            is_off=recorder.buffer is None,
            device=None if self.device is None else str(self.device),
        )

    # -- epochs and state ------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Optional, because the loader counts epochs."""
        self._epoch_state.set_epoch(check_count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the current position: the batches delivered, not those loaded ahead.

        The state is plain data of a few hundred bytes. It can be loaded with a different number of
        workers, a different pool, and a different number of ranks with the same global batch size.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(list(range(8)), batch_size=2, shuffle=True, seed=0)
            >>> batches = iter(loader)
            >>> first = next(batches)
            >>> state = loader.state_dict()
            >>> other = DataLoader(list(range(8)), batch_size=2, shuffle=True, seed=0)
            >>> other.load_state_dict(state)
            >>> [b.tolist() for b in other] == [b.tolist() for b in batches]
            True
        """
        position = self._epoch_state.mark(self._global_batch(), self._end())
        if self._is_iterable() and not self.num_workers and not self._epoch_state.is_over:
            from penstock.order.stream_state import stream_state_of

            own = stream_state_of(self.dataset)
            position = position._replace(streams={0: own} if own is not None else None)
        return self._state(position).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state`` when the loader is iterated next.

        Samples before that position are not loaded.

        Raises:
            BadState: ``state`` is not a loader state, or belongs to a different loader. This loader
                stays unchanged.
        """
        from penstock.order.loader_state import LoaderState

        saved = LoaderState.from_dict(state)
        saved.refuse_unlike(self._state(EpochPosition(epoch=0, position=0)))
        drawing = self._index_sampler.drawing
        sampler = None if self._order() is not None else self._stateful_sampler()
        saved.refuse_foreign(
            has_seed=self.seed is not None,
            drawing=drawing,
            has_sampler_state=has_own_state(sampler),
            is_iterable=self._is_iterable(),
        )
        saved.refuse_undrawn(has_seed=self.seed is not None, drawing=drawing)
        saved.refuse_streams(self.num_workers, self.dataset)
        bad = saved.bad or {}
        self._faults.restore(saved.epoch, bad.get("positions", []), bad.get("poison", []))
        self._epoch_state.resume(saved.epoch_position())

    def _state(self, position: EpochPosition) -> LoaderState:
        from penstock.order.loader_state import LoaderState

        return LoaderState.at(
            position,
            num_workers=self.num_workers if self._is_iterable() else None,
            seed=self.seed,
            length=self._length(),
            global_batch=self._global_batch(),
            order=self._index_sampler.fingerprint,
            bad=self._bad_in(position.epoch, position.position) or None,
        )

    def _bad_in(self, epoch: int, end: int) -> dict[str, list[Any]]:
        """Return the part of the state that describes bad samples before position ``end``."""
        positions = self._faults.positions(epoch)
        if not self._is_iterable():  # device copies may be ahead of the batches delivered
            positions = [position for position in positions if position < end]
        found: dict[str, list[Any]] = {"positions": positions, "poison": list(self._faults.poison)}
        return {name: values for name, values in found.items() if values}

    def _begin_epoch(self) -> None:
        """Advance to the next epoch. Called once before each epoch is iterated."""
        self._epoch_state.begin_next(self._order(), self._stateful_sampler())
        batch_sampler: Any = self.batch_sampler
        if isinstance(batch_sampler, ShardedOrder):  # BucketedBatches
            batch_sampler.set_epoch(self._epoch_state.epoch)
        if offers(self.dataset, "follow_epoch"):  # a set in object storage downloads ahead
            follow, state = probe(self.dataset, "follow_epoch"), self._epoch_state
            follow(state, self._order(), self.sampler, self._rows_per_batch())

    def _skip_delivered(self, batches: Any) -> None:
        """Load and drop the batches already delivered, if the dataset cannot skip them."""
        state = self._epoch_state
        if not self._is_iterable() or not state.start or state.streams:
            return
        num_batches, state.start = state.start // (self._rows_per_batch() or 1), 0
        from penstock.order.stream_state import why_replayed

        warn_user(why_replayed(self.dataset, num_batches))
        for _ in itertools.islice(batches, num_batches):
            pass

    @property
    def _index_sampler(self) -> EpochIndices:
        return EpochIndices(
            super()._index_sampler,
            self._epoch_state,
            self._rows_per_batch(),
            is_batched=self.batch_sampler is not None,
            is_endless=self._is_iterable(),
        )

    def _stateful_sampler(self) -> Any:
        """Return the batch sampler if it has a ``state_dict()``, otherwise the sampler."""
        return self.batch_sampler if has_own_state(self.batch_sampler) else self.sampler

    def _order(self) -> Order | None:
        return self._index_sampler.order

    # -- lengths ---------------------------------------------------------------------------------

    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    def _rows_per_batch(self) -> int | None:
        sizes = (self.batch_size, getattr(self.batch_sampler, "batch_size", None))
        return next((size for size in sizes if isinstance(size, int)), None)

    def _global_batch(self) -> int | None:
        rows, order = self._rows_per_batch(), self._order()
        return rows * order.world_size if rows and order is not None else rows

    def _num_samples(self) -> int | None:
        """Return the number of samples in an epoch, or None if it is unknown."""
        try:
            most = len(self) * (self._rows_per_batch() or 1)
        except (TypeError, NotImplementedError):
            return None  # a sampler without a length
        length = None if self._rows_per_batch() is None else self._length()
        return most if length is None else min(most, length)

    def _length(self) -> int | None:
        order = self._order()
        if order is not None:
            return order.length
        if self._is_iterable():
            return None
        try:  # the length of the sampler does not apply to a user's batch sampler
            if self.batch_size is None and self.batch_sampler is not None:
                return len(self.batch_sampler) * (self._rows_per_batch() or 1)  # type: ignore[arg-type]
            return len(self.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def _end(self) -> int | None:
        """Return the position where an epoch ends, not counting a last batch that is dropped."""
        length, rows, order = self._length(), self._global_batch(), self._order()
        drops = self.drop_last or getattr(self.batch_sampler, "drop_last", False)
        drops = drops or (order is not None and order.drop_last)
        return length // rows * rows if length is not None and rows and drops else length


DataLoader.__doc__ = DocWithOptions(DataLoader.__doc__, LoaderOptions)  # type: ignore[assignment]
