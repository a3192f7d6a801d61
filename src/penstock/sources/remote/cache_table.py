"""The table that all processes of a cache share: a mapped file with the state of each block.

    header   the downloader's heartbeat and counters, written by the downloader
    readers  a slot for each loader: heartbeat, position, limits; written by that loader
    processes  counters of the processes that read, each in the place of its number
    fetches  the last downloads, for the timeline; written by the downloader
    blocks   state, checked, attempts (downloader); want, corrupt, touched (readers)
    units    CRC-32 of each checksum unit, and of the tail of each block (downloader)

Each value has one writer, or may be overwritten without harm, so no messages or locks are needed.
A process that is killed leaves nothing undone: the next downloader reads the folder again, and a
reader repeats its wish until the block is there.

Tested by ``tests/unit/sources/remote/test_downloader.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import numpy as np

from penstock.sources.array_files import map_shared
from penstock.sources.remote.block_layout import BlockLayout

TABLE = "table"
FOLDERS = BLOCKS, TAILS, ORDERS, ERRORS = "blocks", "tails", "orders", "errors"
START_ERROR = "downloader-error"
ABSENT, PRESENT, FAILED = 0, 1, 2
NUM_READERS = 64
ALIVE_S = 5.0
"""A heartbeat that is older belongs to a process that has ended, or is stopped."""
_MAGIC = b"penstock cache 2"
_HEADER = np.dtype(
    [
        ("magic", "S16"),
        ("num_blocks", "<i8"),
        ("num_units", "<i8"),
        ("beat", "<f8"),
        ("pid", "<i8"),
        ("used_bytes", "<i8"),
        ("max_bytes", "<i8"),
        ("num_requests", "<i8"),
        ("num_bytes", "<i8"),
        ("num_evicted", "<i8"),
        ("num_retries", "<i8"),
        ("num_corrupt", "<i8"),
        ("busy_s", "<f8"),
        ("num_fetches", "<i8"),
        ("failed_block", "<i8"),
        ("failure", "S512"),
    ]
)
_READER = np.dtype(
    [
        ("token", "<i8"),
        ("beat", "<f8"),
        ("position", "<i8"),
        ("max_bytes", "<i8"),
        ("ahead_bytes", "<i8"),
    ]
)
_PROCESS = np.dtype([("num_hits", "<i8"), ("num_waits", "<i8"), ("waited_s", "<f8")])
_NUM_PROCESSES = 256
_FETCH = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("block", "<i8")])
_NUM_FETCHES = 4096


def join_position(order: int, tick: int) -> int:
    """Return the number of a published order and a batch in it as one value, written at once.

    Example:
        >>> split_position(join_position(3, 70))
        (3, 70)
    """
    return order << 32 | tick


def split_position(position: int) -> tuple[int, int]:
    return position >> 32, position & 0xFFFFFFFF


class CacheTable:
    """The mapped table of a cache folder.

    Raises:
        FileNotFoundError: There is none, or it belongs to other files (only without ``create``).
    """

    def __init__(self, folder: str, layout: BlockLayout, *, create: bool = False) -> None:
        self.folder = folder
        self.path = os.path.join(folder, TABLE)
        parts = self._parts(layout)
        num_bytes = sum(dtype.itemsize * count for _, dtype, count in parts)
        if not self._map(num_bytes):
            if not create:
                raise FileNotFoundError(self.path)
            self._make(layout, num_bytes)
            if not self._map(num_bytes):
                raise OSError(f"{self.path} cannot be mapped")
        start = 0
        for name, dtype, count in parts:
            num_bytes = dtype.itemsize * count
            setattr(self, name, self._content[start : start + num_bytes].view(dtype))
            start += num_bytes

    header: np.ndarray
    readers: np.ndarray
    processes: np.ndarray
    fetches: np.ndarray
    touched: np.ndarray
    attempts: np.ndarray
    units: np.ndarray
    tails: np.ndarray
    state: np.ndarray
    want: np.ndarray
    checked: np.ndarray
    corrupt: np.ndarray
    known: np.ndarray

    @staticmethod
    def _parts(layout: BlockLayout) -> list[tuple[str, np.dtype[Any], int]]:
        """Return the arrays in their order: those with the largest items first."""
        byte, blocks = np.dtype("u1"), layout.num_blocks
        return [
            ("header", _HEADER, 1),
            ("readers", _READER, NUM_READERS),
            ("processes", _PROCESS, _NUM_PROCESSES),
            ("fetches", _FETCH, _NUM_FETCHES),
            ("touched", np.dtype("<f8"), blocks),
            ("attempts", np.dtype("<u4"), blocks),
            ("units", np.dtype("<u4"), layout.num_units),
            ("tails", np.dtype("<u4"), blocks),
            ("state", byte, blocks),
            ("want", byte, blocks),
            ("checked", byte, blocks),
            ("corrupt", byte, blocks),
            ("known", byte, len(layout.entries)),
        ]

    def _map(self, num_bytes: int) -> bool:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size != num_bytes or file.read(len(_MAGIC)) != _MAGIC:
                    return False
                self._content = map_shared(self.path, num_bytes)
                self._identity = (found.st_dev, found.st_ino)
        except OSError:
            return False
        return True

    def _make(self, layout: BlockLayout, num_bytes: int) -> None:
        header = np.zeros(1, _HEADER)
        header["magic"], header["num_blocks"] = _MAGIC, layout.num_blocks
        header["num_units"] = layout.num_units
        part = f"{self.path}.{os.getpid()}"
        with open(part, "wb") as file:
            file.write(header.tobytes())
            # Written out, because a page of a sparse file on a full disk cannot be mapped.
            file.write(bytes(num_bytes - len(header.tobytes())))
        os.replace(part, self.path)

    def is_current(self) -> bool:
        """Return False if the table was deleted or replaced since it was mapped."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def is_served(self) -> bool:
        """Return True if a downloader is alive."""
        return is_fresh(float(self.header["beat"][0]))

    def block_path(self, block: int) -> str:
        return os.path.join(self.folder, BLOCKS, str(block))

    def tail_path(self, block: int) -> str:
        return os.path.join(self.folder, TAILS, str(block))

    # -- errors of blocks ----------------------------------------------------------------------

    def write_error(self, block: int, error: dict[str, str]) -> None:
        """Record why a block could not be had. Called by the downloader."""
        path = os.path.join(self.folder, ERRORS, str(block))
        # The latest one is also in the table, because a full disk takes no file.
        self.header["failed_block"] = block
        self.header["failure"] = error["what"].encode("ascii", "replace")[:511]
        with contextlib.suppress(OSError):
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                json.dump(error, file)
            os.replace(f"{path}.part", path)

    def read_error(self, block: int) -> dict[str, str]:
        """Return why a block could not be had."""
        try:
            with open(os.path.join(self.folder, ERRORS, str(block)), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            is_latest = int(self.header["failed_block"][0]) == block
            what = self.header["failure"][0].decode("ascii") if is_latest else "an unknown error"
            return {"kind": "network", "what": what}
        return {str(key): str(value) for key, value in dict(found).items()}

    def counters(self) -> dict[str, int]:
        """Return the downloader's counters since the table was made."""
        names = ("num_requests", "num_bytes", "num_evicted", "num_retries", "num_corrupt")
        return {name: int(self.header[name][0]) for name in (*names, "used_bytes")}

    def note_fetch(self, block: int, start_ns: int, end_ns: int) -> None:
        """Record a download. Called by the downloader."""
        number = int(self.header["num_fetches"][0])
        self.fetches[number % _NUM_FETCHES] = (start_ns, end_ns, block)
        self.header["num_fetches"] = number + 1

    def list_fetches(self, since_ns: int) -> list[tuple[int, int, int]]:
        """Return start, end and block of the last downloads that began after a time."""
        kept = self.fetches.copy()
        found: list[tuple[int, int, int]] = kept[kept["start_ns"] > since_ns].tolist()
        return found

    def count_read(self, waited_s: float) -> None:
        """Count a read of this process, which found its blocks, or waited for them."""
        place = self.processes[os.getpid() % _NUM_PROCESSES]
        place["num_waits" if waited_s else "num_hits"] += 1
        place["waited_s"] += waited_s

    def all_counters(self) -> dict[str, float]:
        """Return the counters of the downloader and of all processes that read."""
        busy_s = float(self.header["busy_s"][0])
        return {
            **self.counters(),
            "bytes_per_s": float(self.header["num_bytes"][0]) / busy_s if busy_s else 0.0,
            **{name: self.processes[name].sum().item() for name in _PROCESS.names or ()},
        }


def is_fresh(beat: float) -> bool:
    """Return True for a heartbeat of the last seconds. The clock starts again with the machine."""
    return 0 <= time.monotonic() - beat <= ALIVE_S
