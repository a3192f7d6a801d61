"""The same run in a new interpreter, with another hash seed: what a second program would see.

this process    factory and setting, by value -- stdin -->     child: record()
                hashes, or why not            <-- a file --
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.errors import BadArgument
from penstock.machine.child_process import ChildProcess, python_command
from penstock.verify.runs import Batch, Extent, Record, record
from penstock.verify.settings import Factory, Setting

_LIMIT_S = 600.0
HASH_SEEDS = ("1", "2")


class CannotLeave(Exception):
    """The factory cannot be sent to another process."""


def record_afresh(
    factory: Factory, setting: Setting, extent: Extent, hash_seed: str = HASH_SEEDS[0]
) -> Record:
    """Like :func:`penstock.verify.runs.record`, in a new process.

    Raises:
        CannotLeave: The factory holds something that no other process can have.
    """
    import cloudpickle

    arguments = dict(setting.arguments)
    try:
        pickled = cloudpickle.dumps((factory, arguments, asdict(extent)))
    except Exception as error:
        raise CannotLeave(f"the factory does not travel: {str(error).splitlines()[0]}") from error
    with tempfile.TemporaryDirectory(prefix="penstock-verify-") as folder:
        path = Path(folder, "found.json")
        with ChildProcess(
            python_command(f"{__name__}:main", str(path)),
            reads="stderr",
            send=pickled,
            environ={"PYTHONHASHSEED": hash_seed},
        ) as child:
            status, printed = child.finish(_LIMIT_S, keep_bytes=4000)
        if status is None:
            raise TimeoutError(f"the new process had not ended after {_LIMIT_S:g} s")
        if not path.exists():
            last = printed.strip().splitlines() or [""]
            raise BadArgument(f"the new process ended with status {status}", where=last[-1])
        return _as_record(json.loads(path.read_text()))


def _as_record(found: dict[str, Any]) -> Record:
    epochs = [
        [
            Batch(
                whole=bytes.fromhex(whole),
                rows=None if rows is None else tuple(bytes.fromhex(row) for row in rows),
            )
            for whole, rows in epoch
        ]
        for epoch in found["epochs"]
    ]
    return Record(epochs=epochs, took_s=found["took_s"])


def main(path: str) -> None:
    """Called from: the child's command line."""
    factory, arguments, extent = pickle.loads(sys.stdin.buffer.read())
    found = record(factory, Setting(name="", arguments=arguments), Extent(**extent))
    epochs = [
        [
            (batch.whole.hex(), None if batch.rows is None else [row.hex() for row in batch.rows])
            for batch in epoch
        ]
        for epoch in found.epochs
    ]
    Path(path).write_text(json.dumps({"epochs": epochs, "took_s": found.took_s}))
    sys.stdout.flush()
    os._exit(0)  # what the factory's code started may wait for ever
