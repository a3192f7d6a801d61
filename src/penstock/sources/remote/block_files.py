"""Reading blocks of the cache: wait until a block is there, verify it once, map it.

Called in any process that loads samples. A reader marks the blocks it needs in the
:class:`~penstock.sources.remote.cache_table.CacheTable` and looks at their state until the
downloader has renamed them into place. It never talks to the network itself. A mapped block stays
readable after it was evicted, because eviction only removes its name.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections import OrderedDict

import numpy as np

from penstock.errors import Damaged, PenstockError, StorageFailed
from penstock.sources.array_files import map_file
from penstock.sources.checksums import BLOCK_BYTES as UNIT_BYTES
from penstock.sources.remote.block_layout import BlockLayout
from penstock.sources.remote.cache_table import FAILED, PRESENT, START_ERROR, CacheTable
from penstock.sources.remote.downloader_start import DownloaderStarter
from penstock.trace.record import Kind, span

_MAPPED_BYTES = 1 << 30
"""Blocks that a process keeps mapped. They take address space, not memory."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.0005, 0.01
_START_LIMIT_S, _START_POLL_S = 60.0, 0.005
_MAX_TRIES = 16
"""How often a block can vanish between its arrival and its mapping."""


class BlockFiles:
    """The blocks of one set, in one process.

    Args:
        starter: Starts one if none is alive.
        timeout_s: How long to wait for a block.
    """

    def __init__(self, layout: BlockLayout, starter: DownloaderStarter, timeout_s: float) -> None:
        self.layout = layout
        self.starter = starter
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        self._mapped_bytes = 0
        self._table: CacheTable | None = None
        self._process = 0

    # -- the table -----------------------------------------------------------------------------

    def table(self) -> CacheTable:
        """Return the table. Waits for a downloader, which knows what is in the folder."""
        table = self._table
        if table is not None and self._process == os.getpid():
            return table
        with self._mutex:
            deadline_s = time.monotonic() + _START_LIMIT_S
            while True:
                with contextlib.suppress(FileNotFoundError):
                    found = CacheTable(self.starter.folder, self.layout)
                    # Without a downloader, the record of verified blocks may be an old one.
                    if found.is_served():
                        self._table, self._process = found, os.getpid()
                        return found
                self.starter.start()
                if time.monotonic() > deadline_s:
                    raise StorageFailed(
                        f"no downloader of {self.layout.where} started within {_START_LIMIT_S:g} s"
                        f"{self._start_error()}",
                        where=self.starter.folder,
                        likely="the cache folder is not writable, or the machine is overloaded.",
                        remedy="Packed(..., cache_folder='/another/folder')",
                    )
                time.sleep(_START_POLL_S)

    def current_table(self) -> CacheTable:
        """Return the table, the new one if the cache folder was removed since."""
        if not self.table().is_current():
            self._reopen()
        return self.table()

    def _reopen(self) -> None:
        """Use the new table after the cache folder was removed."""
        with self._mutex:
            self._table = None
            self._mapped.clear()
            self._mapped_bytes = 0

    def check_next_soon(self) -> None:
        """Blocks never change, so there is nothing to compare. Called before each read."""

    def counters(self) -> dict[str, float]:
        """Return the counters of the cache, or nothing before its first use in this process."""
        table = self._table
        return {} if table is None else table.all_counters()

    def downloads(self, since_ns: int) -> list[tuple[int, int, str, int]]:
        """Return start, end, object with range, and bytes of the last downloads."""
        found = [] if self._table is None else self._table.list_fetches(since_ns)
        known, sizes = self.layout.num_blocks, self.layout.block_bytes
        return [
            (start_ns, end_ns, self.layout.describe(block), int(sizes[block]))
            for start_ns, end_ns, block in found
            if 0 <= block < known
        ]

    # -- blocks --------------------------------------------------------------------------------

    def touch(self, blocks: np.ndarray) -> None:
        """Note that blocks are used now."""
        self.table().touched[blocks] = time.monotonic()

    def request(self, blocks: np.ndarray) -> None:
        """Ask for blocks without waiting, so that they are fetched at the same time."""
        table = self.table()
        self.touch(blocks)
        absent = blocks[table.state[blocks] != PRESENT]
        if len(absent):
            table.want[absent] = 1
        self._drop_evicted(table)

    def block(self, block: int) -> np.ndarray:
        """Return the bytes of a block, which stays mapped for a while. See :meth:`load`."""
        with self._mutex:
            found = self._mapped.get(block)
            if found is not None and self._process == os.getpid():
                self._mapped.move_to_end(block)
                assert self._table is not None
                self._table.count_read(0.0)
                return found
        content = self.load(block)
        self._keep(block, content)
        return content

    def load(self, block: int) -> np.ndarray:
        """Map a block. Waits for it if it is not there.

        Raises:
            StorageFailed: It could not be fetched in time.
            Damaged: It differs from what was packed, also after it was fetched again.
        """
        num_unsound = 0
        for _ in range(_MAX_TRIES):
            table = self._wait(block)
            content = self._map(table, block)
            if content is None:  # evicted or deleted since
                continue
            if table.checked[block] or self._is_sound(table, block, content):
                table.checked[block] = 1
                return content
            num_unsound += 1
            if num_unsound == 2:
                break
            table.corrupt[block] = table.want[block] = 1
            self._wait_until_repaired(table, block)
        raise Damaged(
            f"{self.layout.describe(block)} differs from what was packed, also after it was "
            "fetched again",
            where=self.starter.folder,
            likely="the disk of the cache is faulty, or another program changes its files.",
            remedy="Packed(..., cache_folder='/another/disk')",
            path=self.layout.where,
        )

    def _wait(self, block: int) -> CacheTable:
        """Return the table once the block is present."""
        table = self.table()
        if table.state[block] == PRESENT:
            table.count_read(0.0)
            return table
        start_s = time.monotonic()
        with span("object storage", kind=Kind.NETWORK):
            table = self._wait_absent(table, block)
        table.count_read(time.monotonic() - start_s)
        return table

    def _wait_absent(self, table: CacheTable, block: int) -> CacheTable:
        start_s = time.monotonic()
        attempts, poll_s, has_renewed = int(table.attempts[block]), _SHORTEST_POLL_S, False
        next_check_s = start_s
        while table.state[block] != PRESENT:
            now_s = time.monotonic()
            if table.state[block] == FAILED and int(table.attempts[block]) != attempts:
                error = table.read_error(block)
                if error["kind"] not in ("access", "credentials") or has_renewed:
                    raise self._explain(error)
                # A new downloader reads the credentials again.
                has_renewed, attempts = True, int(table.attempts[block])
            table.want[block] = 1
            table.touched[block] = now_s
            if now_s >= next_check_s:
                next_check_s = now_s + 0.25
                self._drop_evicted(table)
                if not table.is_current():
                    self._reopen()
                    table = self.table()
                    attempts = int(table.attempts[block])
                if not table.is_served():
                    self.starter.start()
            if now_s - start_s > self._timeout_s:
                raise self._timed_out(table, block, now_s - start_s)
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        return table

    def _timed_out(self, table: CacheTable, block: int, waited_s: float) -> StorageFailed:
        has_process = "alive" if table.is_served() else f"not running{self._start_error()}"
        return StorageFailed(
            f"{self.layout.describe(block)} did not arrive within {waited_s:.0f} s; the downloader "
            f"is {has_process}",
            where=self.starter.folder,
            likely="the network is slow, or the disk of the cache hangs.",
            remedy=f"Packed(..., network_timeout_s={2 * self._timeout_s:g})",
        )

    def _start_error(self) -> str:
        try:
            with open(os.path.join(self.starter.folder, START_ERROR), encoding="utf-8") as file:
                return f" ({file.read(400)})"
        except (OSError, ValueError):
            return ""

    def _explain(self, error: dict[str, str]) -> PenstockError:
        kind = Damaged if error["kind"] in ("damaged", "changed") else StorageFailed
        return kind(
            error["what"],
            where=self.starter.folder,
            likely=error.get("likely") or None,
            remedy=error.get("remedy") or None,
            path=self.layout.where,
        )

    def _map(self, table: CacheTable, block: int) -> np.ndarray | None:
        """Map the file of a block. Returns None if it is gone, and asks for it again."""
        try:
            content = map_file(table.block_path(block))
            table.touched[block] = time.monotonic()
        except (OSError, ValueError):  # ValueError: an empty file
            table.want[block] = table.corrupt[block] = 1
            self._wait_until_repaired(table, block)
            return None
        return content

    def _wait_until_repaired(self, table: CacheTable, block: int) -> None:
        """Wait until the downloader has noticed that the file of a block is gone or damaged."""
        deadline_s = time.monotonic() + self._timeout_s
        while table.corrupt[block] and time.monotonic() < deadline_s and table.is_current():
            if not table.is_served():
                self.starter.start()
            time.sleep(_LONGEST_POLL_S)

    def _is_sound(self, table: CacheTable, block: int, content: np.ndarray) -> bool:
        first, last = self.layout.units_of(block)
        if len(content) != self.layout.block_bytes[block]:
            return False
        view = memoryview(content)  # type: ignore[arg-type,unused-ignore]
        num_whole = len(content) - int(self.layout.tail_bytes[block])
        view, tail = view[:num_whole], view[num_whole:]
        return (not len(tail) or zlib.crc32(tail) == int(table.tails[block])) and all(
            zlib.crc32(view[at * UNIT_BYTES : (at + 1) * UNIT_BYTES]) == int(table.units[unit])
            for at, unit in enumerate(range(first, last))
        )

    def _keep(self, block: int, content: np.ndarray) -> None:
        with self._mutex:
            if block in self._mapped:
                return
            self._mapped[block] = content
            self._mapped_bytes += len(content)
            while self._mapped_bytes > _MAPPED_BYTES and len(self._mapped) > 1:
                _, removed = self._mapped.popitem(last=False)
                self._mapped_bytes -= len(removed)

    def _drop_evicted(self, table: CacheTable) -> None:
        """Unmap evicted blocks. The disk keeps their bytes until the last reader does so."""
        with self._mutex:
            if not self._mapped:
                return
            mapped = np.fromiter(self._mapped, np.int64, len(self._mapped))
            for block in mapped[table.state[mapped] != PRESENT].tolist():
                self._mapped_bytes -= len(self._mapped.pop(block))
