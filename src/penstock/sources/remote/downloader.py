"""The downloader: one process for each user, machine and set.

::

    wishes of readers  --+
                         +-->  fetch (many at once) -> verify -> temporary file -> rename -> PRESENT
    published orders   --+         |
                                   +--> evict the blocks whose next use is farthest away

It owns the state of the blocks. A new downloader begins with what is in the folder. It ends with
the program that started it, when the cache folder is removed, and when no reader has needed it for
a minute.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import queue
import sys
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.sources.checksums import BLOCK_BYTES as UNIT_BYTES
from penstock.sources.checksums import block_checksums, file_checksum
from penstock.sources.file_locks import unlock_file
from penstock.sources.manifest import MANIFEST
from penstock.sources.remote.address import without_secrets
from penstock.sources.remote.block_layout import BLOCK_BYTES, BlockLayout, read_layout
from penstock.sources.remote.cache_table import (
    ABSENT,
    BLOCKS,
    FAILED,
    FOLDERS,
    ORDERS,
    PRESENT,
    START_ERROR,
    TAILS,
    CacheTable,
    is_fresh,
    split_position,
)
from penstock.sources.remote.object_list import OBJECTS
from penstock.sources.remote.object_store import FetchFailed, ObjectStore, store_manifest
from penstock.sources.remote.set_locks import lock_set
from penstock.sources.remote.use_order import (
    NEVER,
    PlannedFetch,
    choose_victims,
    next_uses,
    plan_fetches,
    read_uses,
)
from penstock.trace.record import now_ns

NUM_REQUESTS = 32
"""Requests at the same time."""
_FIRST_BLOCKS = 4
"""Whole blocks requested at the same time at first, or smaller ones with as many bytes. Each that
succeeds allows one more, so that on a slow network the first do not arrive together with the last.
"""
_FOR_WISHES = 8
"""More requests, for blocks that a reader waits for while others are fetched ahead."""
_FOR_CHECKS = 8
"""Requests for checksums, beside those for the blocks that they belong to."""
_BUSY_POLL_S, _IDLE_POLL_S = 0.002, 0.02
_NEW_S = 2.0
"""How long a new downloader polls as if it were busy: it was started for a reader."""
_IDLE_LIMIT_S = 60.0
_LOOK_AHEAD = 4096
"""Uses examined in each turn, for each reader."""
_HELD_S = 10.0
"""How long a block is kept for the reader that asked for it and has not mapped it yet."""
_AVOIDED_S = 30.0
"""How long a block is not fetched ahead after it could not be had."""
_UNMAPPED_S = 5.0
"""How long readers can take to unmap evicted blocks, when the disk is full."""
_EXTRA_FREED = 16
"""Blocks freed at a time without an order. Choosing them takes some ms for a large set."""
_TAIL_SHARE = 16
"""Tails are kept if all of them take at most this part of the cache."""
_REPLAN_S = 0.5
"""How long a plan is kept if nothing has changed."""


class _PublishedOrder:
    """The uses that a reader has published, and where it is in them."""

    def __init__(self, number: int, uses: np.ndarray) -> None:
        self.number = number
        self.tick = 0
        self._uses = uses
        self._start = 0

    def advance(self, tick: int) -> None:
        """Skip the uses at the beginning that are over."""
        self.tick = tick
        while True:
            part = self._uses[self._start : self._start + _LOOK_AHEAD]
            is_left = part[:, 2] >= tick
            self._start += int(is_left.argmax()) if is_left.any() else len(part)
            if not len(part) or is_left.any():
                return

    def coming(self) -> np.ndarray:
        """Return the next uses, with their distances instead of batches."""
        part = self._uses[self._start : self._start + _LOOK_AHEAD]
        part = part[part[:, 2] >= self.tick]
        return np.asarray(np.maximum(part - np.array([0, self.tick, self.tick]), 0))

    def next_uses(self, num_blocks: int, after: int = 0) -> np.ndarray:
        """Return the distance of each block's next use, of those that begin at ``after`` or later.

        With 0, a use that has begun counts too.
        """
        start = self._start
        if after:
            start += int(self._uses[start:, 1].searchsorted(self.tick + after))
        return next_uses(self._uses[start:], self.tick, num_blocks)


class Downloader:
    """Fetches and evicts blocks until no reader needs it.

    Args:
        store: Where the objects are.
        max_bytes, ahead_bytes: Limits while no reader has published others.
    """

    def __init__(
        self, store: Any, layout: BlockLayout, table: CacheTable, max_bytes: int, ahead_bytes: int
    ) -> None:
        self._store, self._layout, self.table = store, layout, table
        self._max_bytes, self._ahead_bytes = max_bytes, ahead_bytes
        self._all_tails = int(layout.tail_bytes.sum())
        self._disk_bytes, self._full_s = sys.maxsize, 0.0
        self._pool = ThreadPoolExecutor(NUM_REQUESTS + _FOR_WISHES, "penstock-request")
        self._checks = ThreadPoolExecutor(_FOR_CHECKS, "penstock-checksums")
        self._in_flight: dict[int, bool] = {}
        """Blocks being fetched: True if a reader waits for it."""
        self._done: queue.SimpleQueue[tuple[int, FetchFailed | OSError | None, int]] = (
            queue.SimpleQueue()
        )
        """Blocks, why they could not be had, and when their download began."""
        self._unit_locks = [threading.Lock() for _ in range(16)]
        self._counting = threading.Lock()
        self._orders: dict[int, _PublishedOrder] = {}
        self._granted: dict[int, float] = {}
        self._failed_s: dict[int, float] = {}
        self._num_allowed = _FIRST_BLOCKS
        self._planned: tuple[float, ...] = ()
        """The situation that was planned for last."""
        self._seen_s = time.monotonic()
        self.must_end = False
        self._read_folder()

    def _read_folder(self) -> None:
        """Take over what earlier downloaders have left."""
        table, sizes = self.table, self._layout.block_bytes
        table.state[:] = ABSENT
        table.checked[:] = table.corrupt[:] = 0
        for entry in os.scandir(os.path.join(table.folder, BLOCKS)):
            is_block = entry.name.isdigit() and int(entry.name) < len(sizes)
            if is_block and entry.stat().st_size == sizes[int(entry.name)]:
                table.state[int(entry.name)] = PRESENT
            else:  # unfinished, or left by a crash of the machine
                os.unlink(entry.path)
        for entry in os.scandir(os.path.join(table.folder, TAILS)):
            if not entry.name.isdigit():
                os.unlink(entry.path)
        table.header["used_bytes"] = int(sizes[table.state == PRESENT].sum())
        table.header["pid"] = os.getpid()

    def close(self) -> None:
        """Wait for the requests in flight, and end the threads."""
        self._pool.shutdown()
        self._checks.shutdown()

    # -- one turn --------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what there is to do, without waiting. Returns True if there was something."""
        now_s = time.monotonic()
        if self._in_flight:
            self.table.header["busy_s"] += now_s - float(self.table.header["beat"][0])
        self.table.header["beat"] = now_s
        readers = self._live_readers()
        self._set_limits(readers)
        has_done = self._finish()
        has_wishes = self._grant_wishes(readers)
        has_begun = self._read_ahead(readers)
        return has_done or has_wishes or has_begun or bool(self._in_flight)

    def _live_readers(self) -> list[np.void]:
        return [one for one in self.table.readers if one["token"] and is_fresh(one["beat"])]

    def _set_limits(self, readers: list[np.void]) -> None:
        if readers:
            self._seen_s = time.monotonic()
            self._max_bytes = max(int(one["max_bytes"]) for one in readers)
            self._ahead_bytes = max(int(one["ahead_bytes"]) for one in readers)
        self.table.header["max_bytes"] = self._max_bytes

    @property
    def is_idle(self) -> bool:
        return time.monotonic() - self._seen_s > _IDLE_LIMIT_S and not self._in_flight

    def _order_of(self, reader: np.void) -> _PublishedOrder:
        """Return what a reader has published, read again when it changes."""
        token = int(reader["token"])
        number, tick = split_position(int(reader["position"]))
        known = self._orders.get(token)
        if known is None or known.number != number:
            uses = np.empty((0, 3), np.int64)
            if number:
                uses = read_uses(os.path.join(self.table.folder, ORDERS, f"{token}-{number}"))
                uses = uses[(uses[:, 0] >= 0) & (uses[:, 0] < self._layout.num_blocks)]
            known = self._orders[token] = _PublishedOrder(number, uses)
        known.advance(tick)
        return known

    # -- what to fetch ---------------------------------------------------------------------------

    def _grant_wishes(self, readers: list[np.void]) -> bool:
        wishes = np.flatnonzero(self.table.want)
        for block in wishes.tolist():
            self._seen_s = time.monotonic()
            if block in self._in_flight:
                self._in_flight[block], self.table.corrupt[block] = True, 0
                continue
            if self.table.state[block] == PRESENT:
                if not self.table.corrupt[block]:
                    self.table.want[block] = 0
                    continue
                self._forget(block)
                self._count(num_corrupt=1)
            self.table.corrupt[block] = 0
            if len(self._in_flight) < NUM_REQUESTS + _FOR_WISHES:
                self._make_room(readers, int(self._layout.block_bytes[block]))
                self._begin(block, is_wish=True)
        return bool(len(wishes))

    def _read_ahead(self, readers: list[np.void]) -> bool:
        """Begin to fetch the blocks that come next, the nearest of all readers first."""
        sizes, num_free = self._layout.block_bytes, NUM_REQUESTS - len(self._in_flight)
        left = self._num_allowed * BLOCK_BYTES - int(sizes[list(self._in_flight)].sum())
        if left <= 0 or num_free <= 0 or not readers:
            return False
        has_begun = False
        for fetch in self._plan(readers):
            failed_s = self._failed_s.get(fetch.block, -_AVOIDED_S)
            if time.monotonic() - failed_s < _AVOIDED_S:
                continue
            if not all(self._evict(victim) for victim in fetch.victims):
                continue
            self._begin(fetch.block, is_wish=False)
            left -= int(sizes[fetch.block])
            num_free, has_begun = num_free - 1, True
            if left <= 0 or not num_free:
                break
        return has_begun

    def _plan(self, readers: list[np.void]) -> list[PlannedFetch]:
        """Return what to fetch ahead: the nearest blocks of all readers first."""
        table, sizes = self.table, self._layout.block_bytes
        used = int(table.header["used_bytes"][0])
        positions = [int(one["position"]) for one in readers]
        situation = (*positions, used, len(self._in_flight), time.monotonic() // _REPLAN_S)
        if situation == self._planned:
            return []
        self._planned = situation
        orders = [self._order_of(reader) for reader in readers]
        coming = np.concatenate([order.coming() for order in orders])
        coming = coming[np.argsort(coming[:, 1], kind="stable")]
        most = self._ahead_bytes + int(sizes.max(initial=0))
        num_ahead = int(np.cumsum(sizes[coming[:, 0]]).searchsorted(most, side="right"))
        after = int(coming[num_ahead:, 1].min(initial=coming[:, 1].max(initial=0) + 1))
        coming = coming[:num_ahead]
        is_cached = table.state != ABSENT
        is_cached[list(self._in_flight)] = True
        missing = int(sizes[np.unique(coming[~is_cached[coming[:, 0]], 0])].sum())
        if not missing:
            return []
        later, spare = np.full(self._layout.num_blocks, NEVER), np.empty(0, np.int64)
        if used + missing > self._limit:
            for order in orders:
                later = np.minimum(later, order.next_uses(self._layout.num_blocks, after))
            cached = np.flatnonzero(table.state == PRESENT)
            is_near = np.isin(cached, coming[:, 0])
            # All that are used soon, and as many of the others as can be needed.
            needed = 2 * missing + int(sizes[cached[is_near]].sum())
            distances = np.where(is_near, NEVER, later[cached])
            spare = cached[self._choose(cached, distances, needed)]
        return plan_fetches(coming, later, is_cached, spare, sizes, self._limit - used)

    def _begin(self, block: int, *, is_wish: bool) -> None:
        self._in_flight[block] = is_wish
        self.table.header["used_bytes"] += int(self._layout.block_bytes[block])
        self._pool.submit(self._fetch, block)

    # -- eviction --------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return min(self._max_bytes, self._disk_bytes) - self._kept_bytes

    @property
    def _kept_bytes(self) -> int:
        """Bytes of the tails of all blocks, or 0 if they are too many to be kept."""
        return self._all_tails if self._all_tails <= self._max_bytes // _TAIL_SHARE else 0

    def _make_room(self, readers: list[np.void], num_bytes: int) -> None:
        """Evict until ``num_bytes`` fit, or only blocks are left that readers are about to map."""
        limit, used = self._limit, int(self.table.header["used_bytes"][0])
        if used + num_bytes <= limit:
            return
        cached = np.flatnonzero(self.table.state == PRESENT)
        distances = np.full(len(cached), NEVER, np.int64)
        for reader in readers:
            found = self._order_of(reader).next_uses(self._layout.num_blocks)
            distances = np.minimum(distances, found[cached])
        needed = used + num_bytes - limit
        if not (distances < NEVER).any():
            most = int(self._layout.block_bytes.max(initial=0))
            needed = max(needed, min(_EXTRA_FREED * most, limit // 16))
        for place in self._choose(cached, distances, needed).tolist():
            self._evict(int(cached[place]))

    def _choose(self, cached: np.ndarray, distances: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return the places in ``cached`` of blocks to evict, without those a reader waits for."""
        touched = self.table.touched[cached]
        distances[self._is_held(cached, touched)] = -1
        return choose_victims(distances, touched, self._layout.block_bytes[cached], num_bytes)

    def _evict(self, block: int) -> bool:
        is_gone = self._forget(block)
        self.table.header["num_evicted"] += is_gone
        return is_gone

    def _is_held(self, cached: np.ndarray, touched: np.ndarray) -> np.ndarray:
        """Return True for blocks that a reader waited for and has not mapped yet."""
        oldest_s = time.monotonic() - _HELD_S
        self._granted = {one: at for one, at in self._granted.items() if at > oldest_s}
        if not self._granted:
            return np.zeros(len(cached), bool)
        granted_s = np.array([self._granted.get(one, 0.0) for one in cached.tolist()])
        return np.asarray((granted_s > 0) & (touched <= granted_s))

    def _forget(self, block: int) -> bool:
        """Remove a block's file. Returns False where a reader has it mapped, on Windows."""
        try:
            os.unlink(self.table.block_path(block))
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self.table.state[block] = ABSENT
        self.table.checked[block] = 0
        self.table.header["used_bytes"] -= int(self._layout.block_bytes[block])
        return True

    # -- fetching, in threads --------------------------------------------------------------------

    def _fetch(self, block: int) -> None:
        failed: FetchFailed | OSError | None = None
        start_ns = now_ns()
        try:
            content = self._fetch_checked(block)
            path = self.table.block_path(block)
            with open(f"{path}.part", "wb") as file:
                file.write(content)
            os.replace(f"{path}.part", path)
        except (FetchFailed, OSError) as error:
            failed = error
        except Exception as error:  # must not be lost with the thread
            failed = FetchFailed("network", f"{self._layout.describe(block)}: {error!r}")
        self._done.put((block, failed, start_ns))

    def _fetch_checked(self, block: int) -> bytes:
        file, start, end = self._layout.range_of(block)
        content = self._read_units(file, start, end)
        if start and self._read_tail(block - 1) is None:
            self._keep_tail(block - 1, content)
        num_tail = int(self._layout.tail_bytes[block])
        if not num_tail:
            return content
        tail = self._read_tail(block)
        # A block that is being fetched too keeps its first bytes, which are this tail. It has a
        # thread of its own (see _grant_wishes), so this ends.
        while tail is None and block + 1 in self._in_flight and self._kept_bytes:
            time.sleep(_BUSY_POLL_S)
            tail = self._read_tail(block)
        if tail is None:
            size = self._layout.entries[file].bytes
            tail = self._read_units(file, end, min(end + UNIT_BYTES, size))[:num_tail]
            self._keep_tail(block, tail)
        self.table.tails[block] = zlib.crc32(tail)
        return content + tail

    def _keep_tail(self, block: int, following: bytes) -> None:
        """Keep the tail of a block, with its checksum, for when the block is fetched again."""
        tail = following[: int(self._layout.tail_bytes[block])]
        if not tail or not self._kept_bytes:
            return
        path = self.table.tail_path(block)
        part = f"{path}.{threading.get_ident()}"
        try:
            with open(part, "wb") as file:
                file.write(zlib.crc32(tail).to_bytes(4, "little") + tail)
            os.replace(part, path)
        except OSError:  # a full disk: it will be fetched again
            with contextlib.suppress(OSError):
                os.unlink(part)

    def _read_tail(self, block: int) -> bytes | None:
        try:
            with open(self.table.tail_path(block), "rb") as file:
                found = file.read()
        except OSError:
            return None
        check, tail = int.from_bytes(found[:4], "little"), found[4:]
        is_sound = len(tail) == self._layout.tail_bytes[block] and zlib.crc32(tail) == check
        return tail if is_sound else None

    def _read_units(self, file: int, start: int, end: int) -> bytes:
        """Fetch whole checksum units of a file. What differs is fetched again once."""
        entry = self._layout.entries[file]
        first = int(self._layout.first_units[file]) + start // UNIT_BYTES
        for _ in range(2):
            is_whole = end - start == entry.bytes  # its checksums are checked by that of the file
            learning = None if is_whole else self._start_learning(file)
            content = bytes(self._store.read(entry.name, start, end, entry.etag))
            self._count(num_requests=1, num_bytes=len(content))
            units = block_checksums(content)
            if entry.etag is not None:  # no packed set: what arrives now has to stay the same
                self.table.units[first : first + len(units)] = units
                return content
            if learning is not None:
                learning.result()
            elif is_whole and not self.table.known[file]:
                self._set_units(file, units)
            if np.array_equal(units, self.table.units[first : first + len(units)]):
                return content
            self._count(num_corrupt=1)
            self.table.known[file] = 0
        raise FetchFailed(
            "damaged",
            f"{self._layout.where}/{entry.name}, bytes {start} to {end} differs from what was "
            "packed, also after it was fetched again",
            "the object was replaced or damaged, or is being replaced now.",
            "copy the set again from its source, or pack again",
        )

    def _start_learning(self, file: int) -> Future[None] | None:
        """Begin to fetch the checksums of a file's units, unless they are known."""
        if self.table.known[file] or self._layout.entries[file].etag is not None:
            return None
        return self._checks.submit(self._learn_units, file)

    def _learn_units(self, file: int) -> None:
        entry = self._layout.entries[file]
        with self._unit_locks[file % len(self._unit_locks)]:
            if self.table.known[file]:
                return
            raw = self._store.read(entry.blocks_name)
            self._count(num_requests=1, num_bytes=len(raw))
            with contextlib.suppress(ValueError, EOFError):
                self._set_units(file, np.load(io.BytesIO(raw), allow_pickle=False))

    def _set_units(self, file: int, units: np.ndarray) -> None:
        """Record checksums. Wrong ones stay unknown, so the range is read again, then named."""
        first, last = self._layout.first_units[file : file + 2].tolist()
        entry = self._layout.entries[file]
        if len(units) == last - first and file_checksum(units) == entry.check:
            self.table.units[first:last] = units
            self.table.known[file] = 1

    def _count(self, **numbers: int) -> None:
        with self._counting:
            for name, number in numbers.items():
                self.table.header[name] += number

    def _finish(self) -> bool:
        """Record what the threads have fetched."""
        has_done = False
        while True:
            try:
                block, failed, start_ns = self._done.get_nowait()
            except queue.Empty:
                return has_done
            has_done, is_wish = True, self._in_flight.pop(block)
            self.table.note_fetch(block, start_ns, now_ns())
            if failed is None:
                if is_wish or self.table.want[block]:
                    self._granted[block] = time.monotonic()
                self._num_allowed += 1
                self.table.checked[block] = 1
                self.table.state[block] = PRESENT
                self.table.want[block] = 0
                continue
            self.table.header["used_bytes"] -= int(self._layout.block_bytes[block])
            with contextlib.suppress(OSError):
                os.unlink(self.table.block_path(block) + ".part")
            self._record_failure(block, failed, is_wish or bool(self.table.want[block]))

    def _record_failure(self, block: int, failed: FetchFailed | OSError, is_wish: bool) -> None:
        facts = getattr(failed, "facts", None)
        if facts is None:
            if failed.errno == errno.ENOSPC and self._has_shrunk():  # type: ignore[union-attr]
                return  # a wish is repeated by its reader
            facts = {
                "kind": "network",
                "what": f"{self._layout.describe(block)} could not be stored in "
                f"{self.table.folder}: {failed.strerror or failed}",  # type: ignore[union-attr]
                "likely": "the disk of the cache is full or read-only, or the folder was removed.",
                "remedy": "Packed(..., cache_folder='/another/disk')",
            }
        self._failed_s[block] = time.monotonic()
        if is_wish:
            self.table.write_error(block, facts)
            self.table.attempts[block] += 1
            self.table.want[block] = 0
            self.table.state[block] = FAILED
        self.must_end |= facts["kind"] in ("access", "credentials")

    def _has_shrunk(self) -> bool:
        """Use less of a full disk from now on. Returns False if it stays full.

        The space of an evicted block is free when the last reader has unmapped it.
        """
        now_s, used = time.monotonic(), int(self.table.header["used_bytes"][0])
        if (self.table.state == PRESENT).any():
            self._full_s = now_s
            most = int(self._layout.block_bytes.max(initial=0))
            self._disk_bytes = max(0, min(used, self._disk_bytes) - 2 * most)
            self._make_room([], 0)
        return now_s - self._full_s < _UNMAPPED_S


def main(arguments: str, folder: str, turn: str) -> None:
    """Run the downloader of the set in ``folder``. Called in a process of its own.

    Args:
        turn: The file whose lock keeps other processes from starting one. See ``downloader_start``.
    """
    options = json.loads(arguments)
    if lock_set(options, folder):
        serve(options, folder, int(turn))


def serve(options: dict[str, Any], folder: str, turn: int | None) -> None:
    """Download until no reader needs it, then end the process."""
    try:
        has_list = any(os.path.exists(os.path.join(folder, one)) for one in (MANIFEST, OBJECTS))
        if not has_list and store_manifest(options) != folder:
            raise ValueError(f"{options['url']} has changed since it was opened")
        for name in FOLDERS:
            os.makedirs(os.path.join(folder, name), mode=0o700, exist_ok=True)
        _run(options, folder, turn)
    except Exception as error:
        with contextlib.suppress(OSError), open(os.path.join(folder, START_ERROR), "w") as file:
            file.write(f"{type(error).__name__}: {without_secrets(error)}")
    os._exit(0)  # without waiting for requests in flight


def _run(options: dict[str, Any], folder: str, turn: int | None) -> None:
    layout = read_layout(folder, options["url"])
    table = CacheTable(folder, layout, create=True)

    def note_retry(why: str) -> None:
        table.header["num_retries"] += 1

    store = ObjectStore(options["url"], options["timeout_s"] / 2, note_retry)
    downloader = Downloader(store, layout, table, options["max_bytes"], options["ahead_bytes"])
    next_check_s, new_until_s = 0.0, time.monotonic() + _NEW_S
    downloader.turn()  # the first heartbeat, so that others see it
    if turn is not None:
        unlock_file(turn)
    while not (downloader.must_end or downloader.is_idle):
        is_busy = downloader.turn()
        if time.monotonic() > next_check_s:
            next_check_s = time.monotonic() + 0.5
            if not _has_parent(options["parent"]) or not table.is_current():
                break
        is_busy |= time.monotonic() < new_until_s
        time.sleep(_BUSY_POLL_S if is_busy else _IDLE_POLL_S)
    table.header["beat"] = 0.0


def _has_parent(parent: int) -> bool:
    if os.name == "posix":
        return os.getppid() == parent
    import psutil

    return bool(psutil.pid_exists(parent))
