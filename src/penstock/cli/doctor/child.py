"""Starts the trial of a dataset or loader in a process of its own, and reads what it noted.

The child may hang, crash, print or end in any way: the answer comes within the limit, and says
what it was doing. Nothing of it outlives the call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.cli.doctor.user_code import place_in_stack

# What the child runs. The arguments: the parent's sys.path, so that both find the same packages,
# and the module that tries.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)
_MAX_PRINTED = 2000


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """What to try, and how long.

    Args:
        arguments: The script's own, as it sees them in ``sys.argv``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0
    batch_size: int | None = None
    num_workers: int | None = None


def try_dataset(options: TrialOptions) -> dict[str, Any]:
    """The notes of a trial; ``failure`` in them is None if it came to its end."""
    return run_trial("penstock.cli.doctor.trial", {**asdict(options), "command": "doctor"})


def run_trial(module: str, options: dict[str, Any]) -> dict[str, Any]:
    """The notes of any trial.

    Args:
        module: Its ``main(folder, options)`` runs in the child.
        options: Plain values, of which ``command``, ``target`` and ``limit_s`` are used here.
    """
    with tempfile.TemporaryDirectory(prefix=f"penstock-{options['command']}-") as name:
        folder = Path(name)
        with open(folder / "printed", "wb") as printed:
            process = _start(module, folder, options, printed)
            try:
                exit_code: int | None = process.wait(options["limit_s"])
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                _end(process)
        return _read(folder, exit_code, options)


def _start(
    module: str, folder: Path, options: dict[str, Any], printed: Any
) -> subprocess.Popen[bytes]:
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    command = [sys.executable, "-c", _BOOT, paths, module, str(folder)]
    command.append(json.dumps({**options, "parent": os.getpid()}))
    extra: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        extra = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, **extra
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it started, and collect it."""
    if sys.platform == "win32":
        import psutil

        try:
            family = psutil.Process(process.pid).children(recursive=True)
        except psutil.Error:
            family = []
        for member in family:
            try:
                member.kill()
            except psutil.Error:
                pass  # it was faster
    else:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its session has its pid for a name
        except (ProcessLookupError, PermissionError):
            pass  # all of them ended by themselves
    process.kill()
    process.wait()


def _read(folder: Path, exit_code: int | None, options: dict[str, Any]) -> dict[str, Any]:
    target, limit_s = options["target"], options["limit_s"]
    notes: dict[str, Any] = {"target": target, "failure": None}
    try:
        notes.update(json.loads((folder / "notes.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass  # it did not come that far
    printed = _text(folder / "printed")[-_MAX_PRINTED:]
    is_finished = notes.pop("is_finished", False)
    if not is_finished:
        stage = _text(folder / "stage").strip() or "starting"
        notes["failure"] = {
            "kind": "limit" if exit_code is None else "death",
            "what": _ending(exit_code, stage, limit_s),
            "where": place_in_stack(_text(folder / "stack")),
            "cure": f"penstock {options['command']} {target} --timeout {limit_s * 5:g}"
            if exit_code is None
            else f"python -X faulthandler {target.rpartition(':')[0]}",
        }
    failure = notes["failure"]
    if failure and failure["kind"] == "script" and "exit code" in failure["what"] and printed:
        failure["what"] += f"; it printed: {printed.strip().splitlines()[-1]}"
    notes["printed"] = printed
    return notes


def _ending(exit_code: int | None, stage: str, limit_s: float) -> str:
    if exit_code is None:
        return f"not done after {limit_s:g} s; it was {stage}"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        return f"the process died with {name} while {stage}"
    return f"the process ended with exit code {exit_code} while {stage}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
