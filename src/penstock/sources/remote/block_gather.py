"""Copies rows of a field out of the cache in one gather, as if its files were mapped whole.

On Linux each field has a range of addresses with a place for every block. A cached block is mapped
to its place when it is first needed:

    block 0            block 1            block 2
    |row row row ro|w| . |ow row row ro|w| . . . . . . . . .     row 3 is whole in block 0: its end
    ^                  ^                                        is the tail (see block_layout)
    distances are multiples of the row size, so all rows are rows of one array

An evicted block is unmapped when no gather that was running then is left, because eviction frees
the disk only then. Until that, its bytes stay valid.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading

import numpy as np

from penstock.errors import StorageFailed
from penstock.sources.array_files import HEADER_BYTES, AddressRange
from penstock.sources.columns import RowTable
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import BLOCK_BYTES
from penstock.sources.remote.cache_table import PRESENT

_MAX_ADDRESSES = 1 << 44
_MAX_MAPPED = 1 << 14
"""Blocks mapped at a time. Linux allows a process 65,530 mappings."""
_MAX_TRIES = 16


class BlockGather:
    """The rows of all files of one field.

    Args:
        first_blocks: The first block of each file, by its number in the set.
        num_blocks: How many blocks each file has.
        first_rows: The first row of each file, followed by the number of rows.
        row_bytes: Bytes of a row, the same in all files.
        tail_bytes: Bytes of the tails of the blocks of all files.

    Raises:
        OSError: A range of addresses of this size, or with this row size, is not available.
    """

    def __init__(
        self,
        files: BlockFiles,
        first_blocks: np.ndarray,
        num_blocks: np.ndarray,
        first_rows: np.ndarray,
        row_bytes: int,
        tail_bytes: int,
    ) -> None:
        if sys.platform != "linux" or not (tail_bytes or HEADER_BYTES % row_bytes == 0):
            raise OSError("rows of this size, or this system, have no common grid")
        step = math.lcm(row_bytes, mmap.PAGESIZE)
        shift = -(-tail_bytes // step) * step
        stride = BLOCK_BYTES + shift
        starts = np.cumsum([0, *(-(-num_blocks * stride // step) * step)])
        if starts[-1] > _MAX_ADDRESSES:
            raise OSError("too many addresses")
        self._files, self._first_rows, self._row_bytes = files, first_rows, row_bytes
        self._addresses = AddressRange(int(starts[-1]))
        shape = (int(starts[-1] - HEADER_BYTES) // row_bytes, row_bytes)
        self._table = RowTable(self._addresses.address + HEADER_BYTES, shape, self._addresses)
        self._row_shifts = starts[:-1] // row_bytes - first_rows[:-1]
        self._rows_skipped = shift // row_bytes
        self._first_places = np.cumsum([0, *num_blocks])
        within = np.arange(num_blocks.sum()) - np.repeat(self._first_places[:-1], num_blocks)
        self._blocks = np.repeat(first_blocks, num_blocks) + within
        self._starts = np.repeat(starts[:-1], num_blocks) + within * stride
        self._is_mapped = np.zeros(len(self._blocks), bool)
        self._mutex = threading.Lock()
        self._running: set[object] = set()
        self._leaving: list[tuple[np.ndarray, set[object]]] = []
        """Places to unmap, and the gathers that may still read there."""
        self._num_evicted = -1

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, one row of bytes each. Waits for their blocks."""
        numbers = self._first_rows.searchsorted(rows, side="right") - 1
        inner = rows - self._first_rows[numbers]
        within = (HEADER_BYTES + inner * self._row_bytes) // BLOCK_BYTES
        places = self._first_places[numbers] + within
        chosen = rows + self._row_shifts[numbers] + within * self._rows_skipped
        token = object()
        self._enter(token, places)
        try:
            self._table.gather(chosen, out)
        finally:
            self._leave(token)

    def _enter(self, token: object, places: np.ndarray) -> None:
        """Map the blocks at ``places``, and keep them mapped until ``token`` leaves."""
        self._files.touch(self._blocks[places])
        for num_tries in range(_MAX_TRIES):
            with self._mutex:
                self._drop_evicted(places)
                if self._is_mapped[places].all():
                    self._running.add(token)
                    if not num_tries:
                        self._files.table().count_read(0.0)
                    return
            missing = np.unique(places[~self._is_mapped[places]])
            self._files.request(self._blocks[missing])
            for place in missing.tolist():
                self._map(place)
        raise StorageFailed(
            f"blocks of {self._files.layout.where} are evicted before they can be read",
            where=self._files.starter.folder,
            likely="other programs need the whole cache.",
            remedy="a larger cache_bytes=",
        )

    def _map(self, place: int) -> None:
        block = int(self._blocks[place])
        content = self._files.load(block)
        path = self._files.table().block_path(block)
        with self._mutex:
            try:
                self._addresses.map_file(path, int(self._starts[place]), len(content))
            except OSError:  # evicted since: the caller tries again
                return
            self._is_mapped[place] = True
            if np.count_nonzero(self._is_mapped) > _MAX_MAPPED:
                self._num_evicted = -1  # unmap all that are not needed now
            self._leaving = [(some[some != place], left) for some, left in self._leaving]

    def _drop_evicted(self, needed: np.ndarray) -> None:
        """Unmap evicted blocks, once the gathers that are running now have ended."""
        table = self._files.table()
        num_evicted = int(table.header["num_evicted"][0])
        if num_evicted == self._num_evicted:
            return
        self._num_evicted = num_evicted
        gone = np.flatnonzero(self._is_mapped)
        if len(gone) <= _MAX_MAPPED:
            gone = gone[table.state[self._blocks[gone]] != PRESENT]
        gone = np.setdiff1d(gone, needed)
        if len(gone):
            self._is_mapped[gone] = False
            self._leaving.append((gone, set(self._running)))
            self._unmap()

    def _leave(self, token: object) -> None:
        with self._mutex:
            self._running.discard(token)
            for _, left in self._leaving:
                left.discard(token)
            self._unmap()

    def _unmap(self) -> None:
        for places, left in self._leaving:
            for place in () if left else places.tolist():
                num_bytes = int(self._files.layout.block_bytes[self._blocks[place]])
                self._addresses.clear(int(self._starts[place]), num_bytes)
        self._leaving = [one for one in self._leaving if one[1]]
