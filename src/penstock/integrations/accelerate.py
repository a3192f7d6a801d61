"""accelerate: ``prepare(penstock.DataLoader(...))`` keeps Penstock's engine and options.

    accelerator.prepare(ours)
        reads ours._is_accelerate_prepared      note_prepared() records which loader is prepared
        creates a DataLoaderShard               and inside it a torch loader
            .base_dataloader                    we replace that with a Prepared: our loader with
                                                accelerate's dataset and batch sampler

accelerate still moves batches to the device, splits them across ranks, and does the bookkeeping at
the end of an epoch. It saves and restores the state of stateful loaders, so ``save_state`` and
``load_state`` can resume in the middle of an epoch. Nothing is patched before a Penstock loader is
prepared.

Tested by ``tests/compat/test_accelerate.py``.
"""

from __future__ import annotations

import copy
import functools
import importlib
import threading
import warnings
import weakref
from typing import Any

from penstock.errors import BadArgument, BadState
from penstock.integrations.accelerate_ranks import Chain, RankWalk, unwrap
from penstock.integrations.tested_versions import untested_here
from penstock.loader import DataLoader
from penstock.order.bucketing import BucketedBatches
from penstock.order.epoch_state import EpochState, has_own_state
from penstock.user_objects import probe

_MODULE = "accelerate.data_loader"
_NEEDED = ("DataLoaderAdapter", "DataLoaderDispatcher", "BatchSamplerShard", "SkipBatchSampler")
_FINISHED = "_iterator_finished"
"""A key that accelerate adds to the state of a loader."""
_lock = threading.Lock()
asked = threading.local()
"""``asked.loader``: a weak reference to the loader that this thread is preparing."""
_all_prepared: weakref.WeakSet[Prepared] = weakref.WeakSet()
_is_hooked = False


def note_prepared(loader: Any, library: Any) -> None:
    """Record the loader that accelerate is about to wrap, and patch accelerate for it."""
    if _hook(library):
        asked.loader = weakref.ref(loader)


def _hook(library: Any) -> bool:
    """Patch accelerate to build on our loaders. Returns False if that is not possible."""
    global _is_hooked
    with _lock:
        if _is_hooked:
            return True
        for line in untested_here():
            warnings.warn(f"penstock: {line}", stacklevel=5)
        missing = [name for name in _NEEDED if not hasattr(library, name)]
        if missing:
            warnings.warn(
                f"penstock: this accelerate has no {', '.join(missing)}, so prepare() builds a "
                "torch loader and keeps only Penstock's sample order. "
                'Try: pip install "accelerate>=0.34.2"',
                stacklevel=5,
            )
            return False
        make = library.DataLoaderAdapter.__init__

        @functools.wraps(make)
        def __init__(adapter: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
            ours = _loader_of(dataset, keywords.get("batch_sampler"), library)
            if ours is None:
                make(adapter, dataset, *arguments, **keywords)
                return
            is_asked = bool(keywords.pop("use_stateful_dataloader", False))
            make(adapter, dataset, *arguments, **keywords)
            _replace_base_loader(adapter, ours, library)
            adapter.base_dataloader._is_state_asked = is_asked

        library.DataLoaderAdapter.__init__ = __init__
        _is_hooked = True
        return True


def _loader_of(dataset: Any, batch_sampler: Any, library: Any) -> Any:
    """Return the Penstock loader that accelerate is wrapping, or None if it is not ours.

    When accelerate skips batches of a prepared loader, it does not read ``_is_accelerate_prepared``
    again, except for iterable datasets.
    """
    own = unwrap(batch_sampler, library).own
    question, asked.loader = getattr(asked, "loader", None), None
    current = None if question is None else question()
    if own is None:
        is_it = current is not None and _is_made_from(dataset, current.dataset)
        return current if is_it else None
    for ours in (current, *_all_prepared):  # compare with None: the truth value is the length
        if ours is not None and own is _own_batches(ours):
            return ours
    return None


def _own_batches(ours: Any) -> Any:
    return ours._chain().own if isinstance(ours, Prepared) else ours.batch_sampler


def _is_made_from(dataset: Any, known: Any) -> bool:
    """Return True for the same dataset, a wrapper of it, or a part of a Hugging Face dataset."""
    return isinstance(dataset, type(known)) or probe(dataset, "dataset") is known


def _replace_base_loader(adapter: Any, ours: Any, library: Any) -> None:
    """Replace the torch loader inside a new accelerate loader with ours."""
    theirs = adapter.base_dataloader
    kind: Any = ours._kind if isinstance(ours, Prepared) else type(ours)
    prepared = _prepared_kind(kind)
    base = prepared.__new__(prepared)
    base._take(ours, theirs, library)
    base._adapter = weakref.ref(adapter)
    is_dealt_out = isinstance(adapter, library.DataLoaderDispatcher)
    world_size = library.PartialState().num_processes
    if base._chain().num_skipped == 0:
        _all_prepared.add(base)
    adapter.base_dataloader = base
    # A dispatcher fetches some batches ahead, so its state would not match the user's position.
    adapter.use_stateful_dataloader = not is_dealt_out or world_size == 1
    adapter.adjust_state_dict_for_prefetch = _adjust_nothing
    adapter.dl_state_dict = base.state_dict()


def _adjust_nothing() -> None:
    """Do nothing. Replaces a correction that only torchdata's loader needs."""


class Prepared(DataLoader[Any]):
    """A Penstock loader with accelerate's dataset and batch sampler.

    Used by accelerate, which fetches one batch ahead and takes the state before that.
    """

    _kind: type[DataLoader[Any]]
    _library: Any
    _adapter: Any
    _leader: Any
    """The accelerate loader whose batches this one partly skips. It receives the state."""
    _is_state_asked: bool
    """True if the user enabled stateful loaders in accelerate. The state works without it too."""
    _told: list[int]
    """The epochs that accelerate announced since the last epoch began."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[DataLoader[Any]]:  # type: ignore[override]
        """The loader's original class, because accelerate pickles its loaders by this class."""
        return self._kind

    def _take(self, ours: Any, theirs: Any, library: Any) -> None:
        mine = vars(self)
        mine.update(vars(ours))
        mine.update(dataset=theirs.dataset, batch_sampler=theirs.batch_sampler, _iterator=None)
        self._library = library
        is_shared_out = isinstance(theirs.sampler, library.BatchSamplerShard)
        if theirs.dataset is not ours.dataset or is_shared_out:
            mine.update({n: getattr(theirs, n) for n in ("batch_size", "drop_last", "sampler")})
        if isinstance(ours, Prepared):  # accelerate skips some of its batches
            self._leader = ours._adapter
            return
        self._kind, self._leader, self._told = type(ours), None, []
        self._notes, self._warned = dict(ours._notes), set(ours._warned)
        self._changes = None
        self._epoch_state = EpochState(self.seed)
        self._faults = self._make_faults()
        self._record_announced_epochs()
        self._epoch_state.resume(ours._epoch_state.upcoming())

    def _record_announced_epochs(self) -> None:
        """Replace the order with a copy that records the epochs that accelerate announces."""
        chain = self._chain()
        if chain.order is None:
            return
        if chain.order.world_size > 1 and chain.world_size > 1:
            raise BadArgument(
                "the loader is already sharded by rank, and accelerate would shard it again",
                remedy="DataLoader(...) without shard=, rank= and world_size=, then prepare()",
            )
        order, own = copy.copy(chain.order), copy.copy(chain.own)
        vars(order)["set_epoch"] = self._told.append
        own.sampler = order
        vars(self)["sampler"] = order
        if chain.sharing is None:
            vars(self)["batch_sampler"] = own
        else:
            chain.sharing.batch_sampler = own

    def _chain(self) -> Chain:
        return unwrap(self.batch_sampler, self._library)

    # -- the order -------------------------------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        if self.batch_sampler is None or self._is_iterable():
            return super()._index_sampler
        return RankWalk(self.batch_sampler, self._chain(), self._epoch_state)

    def _rows_per_batch(self) -> int | None:
        chain = self._chain()
        return super()._rows_per_batch() if chain.own is None else chain.rows

    def _global_batch(self) -> int | None:
        rows, world_size = super()._global_batch(), self._chain().world_size
        return rows and rows * world_size

    def _stateful_sampler(self) -> Any:
        own = self._chain().own
        return own if has_own_state(own) else super()._stateful_sampler()

    def _begin_epoch(self) -> None:
        chain, order = self._chain(), self._order()
        self._select_epoch()
        if chain.num_skipped:
            position = chain.num_skipped * (self._global_batch() or 1)
            length = self._length()
            self._epoch_state.start_at(position if length is None else min(position, length))
        super()._begin_epoch()
        if order is not None:
            type(order).set_epoch(order, self._epoch_state.epoch)
        if isinstance(chain.own, BucketedBatches):
            chain.own.set_epoch(self._epoch_state.epoch)
        self._told.clear()
        adapter = self._adapter and self._adapter()
        if adapter is not None and order is not None:
            adapter.iteration = self._epoch_state.epoch

    def _select_epoch(self) -> None:
        """Select the epoch that the user set, or else the next one.

        accelerate announces an epoch each time it begins one. It increments the number only if the
        previous epoch ran to its end, so a single announcement of the current epoch carries no
        information. An announcement by the user comes before it.
        """
        told, epoch_state = self._told, self._epoch_state
        is_begun = epoch_state.num_begun > 0
        if told and (len(told) > 1 or told[-1] != (epoch_state.epoch if is_begun else 0)):
            epoch_state.set_epoch(told[-1])

    # -- the state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        leader = self._leader and self._leader()
        if leader is not None:
            leader.dl_state_dict = dict(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. A mismatch only warns unless the user enabled stateful loaders."""
        try:
            super().load_state_dict({name: state[name] for name in state if name != _FINISHED})
        except BadState as error:
            if self._is_state_asked:
                raise
            text = (
                "penstock: the loader restarts its epoch from the beginning, not from the "
                f"checkpoint. {error}"
            )
            warnings.warn(text, stacklevel=3)
            return
        adapter = self._adapter and self._adapter()
        if adapter is not None:
            adapter.iteration = state["epoch"]
            adapter.dl_state_dict = self.state_dict()

    def _bad_in(self, epoch: int, end: int) -> dict[str, list[Any]]:
        """Return nothing with several ranks, because all ranks write the same file."""
        return super()._bad_in(epoch, end) if self._chain().world_size == 1 else {}

    def __reduce__(self) -> Any:
        state = {**vars(self), "_adapter": None, "_leader": None, "_library": None}
        return _restore, (self._kind, state)


@functools.cache
def _prepared_kind(kind: Any) -> type[Prepared]:
    """Return the class of a prepared loader. It is a subclass of the loader's class."""
    return Prepared if kind is DataLoader else type("Prepared", (Prepared, kind), {})


def _restore(kind: Any, state: dict[str, Any]) -> Prepared:
    prepared = _prepared_kind(kind)
    loader = prepared.__new__(prepared)
    vars(loader).update(state, _library=importlib.import_module(_MODULE))
    return loader
