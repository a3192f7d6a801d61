"""Publishes the order and the position of a loader to the cache, from a thread of its process.

At the beginning of an epoch the blocks of its first batches are computed and written at once. The
thread then computes the rest and the next epoch, writes the position several times a second, and
sees to it that a downloader is alive. A loader that stops costs nothing: its heartbeat ends with
its process, and the cache no longer keeps blocks for it.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import BadArgument, PenstockError
from penstock.order.base_order import Order
from penstock.order.samplers import SeededOrder
from penstock.sources.file_locks import lock_file
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import describe_bytes
from penstock.sources.remote.cache_table import (
    ORDERS,
    PRESENT,
    CacheTable,
    is_fresh,
    join_position,
    split_position,
)
from penstock.sources.remote.use_order import largest_batch, merge_uses, write_uses

_POSITION_S, _CHECK_S = 0.02, 0.5
_FIRST_BATCHES = 64
_CHUNK = 1 << 14
_MAX_SAMPLES = 1 << 22
"""Samples of an epoch whose blocks are published. Later ones count as needed last."""
_LOCK_LIMIT_S = 5.0
_REQUEST_SHARE = 8
"""A batch is requested as a whole if its blocks take at most this part of the cache. More would
evict blocks of the batches before it."""
_MAX_COST = 1.5
"""Downloads of an epoch, as a multiple of the set, beyond which the plan names them."""
Pairs = tuple[np.ndarray, np.ndarray]
_followers: weakref.WeakKeyDictionary[Any, EpochFollower] = weakref.WeakKeyDictionary()


def follow_epoch(
    dataset: Any, epoch_state: Any, order: Order | None, sampler: Any, batch_size: int | None
) -> None:
    """Publish the epoch that a loader begins. Called by the loader in the training process.

    Args:
        dataset: A dataset over object storage.
        epoch_state: The loader's :class:`~penstock.order.epoch_state.EpochState`.
        order: The Penstock order of its samples, or None.

    Raises:
        BadArgument: The cache is smaller than the blocks of one batch.
    """
    if order is None and type(sampler).__name__ == "SequentialSampler":
        order = SeededOrder(len(dataset), shuffle=False)
    notes = [] if order is not None else [_FOREIGN_NOTE]
    for one in sets_of(dataset):
        one.order_notes = notes
    epoch_state.request_batch = None if order is not None else partial(request_batch, dataset)
    if order is None:
        return
    follower = _followers.get(epoch_state)
    if follower is None or follower.process != os.getpid():
        follower = _followers[epoch_state] = EpochFollower(dataset, epoch_state)
    cost = follower.begin(order.starting_at(epoch_state.start), batch_size or 1)
    for one in sets_of(dataset):
        one.order_notes = cost


_FOREIGN_NOTE = (
    "The order of the samples is not Penstock's, so the blocks of a batch are downloaded when its "
    "indices are known, and those unused for longest are evicted first. With DataLoader(..., "
    "seed=0) or sampler=dataset.block_order() they are downloaded ahead."
)


def request_batch(dataset: Any, index: Any) -> None:
    """Ask for all blocks of a batch at once, without waiting for them.

    Called in the training process before a batch is loaded, if the order is not ours. Invalid
    indices are left to the loading.
    """
    rows = np.empty(0)
    with contextlib.suppress(TypeError, ValueError):
        rows = np.asarray(index).reshape(-1)
    length = len(dataset)
    if rows.dtype.kind not in "iu" or not len(rows):
        return
    rows = np.where(rows < 0, rows + length, rows).astype(np.int64)
    if rows.min() < 0 or rows.max() >= length:
        return
    most = min(one.options.max_bytes for one in sets_of(dataset)) // _REQUEST_SHARE
    with contextlib.suppress(PenstockError):  # the loading raises it too
        for files, _, blocks in sets_of(dataset)[0].blocks_of(dataset, rows):
            needed = np.unique(blocks)
            if files.layout.block_bytes[needed].sum() <= most:
                files.request(needed)


class EpochFollower:
    """Follows the epochs of one loader."""

    def __init__(self, dataset: Any, epoch_state: Any) -> None:
        self.process = os.getpid()
        self._dataset = dataset
        self._epoch_state = weakref.ref(epoch_state)
        self._published = [_Slot(one.files, one.options) for one in sets_of(dataset)]
        self._epochs: dict[int, dict[BlockFiles, np.ndarray]] = {}
        """Uses of whole epochs that were computed: this one and the next."""
        self._mutex = threading.Lock()
        self._number = self._num_begun = 0
        self._thread: threading.Thread | None = None

    def begin(self, order: Order, batch_size: int) -> list[str]:
        """Publish the first batches of an epoch, and let the thread do the rest.

        Returns:
            What the plan says about the cost of the order, if it is large.
        """
        if all(slot.has_all_blocks() for slot in self._published):
            with self._mutex:  # there is nothing to fetch or to evict
                self._num_begun = getattr(self._epoch_state(), "num_begun", 0)
            return []
        first = self._pairs(order, batch_size, 0, _FIRST_BATCHES * batch_size)
        num_parts = max(1.0, len(order) / (_FIRST_BATCHES * batch_size))
        costs = []
        for slot in self._published:
            slot.check_limit(*first[slot.files])
            costs += slot.describe_cost(merge_uses(*first[slot.files]), num_parts)
        with self._mutex:
            self._number += 1
            known = None if order.start else self._epochs.get(order.epoch)
            self._publish([known or {files: merge_uses(*one) for files, one in first.items()}], 0)
            self._job = self._number, copy.copy(order), batch_size
            self._num_begun = getattr(self._epoch_state(), "num_begun", 0)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="penstock-cache-position", daemon=True
            )
            self._thread.start()
        return costs

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        number, next_check_s = 0, 0.0
        while self._epoch_state() is not None:
            if self._job[0] != number:
                number = self._job[0]
                self._publish_epochs(*self._job)
            self._write_position()
            if time.monotonic() > next_check_s:
                next_check_s = time.monotonic() + _CHECK_S
                for slot in self._published:
                    slot.keep_alive()
            time.sleep(_POSITION_S)
        for slot in self._published:
            slot.leave()

    def _write_position(self) -> None:
        state = self._epoch_state()
        with self._mutex:
            # A state that has begun the next epoch does not count batches of the published one.
            is_old = state is None or state.num_begun != self._num_begun
            for slot in self._published:
                slot.write_position(None if is_old or state is None else state.num_batches)

    def _publish_epochs(self, number: int, order: Order, batch_size: int) -> None:
        """Compute and publish this epoch and the next."""
        following = copy.copy(order).starting_at(0)
        following.set_epoch(order.epoch + 1)
        parts = []
        for one in (order, following):
            known = self._epochs.get(one.epoch) if not one.start else None
            if known is None:
                known = self._whole_epoch(number, one, batch_size)
                if known is None:  # another epoch has begun
                    return
            parts.append(known)
            if not one.start:
                self._epochs[one.epoch] = known
            with self._mutex:
                if self._job[0] != number:
                    return
                self._publish(parts, None, -(-len(order) // batch_size))
        for epoch in set(self._epochs) - {order.epoch, following.epoch}:
            del self._epochs[epoch]

    def _whole_epoch(
        self, number: int, order: Order, batch_size: int
    ) -> dict[BlockFiles, np.ndarray] | None:
        found: list[dict[BlockFiles, Pairs]] = []
        step = max(1, _CHUNK // batch_size) * batch_size
        for first in range(0, min(len(order), _MAX_SAMPLES), step):
            found.append(self._pairs(order, batch_size, first, first + step))
            self._write_position()
            if self._job[0] != number or self._epoch_state() is None:
                return None
        return {
            slot.files: merge_uses(*_join([one[slot.files] for one in found]))
            for slot in self._published
        }

    def _publish(
        self, epochs: list[dict[BlockFiles, np.ndarray]], tick: int | None, num_batches: int = 0
    ) -> None:
        for slot in self._published:
            uses = [
                one[slot.files] + np.array([0, turn * num_batches, turn * num_batches])
                for turn, one in enumerate(epochs)
            ]
            slot.publish(np.concatenate(uses), tick)

    def _pairs(
        self, order: Order, batch_size: int, first: int, last: int
    ) -> dict[BlockFiles, Pairs]:
        """Return the batches and blocks of this rank's samples from ``first`` to ``last``."""
        places = np.arange(first, min(last, len(order)))
        rows = order.indices(first, last)
        found: dict[BlockFiles, list[Pairs]] = {slot.files: [] for slot in self._published}
        for files, owners, blocks in sets_of(self._dataset)[0].blocks_of(self._dataset, rows):
            found[files].append((places[owners] // batch_size, blocks))
        return {files: _unique(_join(pairs)) for files, pairs in found.items()}


class _Slot:
    """The place of one loader in the table of one set."""

    def __init__(self, files: BlockFiles, options: Any) -> None:
        self.files = files
        self._options = options
        self._token = secrets.randbits(62) + 1
        self._table: CacheTable | None = None
        self._place: int | None = None
        self._number = 0
        self._uses: np.ndarray | None = None

    def has_all_blocks(self) -> bool:
        """Return True if the whole set is in the cache, since an epoch before."""
        sizes, table = self.files.layout.block_bytes, self._table
        return (
            table is not None
            and table.is_current()
            and int(sizes.sum()) <= self._options.max_bytes
            and bool((table.state == PRESENT).all())
        )

    def check_limit(self, batches: np.ndarray, blocks: np.ndarray) -> None:
        """Raise BadArgument if the cache is too small for one batch."""
        needed = largest_batch(batches, blocks, self.files.layout.block_bytes)
        if needed > self._options.max_bytes:
            raise BadArgument(
                f"cache_bytes={self._options.max_bytes} is too small. The samples of one batch "
                f"need {needed} bytes ({describe_bytes(needed)})",
                likely="the samples of a batch lie in many blocks, as in a full shuffle.",
                remedy=f"cache_bytes={8 * needed}, or sampler=dataset.block_order()",
            )

    def describe_cost(self, uses: np.ndarray, num_parts: float) -> list[str]:
        """Return a note if an epoch downloads much more than the set.

        Args:
            uses: Those of one of ``num_parts`` equal parts of the epoch.
        """
        sizes, limit = self.files.layout.block_bytes, self._options.max_bytes
        num_bytes = self.files.layout.num_bytes
        missed = max(0.0, 1.0 - limit / max(1, num_bytes))
        cost = float(sizes[uses[:, 0]].sum()) * num_parts * missed
        if cost < _MAX_COST * num_bytes:
            return []
        return [
            f"In this order, an epoch downloads about {describe_bytes(cost)}, because the set is "
            "larger than the cache and each batch needs many blocks. "
            f"sampler=dataset.block_order() downloads at most {describe_bytes(num_bytes)}."
        ]

    def publish(self, uses: np.ndarray, tick: int | None) -> None:
        """Write the uses to a file, then refer to it in the table."""
        self._uses = uses
        if not self._has_place():
            return
        assert self._table is not None
        folder, slot = self._table.folder, self._table.readers[self._place]
        self._number += 1
        with contextlib.suppress(OSError):  # full, or removed: the cache then works as LRU
            write_uses(os.path.join(folder, ORDERS, f"{self._token}-{self._number}"), uses)
            if tick is None:
                tick = split_position(int(slot["position"]))[1]
            slot["position"] = join_position(self._number, tick)
            slot["beat"] = time.monotonic()
            os.unlink(os.path.join(folder, ORDERS, f"{self._token}-{self._number - 1}"))

    def write_position(self, tick: int | None) -> None:
        """Write the number of batches delivered, and the heartbeat. None: as before."""
        if self._place is not None and self._table is not None:
            slot = self._table.readers[self._place]
            if tick is not None:
                order = split_position(int(slot["position"]))[0]
                slot["position"] = join_position(order, tick)
            slot["beat"] = time.monotonic()

    def keep_alive(self) -> None:
        """Start a downloader if there is none, and move to a new table if there is one."""
        if self._table is None or not self._table.is_current():
            self._place = None
            if self._uses is not None:
                self.publish(self._uses, None)
        elif not self._table.is_served():
            self.files.starter.start()

    def leave(self) -> None:
        if self._place is not None and self._table is not None:
            self._table.readers[self._place]["token"] = 0
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._table.folder, ORDERS, f"{self._token}-{self._number}"))

    def _has_place(self) -> bool:
        """Take a free place in the table, if this loader has none."""
        if self._place is not None:
            return True
        self._table = self.files.current_table()
        with _table_lock(self._table.folder) as is_mine:
            for place, slot in enumerate(self._table.readers if is_mine else ()):
                if slot["token"] and is_fresh(float(slot["beat"])):
                    continue
                slot["position"] = 0
                slot["max_bytes"] = self._options.max_bytes
                slot["ahead_bytes"] = self._options.ahead_bytes
                slot["beat"], slot["token"] = time.monotonic(), self._token
                self._place = place
                return True
        return False


@contextlib.contextmanager
def _table_lock(folder: str) -> Iterator[bool]:
    """Hold the lock for taking places. Yields False if it cannot be had in time."""
    descriptor = os.open(os.path.join(folder, "readers.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline_s = time.monotonic() + _LOCK_LIMIT_S
        while not (is_mine := lock_file(descriptor, waits=False)):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POSITION_S)
        yield is_mine
    finally:
        os.close(descriptor)


def sets_of(dataset: Any) -> list[Any]:
    """Return the different sets that a dataset reads."""
    found = dataset._files
    listed = found if isinstance(found, tuple) else (found,)
    return list({id(one.files): one for one in listed}.values())


def _join(pairs: list[Pairs]) -> Pairs:
    if not pairs:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    batches, blocks = zip(*pairs, strict=True)
    return np.concatenate(batches), np.concatenate(blocks)


def _unique(pairs: Pairs) -> Pairs:
    """Return each pair once."""
    batches, blocks = pairs
    found = np.unique((batches << 32) | blocks)
    return found >> 32, found & 0xFFFFFFFF
