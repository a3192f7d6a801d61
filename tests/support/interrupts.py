"""Programs that receive Ctrl-C at a random moment while they repeatedly fork workers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from support import scripts

PROGRAM = """
import atexit, json, os, signal, sys, time, warnings
import torch
from {loader} import DataLoader

LIMIT_S = 180
warnings.simplefilter("ignore")

def live():
    while True:
        for batch in DataLoader(
            range(64), batch_size=8, num_workers=3, multiprocessing_context="fork"
        ):
            pass

def run(stderr, ready):
    os.setsid()
    os.dup2(stderr, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        os.write(ready, b"1")
        live()
    except KeyboardInterrupt:
        code = 130
        print("KeyboardInterrupt", file=sys.stderr, flush=True)
    finally:
        atexit._run_exitfuncs()
        os._exit(code)

def is_over(what):
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.01)
    return False

def is_group_gone(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False

def interrupt(delay_s):
    with open(sys.argv[1], "w+b") as stderr:
        read_end, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            run(stderr.fileno(), ready)
        os.read(read_end, 1)  # on a busy machine, the child starts late
        os.close(read_end), os.close(ready)
        time.sleep(delay_s)
        os.killpg(pid, signal.SIGINT)
        status = []
        def has_ended():
            ended, code = os.waitpid(pid, os.WNOHANG)
            status.append(os.waitstatus_to_exitcode(code)) if ended else None
            return ended
        if not is_over(has_ended):
            status.append("went on")
        if not is_over(lambda: is_group_gone(pid)) or status == ["went on"]:
            os.killpg(pid, signal.SIGKILL)
            status[-1] = "workers stayed" if status != ["went on"] else "went on"
        stderr.seek(0)
        return {{"end": status[0], "said": stderr.read().decode()}}

live_once = list(DataLoader(range(8), num_workers=1, multiprocessing_context="fork"))
for delay_s in sys.argv[2:]:
    print(json.dumps(interrupt(float(delay_s))), flush=True)
"""


@dataclass(frozen=True)
class Ending:
    """Result of a program: its exit code or "went on", and its stderr output."""

    end: int | str
    said: str

    @property
    def is_clean(self) -> bool:
        """Return True if the program ended with one KeyboardInterrupt and no worker output."""
        return self.end == 130 and self.said.strip() == "KeyboardInterrupt"


def interrupt(folder: Path, count: int, loader: str = "penstock") -> list[Ending]:
    """Interrupt ``count`` programs in sequence, up to half a second after each starts."""
    delays = [f"{random.uniform(0.15, 0.5):.4f}" for _ in range(count)]
    source = PROGRAM.format(loader=loader)
    result = scripts.run(source, folder, str(folder / "stderr"), *delays)
    assert result.returncode == 0, result.stderr
    return [Ending(**json.loads(line)) for line in result.stdout.splitlines()]
