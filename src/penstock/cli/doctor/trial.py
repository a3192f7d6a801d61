"""Tries a dataset, in a child process of the doctor's.

    doctor (parent)                                child
    penstock doctor train.py:ds -- start -->       run the script up to ``ds``
                                                   length, travel, parts, samples, one batch, plan
    findings, rendering  <-- one JSON file --      notes, saved after every stage
                         <-- one text file --      what it is doing right now

Whatever the script prints, hangs in or crashes with stays in the child: the parent reads the notes
that are there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.cli.doctor.script import TrialFailed, make_dataset, run_script
from penstock.cli.doctor.target import find_target
from penstock.cli.doctor.user_code import describe_error, place_of

STACK_AHEAD_S = 1.0
"""So long before the parent's limit the child writes down where it stands."""
_LOOK_S = 0.5


class Notes:
    """What is known so far, on disk: the parent may have to read it at any moment.

    Called from: the child. Pairs with :func:`penstock.cli.doctor.child.try_dataset`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stage = open(folder / "stage", "wb", buffering=0)  # noqa: SIM115 - until we end
        self.values: dict[str, Any] = {"failure": None}

    def doing(self, stage: str) -> None:
        """Say what is about to be done. Cheap enough for every sample."""
        self._stage.seek(0)
        self._stage.write(stage.encode("utf-8", "replace")[:400].ljust(400))

    def save(self, **values: Any) -> None:
        """Add values and write all of them; a reader sees the old file or the new one."""
        self.values.update(values)
        unfinished = self._folder / "notes.new"
        unfinished.write_text(json.dumps(self.values, default=str), encoding="utf-8")
        os.replace(unfinished, self._folder / "notes.json")


Attempt = Callable[[Notes, dict[str, Any], float], None]


def main(folder: str, options_text: str) -> None:
    """Called from: the child's command line.

    Args:
        folder: Where the notes go.
        options_text: A JSON object: ``target``, ``arguments``, ``limit_s``, ``batch_size``,
            ``num_workers``.
    """
    conduct(folder, json.loads(options_text), _try)


def conduct(folder: str, options: dict[str, Any], attempt: Attempt) -> None:
    """Run an attempt, note how it ended, and end this process.

    Args:
        options: ``limit_s`` and ``parent`` (a process's number) are used here.
        attempt: Called with the notes, the options, and when time is up.
    """
    notes = Notes(Path(folder))
    _end_with_parent(options["parent"], folder)
    deadline = time.monotonic() + options["limit_s"]
    stack = open(Path(folder) / "stack", "w", encoding="utf-8")  # noqa: SIM115 - until we end
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(
        max(0.1, options["limit_s"] - STACK_AHEAD_S), file=stack, exit=False
    )
    try:
        attempt(notes, options, deadline)
    except TrialFailed as failed:
        notes.save(failure=_failure(failed.kind, failed.what, failed.where, failed.cure))
    except Exception as error:  # ours or the script's: never a traceback
        what = f"trying it failed with {describe_error(error)}"
        notes.save(failure=_failure("failed", what, place_of(error), ""))
    notes.save(is_finished=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and exit handlers of the script's may wait for ever; the parent cleans up


def _end_with_parent(parent: int, folder: str) -> None:
    """A command that was killed cannot clean up: end with it, and take the notes along."""
    import psutil

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):  # it was killed while we started
            process = psutil.Process(parent)
            while process.is_running():
                time.sleep(_LOOK_S)
        shutil.rmtree(folder, ignore_errors=True)
        if sys.platform != "win32" and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the script has started
        os._exit(1)

    threading.Thread(target=watch, name="penstock-watch-parent", daemon=True).start()


def _failure(kind: str, what: str, where: str | None, cure: str) -> dict[str, str | None]:
    return {"kind": kind, "what": what, "where": where, "cure": cure}


def _try(notes: Notes, options: dict[str, Any], deadline: float) -> None:
    target = find_target(options["target"])
    value = run_script(target, options["arguments"], notes.doing)
    notes.doing(f"making {target.name}()")
    made = make_dataset(value, target)
    import torch

    torch.set_num_threads(1)  # as in a worker: samples are timed
    from penstock.cli.doctor.stages import (
        Stages,
    )  # late: it imports torch, the script may set it up

    is_loader = isinstance(made, torch.utils.data.DataLoader)
    Stages(
        notes=notes,
        target=target,
        dataset=made.dataset if is_loader else made,
        loader=made if is_loader else None,
        options=options,
        deadline=deadline,
    ).run()
