"""A program killed with SIGKILL at 200 random moments leaves nothing behind after 3 seconds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import leftovers, scripts

pytestmark = [pytest.mark.soak, pytest.mark.fault, pytest.mark.timeout(1800)]

NUM_KILLS = 200
GONE_S = 3.0
MOMENTS_S = {"forkserver": 4.0, "fork": 1.0, "spawn": 5.0}
"""Latest moment of a kill. Workers are up after 2.5 s, 0.1 s and 3 s on two busy cores."""

PROGRAM = """
import os, sys, time, random
import torch
from penstock import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, i):
        time.sleep(60 if i % 997 == 996 else 0.0005)
        return torch.full((1000,), i)

def live(method):
    context = None if method == "forkserver" else method
    for _ in range(100):
        for batch in DataLoader(Data(), batch_size=4, num_workers=2, shuffle=True,
                                multiprocessing_context=context, max_restarts=0):
            pass

print("ready", flush=True)
for line in sys.stdin:  # one program for each line, without importing torch each time
    method, token = line.split()
    pid = os.fork()
    if pid == 0:
        os.environ["PENSTOCK_SOAK_TOKEN"] = token
        os.setsid()
        try:
            live(method)
        finally:
            os._exit(1)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class Zygote:
    """A process that starts programs one after the other."""

    def __init__(self, folder: Path) -> None:
        path = folder / "program.py"
        path.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
        )
        (folder / "tmp").mkdir()
        self.folder = folder
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_one(self, method: str, moment_s: float, token: str) -> tuple[int, list[str]]:
        """Kill one program. Returns the number of its children and the processes left."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{method} {token}\n")
        self.process.stdin.flush()
        pid = int(self.read())
        time.sleep(moment_s)
        family = scripts.family_of(pid)
        os.kill(pid, signal.SIGKILL)
        assert self.read() == "ended"
        left = leftovers.wait_until_gone(family, GONE_S)
        found = [*map(str, left), *marked(token), *os.listdir(self.folder / "tmp")]
        for one in {*left, *map(int, marked(token))}:
            os.kill(one, signal.SIGKILL)
        return len(family), found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def marked(token: str) -> list[str]:
    """Return the processes started below the program, whatever their current parent."""
    found = []
    for process in psutil.process_iter():
        try:
            content = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if f"PENSTOCK_SOAK_TOKEN={token}".encode() in content and leftovers.is_running(process.pid):
            found.append(str(process.pid))
    return found


def test_killed_at_200_random_moments_nothing_is_left(tmp_path: Path, note: Any) -> None:
    chance = random.Random(4)
    methods = ["forkserver"] * 6 + ["fork"] * 3 + ["spawn"]
    cases = [
        (method, chance.uniform(0.0, MOMENTS_S[method]), f"t{number}-{os.getpid()}")
        for number, method in enumerate(methods * (NUM_KILLS // len(methods)))
    ]
    chance.shuffle(cases)

    def run(half: int) -> list[tuple[str, int, list[str]]]:
        folder = tmp_path / str(half)
        folder.mkdir()
        zygote = Zygote(folder)
        try:
            return [(case[0], *zygote.kill_one(*case)) for case in cases[half::2]]
        finally:
            zygote.close()

    with ThreadPoolExecutor(2) as executor:
        outcomes = [outcome for half in executor.map(run, range(2)) for outcome in half]
    left = [outcome for outcome in outcomes if outcome[2]]
    sizes = Counter(min(3, size) for _, size, _ in outcomes)
    kinds = Counter(method for method, _, _ in outcomes)
    note(
        f"{len(outcomes)} programs killed with SIGKILL at random moments ("
        f"{', '.join(f'{method} {count}' for method, count in sorted(kinds.items()))}): "
        f"{len(left)} left anything after {GONE_S:.0f} s; {sizes[0]} had no child yet, {sizes[1]} "
        f"one (the fork server, starting, or the first worker), {sizes[2] + sizes[3]} more"
    )
    assert len(outcomes) == NUM_KILLS
    assert left == []
    assert sizes[2] + sizes[3] > NUM_KILLS // 4  # control: there were children to end


def test_a_process_that_stays_is_found(tmp_path: Path) -> None:
    token = f"control-{os.getpid()}"
    with subprocess.Popen(["sleep", "20"], env={"PENSTOCK_SOAK_TOKEN": token, **os.environ}) as one:
        time.sleep(0.1)
        assert marked(token) == [str(one.pid)]
        one.kill()
