"""Datasets to pack, packed sets to damage, and a pack server whose processes are cheap to kill."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.paths import TESTS


class Mixed:
    """Every kind of field: fixed and ragged, numbers and text."""

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": np.full((3, 4, 5), index % 251, np.uint8),
            "label": index,
            "name": "é" * (index % 4),
            "boxes": np.arange(4 * (index % 3), dtype=np.float32).reshape(-1, 4) + index,
            "raw": bytes([index % 256]) * (index % 5),
        }


class Pixels:
    """Samples of one size, each filled with its own number."""

    def __init__(self, length: int = 100, num_bytes: int = 1024) -> None:
        self.length, self.num_bytes = length, num_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(self.num_bytes, index % 251, np.uint8), index


def digest(folder: Path) -> dict[str, str]:
    """Return the hash of every file in a folder, including hidden files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


SERVER = """
import os, signal, sys
import penstock
from support import packed_sets
from penstock import packing

for line in sys.stdin:
    folder, die_at, length, shard_bytes, piece_rows = line.split()
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    left = [int(die_at)]
    def stepping(function):
        def step(*arguments, **keywords):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return step
    if left[0]:
        for name in ("replace", "fsync", "unlink", "mkdir", "rmdir", "open"):
            setattr(os, name, stepping(getattr(os, name)))
    packing.choose_piece_rows = lambda spec, workers: int(piece_rows)
    try:
        data = packed_sets.Mixed(int(length))
        packing.pack(data, folder, workers=0, shard_bytes=int(shard_bytes))
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)
"""


class PackServer:
    """Packs in a separate process that costs a fork, not an import of torch."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def pack(
        self,
        folder: Path,
        *,
        die_at: int = 0,
        kill_after_s: float | None = None,
        length: int = 60,
        shard_bytes: int = 1500,
        piece_rows: int = 0,
    ) -> int:
        """Pack, and return the exit code.

        ``die_at`` kills the process before that step. ``kill_after_s`` kills it after that time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{folder} {die_at} {length} {shard_bytes} {piece_rows}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def pack_server() -> Iterator[PackServer]:
    paths = [str(TESTS), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield PackServer(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
