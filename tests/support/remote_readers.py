"""Programs that read a set in object storage, to be killed by tests.

A program that has imported torch forks one for each start, which saves seconds of imports.

    with RemoteReaders(remote) as readers:
        one = readers.start(seed=1)
        readers.wait_for(one, num_batches=5)
        os.kill(one, signal.SIGKILL)
        readers.end(one)                   # its exit status, as of subprocess
        readers.digests[one]               # of the batches that it has read
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from support.remote_sets import HALF_BYTES, RemoteSet

_LIMIT_S = 240.0
PROGRAM = """
import json, os, sys, time
import penstock
from support.remote_readers import digests_of

penstock.DataLoader, penstock.Packed

def tell(*values):  # in one piece, because all programs write to one pipe
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())

for line in sys.stdin:
    found = json.loads(line)
    if "end" in found:
        status = os.waitpid(found["end"], 0)[1]
        tell(found["end"], "ended", os.waitstatus_to_exitcode(status))
        continue
    child = os.fork()
    if child:
        tell(child, "started")
        continue
    data = penstock.Packed(found["url"], cache_folder=found["folder"], cache_bytes=found["bytes"])
    for digest in digests_of(data, found["order"]):
        tell(os.getpid(), digest)
        time.sleep(found["step_s"])
    tell(os.getpid(), "whole")
    time.sleep(found["stay_s"])
    os._exit(0)
"""


def digests_of(data: Any, order: dict[str, int]) -> Any:
    """Yield a digest of each batch of an epoch in a block order."""
    import penstock

    data = data.select("pixels", "label")
    sampler = data.block_order(num_mixed=2, batch_size=32, **order)
    for batch in penstock.DataLoader(data, batch_size=32, sampler=sampler):
        content = batch["pixels"].numpy().tobytes() + batch["label"].numpy().tobytes()
        yield hashlib.sha256(content).hexdigest()[:16]


class RemoteReaders:
    """Starts programs that read a set with a cache of half its size.

    Args:
        step_s: How long each of them pauses after a batch.
    """

    def __init__(self, remote: RemoteSet, step_s: float = 0.0) -> None:
        self.remote, self._step_s = remote, step_s
        self.digests: dict[int, list[str]] = {}
        self.whole: set[int] = set()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}

    def __enter__(self) -> RemoteReaders:
        tests = os.path.dirname(os.path.dirname(__file__))
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        for pid in set(self._started) - set(self._ended):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_LIMIT_S)
        self._reader.join(_LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, word, *rest = line.split()
            if word == "started":
                self.digests.setdefault(int(pid), [])
                self._started.append(int(pid))
            elif word == "ended":
                self._ended[int(pid)] = int(rest[0])
            elif word == "whole":
                self.whole.add(int(pid))
            else:
                self.digests.setdefault(int(pid), []).append(word)

    def start(self, *, stay_s: float = 0.0, **order: int) -> int:
        """Start a program. Returns its process ID.

        Args:
            stay_s: How long it stays after the epoch.
            order: The seed, and the rank and world size.
        """
        num_before = len(self._started)
        self._send(
            url=self.remote.server.url,
            folder=str(self.remote.folder),
            bytes=HALF_BYTES,
            order=order,
            step_s=self._step_s,
            stay_s=stay_s,
        )
        wait_until(lambda: len(self._started) > num_before)
        return self._started[num_before]

    def wait_for(self, pid: int, num_batches: int) -> None:
        wait_until(lambda: pid in self.whole or len(self.digests[pid]) >= num_batches)

    def end(self, pid: int) -> int:
        """Wait for the end of a program. Returns its exit status."""
        self._send(end=pid)
        wait_until(lambda: pid in self._ended)
        return self._ended[pid]

    def _send(self, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()


def wait_until(is_true: Any) -> None:
    """Wait for a condition. Fails at a limit that only a hang reaches."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, "a program hangs"
        time.sleep(0.002)
