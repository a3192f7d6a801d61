"""The DataLoader: torch's signature plus a few keywords. Only wires the rooms together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock.device.placement import Placed
from penstock.engine.loading.gather import is_sliced
from penstock.engine.parent.auto_workers import AuditionIterator, Measured
from penstock.engine.parent.dataset_changes import DatasetChanges
from penstock.engine.parent.forgiving import Forgiving, weakly
from penstock.engine.parent.fork_server import warm_up
from penstock.engine.parent.inline_iterator import InlineIterator
from penstock.engine.parent.iterator import Setup
from penstock.engine.parent.worker_iterator import PooledIterator
from penstock.errors import BadArgument, warn_user
from penstock.machine.collect import quick_facts
from penstock.options import check_num_workers, check_seed
from penstock.order.epoch_state import EpochState
from penstock.order.resume import Resumable, make_order
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Plan
from penstock.planning.planner import choose_start_method, make_plan
from penstock.planning.worker_count import should_measure
from penstock.trace.recorded import Recorded

_POOLS = ("auto", "process", "thread", "inline")
_RANDOMNESS = ("sample", "worker")
_HAS_IN_ORDER = "in_order" in TorchDataLoader.__init__.__code__.co_varnames
_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(Placed, Forgiving, Recorded, Resumable, TorchDataLoader[_T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` that needs no recipe.

    All of torch's arguments keep their meaning. The ones of our own:

    Args:
        num_workers: As in torch; ``"auto"`` chooses (see :attr:`plan` for the reason).
        pool: ``"process"``, ``"thread"``, ``"inline"``, or ``"auto"``.
        randomness: ``"sample"``: the generators are set before each sample from its position, so
            the number of workers changes nothing. ``"worker"``: torch's way, one seed per worker.
        seed: Order and randomness are functions of (seed, epoch, position) and nothing else. None:
            torch's sampler, and a seed drawn where torch draws its own.
        shard: True: this rank's part, as torch.distributed numbers the ranks. Or give ``rank`` and
            ``world_size``.
        padding: With ranks: repeat samples from the start until all have equally many.
        on_error: What becomes of a sample that raises: ``"raise"``; ``"skip"``: the batch is
            shorter; ``"replace"``: another sample in its place; or a function of (index, error)
            that returns a sample, or None to skip it.
        max_bad: More bad samples than this in an epoch (a count, or a part below 1.0) are an error.
        bad_samples_file: A file that gets a line of JSON for each; ``penstock doctor`` reads it.
        max_restarts: Workers that died or hung and are replaced, within ten minutes.
        sample_timeout_s: A sample that takes longer counts as hung; None: no limit.
        device: Batches are brought there, ``device_prefetch`` of them ahead of the step, on a
            stream of their own. None: they stay in CPU memory.
        finish: Applied to each batch on the device: see :func:`penstock.finish`.
        trace: A path that gets the timeline of the run; see :class:`penstock.Tracing`.

    Example:
        >>> import torch
        >>> from penstock import DataLoader
        >>> data = [(torch.full((2,), float(i)), i) for i in range(6)]
        >>> for x, y in DataLoader(data, batch_size=3, num_workers=2):
        ...     print(tuple(x.shape), y.tolist())
        (3, 2) [0, 1, 2]
        (3, 2) [3, 4, 5]
    """

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
        pool: str = "auto",
        randomness: str = "sample",
        seed: int | None = None,
        shard: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        padding: bool = False,
        on_error: Any = "raise",
        max_bad: float | None = None,
        bad_samples_file: Any = None,
        max_restarts: int = 100,
        sample_timeout_s: float | None = None,
        device: Any = None,
        device_prefetch: int = 2,
        finish: Any = None,
        trace: Any = None,
    ) -> None:
        BadArgument.unless_one_of("pool", pool, _POOLS)
        BadArgument.unless_one_of("randomness", randomness, _RANDOMNESS)
        self._settle_faults(on_error, max_bad, bad_samples_file, max_restarts, sample_timeout_s)
        self._settle_device(device, device_prefetch, finish)
        self._settle_trace(trace)
        self._is_auto = check_num_workers("num_workers", num_workers) == "auto"
        if self._is_auto:
            num_workers = (
                quick_facts().usable_cores
            )  # until the first batch shows how many are needed
            persistent_workers = (
                persistent_workers or quick_facts().os != "linux"
            )  # spawning is slow
        keywords: dict[str, Any] = {"prefetch_factor": prefetch_factor, "in_order": in_order}
        if not _HAS_IN_ORDER:  # torch 1.13, which has no None as prefetch_factor either
            keywords = {} if prefetch_factor is None else {"prefetch_factor": prefetch_factor}
        self._auto_workers = num_workers if self._is_auto else None
        self._begin(dataset, prefetch_factor, pool, randomness, seed)
        self.shard, self.rank, self.world_size, self.padding = shard, rank, world_size, padding
        order, ranks = None, (shard, rank, world_size)
        is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        if sampler is None and batch_sampler is None and not is_iterable:
            order = make_order(
                dataset,
                seed=self.seed,
                shuffle=bool(shuffle),
                batch_size=batch_size,
                drop_last=drop_last,
                ranks=ranks,
                padding=padding,
            )
        elif shard or rank is not None or world_size is not None:
            raise BadArgument(
                "ranks are shared out only where no sampler was given and samples have an index",
                remedy="DataLoader(..., shard=True) without sampler and batch_sampler",
            )
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
        if self._is_auto:  # what needs no measuring is known now
            self.num_workers = self._auto_workers = self.plan.num_workers.value
        elif num_workers:
            plan = make_plan(quick_facts(), self._request(), self._work_so_far())
            warm_up(plan.pool.value, plan.start_method.value)

    def _begin(
        self, dataset: Any, prefetch: int | None, pool: str, randomness: str, seed: int | None
    ) -> None:
        """What a loader has beyond torch's, before anything is loaded."""
        self._asked_prefetch, self._work = prefetch, Workload()
        self._notes: dict[str, None] = {}
        self._warned: set[str] = set()
        self._traces = DatasetChanges(dataset)
        self.pool, self.randomness = pool, randomness
        self.seed = None if seed is None else check_seed("seed", seed)
        self._epoch_state = EpochState(self.seed)

    @property
    def plan(self) -> Plan:
        """What this loader does here, each choice with its reason."""
        plan = make_plan(quick_facts(), self._request(), self._work_so_far())
        return replace(plan, notes=(*self._notes, *getattr(self.dataset, "plan_notes", ())))

    def _request(self) -> LoaderRequest:
        context = self.multiprocessing_context
        is_auto = self._is_auto and self.num_workers == self._auto_workers
        return LoaderRequest(
            num_workers="auto" if is_auto else self.num_workers,
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

    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    def _work_so_far(self) -> Workload:
        return replace(
            self._work,
            is_iterable=self._is_iterable(),
            is_in_memory=is_sliced(self.dataset, self.batch_sampler, self.collate_fn),
        )

    def _get_iterator(self) -> Any:
        is_auto = self._request().num_workers == "auto"
        if is_auto and self.persistent_workers and self._iterator is not None:
            # No worker was worth it: the base seed is drawn once all the same, so that the bits
            # do not depend on how fast this machine is.
            self._iterator._reset(self)
            return self._iterator
        self._turn()
        iterator = self._make_iterator()
        self._replay(iterator)
        return iterator

    def _make_iterator(self) -> Any:
        request, work, facts = self._request(), self._work_so_far(), quick_facts()
        plan = make_plan(facts, request, work)
        self._warn(plan)
        if plan.pool.value == "process":
            self._traces.undo()
        if should_measure(facts, request, work, choose_start_method(facts, request).value):
            inline = replace(self._setup(plan), pool="inline", num_workers=0)
            return AuditionIterator(self, inline, self._traces, self._decide, self._settle)
        setup = self._setup(plan)
        if setup.pool == "inline":
            return InlineIterator(self, setup)
        if plan.num_workers.source == "asked":
            self.check_worker_number_rationality()
        return PooledIterator(self, setup)

    def _setup(self, plan: Plan) -> Setup:
        setup = Setup(
            pool=plan.pool.value,
            start_method=plan.start_method.value,
            num_workers=plan.num_workers.value,
            depth=self._asked_prefetch,
            per_sample=plan.randomness.value == "sample",
            in_order=self.in_order,
            epoch_state=self._epoch_state,
            turn=weakly(self._turn),
            tell=self._notes.setdefault,
            learn=weakly(self._learn),
            **self._fault_setup(),
            **self._device_setup(),
            **self._trace_setup(),
        )
        self._note_facts(setup)
        return setup

    def _warn(self, plan: Plan) -> None:
        for text in plan.warnings:
            if text not in self._warned:
                self._warned.add(text)
                warn_user(text)

    def _learn(self, batch_bytes: int) -> None:
        """A batch was seen: check what all of them together need. Called from: the iterator."""
        if self._work.sample_bytes is None:
            sample_bytes = batch_bytes // (self._rows_per_batch() or 1)
            self._work = replace(self._work, sample_bytes=sample_bytes)
            self._warn(self.plan)

    def _decide(self, measured: Measured) -> Setup:
        """What the batches loaded so far say. Called from: the audition."""
        if measured.stays_because is not None:
            self._work = Workload(stays_because=measured.stays_because.what)
            warn_user(f"num_workers='auto' loads in this process. {measured.stays_because}")
        else:
            self._work = Workload(
                sample_s=measured.sample_s,
                busy_share=measured.busy_share,
                sample_bytes=measured.sample_bytes,
                step_s=measured.step_s,
                step_busy_s=measured.step_busy_s,
                num_samples=self._num_samples(),
            )
        return self._setup(self.plan)

    def _settle(self, setup: Setup) -> None:
        self.num_workers = self._auto_workers = setup.num_workers

    def close(self) -> None:
        """Stop persistent workers now; batches that were delivered stay valid."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None
        self._close_trace()
