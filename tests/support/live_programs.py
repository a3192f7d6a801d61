"""Programs that run loaders until they are killed, for ``penstock top``.

    python live_programs.py NUM_LOADERS NUM_WORKERS [hang | fork | torch | read | between]

The program prints "ready" once all loaders have run for some seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


class Slow:
    def __init__(self, how: str) -> None:
        self._how = how

    def __len__(self) -> int:
        return 400 if self._how == "between" else 10**9

    def __getitem__(self, index: int) -> int:
        time.sleep(3600 if self._how == "hang" and index == 777 else 0.002)
        if self._how == "read":
            with open(sys.executable, "rb") as file:
                file.read(1 << 20)
        return index


def run_loaders(num_loaders: int, num_workers: int, how: str) -> None:
    if how == "torch":  # under penstock run
        from torch.utils.data import DataLoader
    else:
        from penstock import DataLoader

    if how == "between":  # epochs until penstock top can see them, and then none
        loader: Any = DataLoader(Slow(how), batch_size=4, num_workers=num_workers)
        while loader._recorder is None or loader._recorder._status is None:
            list(loader)
        print("ready", flush=True)
        time.sleep(3600)
    iterators = [
        iter(DataLoader(Slow(how), batch_size=4, num_workers=num_workers))
        for _ in range(num_loaders)
    ]
    begun, is_told = time.monotonic(), False
    while True:
        for iterator in iterators:
            next(iterator)
        if not is_told and time.monotonic() - begun > 2.5:
            if how == "fork" and os.fork() == 0:
                time.sleep(3600)
            is_told = True
            print("ready", flush=True)


@contextlib.contextmanager
def running(
    *arguments: str,
    waits: bool = True,
    launcher: tuple[str, ...] = (sys.executable,),
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """Run the program, and kill it at the end. With ``waits``, until it is ready."""
    with subprocess.Popen(
        [*launcher, __file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    ) as program:
        try:
            assert program.stdout is not None
            if waits:
                assert program.stdout.readline() == "ready\n"
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def wait_for(read: Callable[[], Any]) -> Any:
    """Call ``read`` until it returns something true."""
    limit = time.monotonic() + 240
    while not (found := read()):
        assert time.monotonic() < limit
        time.sleep(0.1)
    return found


if __name__ == "__main__":
    run_loaders(int(sys.argv[1]), int(sys.argv[2]), (*sys.argv, "")[3])
