"""Runs a loader in a new interpreter with a different hash seed, as a second program would.

::

    this process                                 child
    factory and setting, pickled  -- stdin -->   run_and_hash()
    HashedRun                     <-- a file --

Tested by ``tests/integration/verify/test_comparison.py``.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

from penstock.machine.child_process import ChildProcess, end_with_parent, python_command
from penstock.verify.factory import Factory
from penstock.verify.hashed_run import Extent, HashedRun, run_and_hash
from penstock.verify.settings import Setting

_LIMIT_S = 600.0
HASH_SEEDS = ("1", "2")


class NotPicklable(Exception):
    """The factory cannot be sent to another process."""


class NewProcessFailed(Exception):
    """The new process ended before it was done. ``printed`` is the end of its stderr."""

    def __init__(self, status: int, printed: str) -> None:
        self.printed = printed.strip()
        last = self.printed.splitlines()[-1:]
        super().__init__(": ".join([f"the new process ended with status {status}", *last]))


def run_in_new_process(
    factory: Factory, setting: Setting, extent: Extent, hash_seed: str = HASH_SEEDS[0]
) -> HashedRun:
    """Like :func:`penstock.verify.hashed_run.run_and_hash`, in a new process.

    Raises:
        NotPicklable: The factory holds something that cannot be pickled.
        NewProcessFailed: The loader raised, or the process died.
    """
    import cloudpickle

    try:
        pickled = cloudpickle.dumps((factory, dict(setting.arguments), extent, sys.argv))
    except Exception as error:
        raise NotPicklable(
            f"the factory cannot be pickled: {str(error).splitlines()[0]}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="penstock-verify-") as folder:
        path = Path(folder, "hashes.pickle")
        with ChildProcess(
            python_command(f"{__name__}:main", str(path), str(os.getpid())),
            reads="stderr",
            send=pickled,
            environ={"PYTHONHASHSEED": hash_seed},
        ) as child:
            status, printed = child.finish(_LIMIT_S, keep_bytes=4000)
        if status is None:
            raise TimeoutError(f"the new process did not end within {_LIMIT_S:g} s")
        if not path.exists():
            raise NewProcessFailed(status, printed)
        found: HashedRun = pickle.loads(path.read_bytes())
        return found


def main(path: str, parent: str) -> None:
    """Entry point of the child process."""
    end_with_parent(int(parent))
    factory, arguments, extent, sys.argv[:] = pickle.loads(sys.stdin.buffer.read())
    found = run_and_hash(factory, Setting(name="", arguments=arguments), extent)
    Path(path).write_bytes(pickle.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads or processes that the factory started may block a normal exit
