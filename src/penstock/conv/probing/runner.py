"""Runs steps in child processes that may die or hang, within a limit: the parent's side."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.conv.probing.child import MARK
from penstock.conv.probing.steps import Step, Verdict

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.conv.probing.child import main
main()
"""
MAX_LOST = 8
"""So many children may die or hang; what was not tried by then counts as broken, too."""
START_LIMIT_S = 120.0
"""For importing torch and opening the GPU."""


def run_steps(
    device: str,
    steps: Sequence[Step],
    *,
    limit_s: float,
    rung: str = "",
    environ: Mapping[str, str] | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Try all steps; a child that is lost at one is followed by another for the rest.

    Args:
        limit_s: For one step; a child that takes longer hangs, and is killed.
        rung: What the child does before: ``"library off"``, ``"bypass"``, or nothing.
        environ: Added to the child's environment.
    """
    verdicts: list[Verdict] = []
    num_lost = 0
    while len(verdicts) < len(steps):
        rest = steps[len(verdicts) :]
        if num_lost >= MAX_LOST:
            note = f"not tried: {MAX_LOST} processes were lost before"
            verdicts += [Verdict(step=step, word="crashes", note=note) for step in rest]
            break
        for verdict in _run_child(device, rest, limit_s, rung, environ or {}):
            verdicts.append(verdict)
            on_verdict(verdict)
            num_lost += verdict.word in ("crashes", "hangs")
    return verdicts


def _run_child(
    device: str, steps: Sequence[Step], limit_s: float, rung: str, environ: Mapping[str, str]
) -> list[Verdict]:
    """Verdicts of as many steps as one child lived for; at least one."""
    child = _start(environ)
    lines: queue.Queue[list[Any] | None] = queue.Queue()
    reader = threading.Thread(
        target=_read, args=(child, lines), name="penstock-probe-reader", daemon=True
    )
    reader.start()
    told = {"device": device, "rung": rung, "steps": [(n, s.key) for n, s in enumerate(steps)]}
    verdicts: list[Verdict] = []
    try:
        _tell(child, told)
        deadline_s = time.monotonic() + START_LIMIT_S
        while len(verdicts) < len(steps):
            try:
                line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                verdicts.append(Verdict(step=steps[len(verdicts)], word="hangs",
                                        note=f"no result within {limit_s:g} s"))  # fmt: skip
                break
            if line is None:
                verdicts.append(_obituary(child, steps[len(verdicts)]))
                break
            deadline_s = time.monotonic() + limit_s
            if line[0] == "done":
                verdicts.append(Verdict(step=steps[line[1]], **line[2]))
    finally:
        _end(child)
        reader.join(5.0)
    return verdicts


def _start(environ: Mapping[str, str]) -> subprocess.Popen[str]:
    options: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        options = {"creationflags": subprocess.CREATE_NO_WINDOW}
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PENSTOCK_CONV": "off", **environ},
        **options,
    )


def _tell(child: subprocess.Popen[str], told: dict[str, Any]) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(told))
        child.stdin.close()
    except OSError:
        pass  # it died at once; its obituary says so


def _read(child: subprocess.Popen[str], lines: queue.Queue[list[Any] | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(MARK):
            lines.put(json.loads(line[len(MARK) :]))
    lines.put(None)


def _obituary(child: subprocess.Popen[str], step: Step) -> Verdict:
    code = child.wait()
    if code < 0:
        try:
            note = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            note = f"killed by signal {-code}"
    else:
        note = f"the process ended with exit code {code}"
    return Verdict(step=step, word="crashes", note=note)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        if sys.platform != "win32":
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended by itself
        child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass  # what was left to write has no reader any more
