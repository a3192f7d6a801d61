"""Checks of user code that run in a child process.

::

    the command                                       the child
    run_check("module:function", options)  -- start -->  conduct(): function(results, ...)
    results, or how it ended  <-- results.json --        CheckResults.save() after each step
                              <-- activity --            CheckResults.doing(): the current step
                              <-- stack --               the stack at a crash or near the limit

The child may hang, crash, print, or exit in any way. The command still gets a result within the
time limit, including what the child was doing. The child does not outlive the call, even if the
command is killed.

Tested by ``tests/integration/cli/doctor/test_gpu_copies.py``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.cli.script_loading import ScriptFailed
from penstock.cli.user_code import describe_error, place_in_stack, place_of
from penstock.errors import BadTarget
from penstock.machine.child_process import (
    ChildProcess,
    end_with_parent,
    python_command,
    signal_name,
)

STACK_AHEAD_S = 1.0
"""How long before the time limit the child dumps its stack."""
_MAX_PRINTED = 2000


# -- in the command --------------------------------------------------------------------------------


def run_check(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a check in a child process and return what it saved.

    Args:
        function: ``"module:function"`` to call in the child. See :data:`Check`.
        options: Plain values for the check. ``command``, ``target`` and ``timeout`` are also used
            here.

    Returns:
        The saved values, plus ``failure`` (None if the check finished) and ``printed``.

    Raises:
        BadTarget: The script ran, but the target name is missing or unusable.
    """
    with tempfile.TemporaryDirectory(prefix=f"penstock-{options['command']}-") as name:
        told = json.dumps({**options, "parent": os.getpid()})
        command = python_command("penstock.cli.child_check:conduct", function, name, told)
        with ChildProcess(command, reads="both") as child:
            exit_code, printed = child.finish(options["timeout"], _MAX_PRINTED)
        results = _read(Path(name), exit_code, options)
    failure = results["failure"]
    if failure and failure["kind"] == "name":
        raise BadTarget(failure["what"], where=failure["where"], remedy=failure["cure"] or None)
    if failure and failure["kind"] == "script" and "exit code" in failure["what"] and printed:
        failure["what"] += f"; it printed: {printed.strip().splitlines()[-1]}"
    return {**results, "printed": printed}


def _read(folder: Path, exit_code: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    target, limit_s = options["target"], options["timeout"]
    results: dict[str, Any] = {"target": target, "failure": None}
    results.update(json.loads(_text(folder / "results.json") or "{}"))
    if not results.pop("is_finished", False):
        activity = _text(folder / "activity").strip() or "starting"
        results["failure"] = {
            "kind": "limit" if exit_code is None else "death",
            "what": _describe_end(exit_code, activity, limit_s),
            "where": place_in_stack(_text(folder / "stack")),
            "cure": f"penstock {options['command']} {target} --timeout {limit_s * 5:g}"
            if exit_code is None
            else f"python -X faulthandler {target.rpartition(':')[0]}",
        }
    return results


def _describe_end(exit_code: int | None, activity: str, limit_s: float) -> str:
    if exit_code is None:
        return f"timed out after {limit_s:g} s while {activity}"
    if exit_code < 0:
        return f"the process died with {signal_name(exit_code)} while {activity}"
    return f"the process exited with code {exit_code} while {activity}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the child has not written it
        return ""


# -- in the child ----------------------------------------------------------------------------------


class CheckResults:
    """Results of a check, written to disk so that the command can read them at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._activity = open(folder / "activity", "wb", buffering=0)  # noqa: SIM115 - open until exit
        self.values: dict[str, Any] = {"failure": None}

    def doing(self, activity: str) -> None:
        """Record the next step. Cheap enough to call for every sample."""
        self._activity.seek(0)
        self._activity.write(activity.encode("utf-8", "replace")[:400].ljust(400))

    def save(self, **values: Any) -> None:
        """Add values and write all values atomically: a reader sees the old file or the new one."""
        self.values.update(values)
        unfinished = self._folder / "results.new"
        unfinished.write_text(json.dumps(self.values, default=str), encoding="utf-8")
        os.replace(unfinished, self._folder / "results.json")

    def fail(self, kind: str, what: str, where: str | None = None, cure: str = "") -> None:
        """Save the reason why the check cannot continue."""
        self.save(failure={"kind": kind, "what": what, "where": where, "cure": cure})


Check = Callable[[CheckResults, dict[str, Any], float], None]
"""Called with the results to fill, the options, and the deadline on the monotonic clock."""


def conduct(function: str, folder: str, options_text: str) -> None:
    """Run a check, save the outcome, and exit. Called by the child's command line."""
    options = json.loads(options_text)
    results = CheckResults(Path(folder))
    end_with_parent(options["parent"], lambda: shutil.rmtree(folder, ignore_errors=True))
    deadline = time.monotonic() + options["timeout"]
    stack = open(Path(folder) / "stack", "w", encoding="utf-8")  # noqa: SIM115 - open until exit
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(max(0.1, options["timeout"] - STACK_AHEAD_S), file=stack)
    module, _, name = function.partition(":")
    try:
        check: Check = getattr(importlib.import_module(module), name)
        check(results, options, deadline)
    except ScriptFailed as failed:
        results.fail(failed.kind, failed.what, failed.where, failed.cure)
    except Exception as error:  # from Penstock or the script; the user never sees a traceback
        what = f"the check failed with {describe_error(error)}"
        results.fail("failed", what, place_of(error))
    results.save(is_finished=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of the script could block forever
