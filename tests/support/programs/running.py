"""Runs a program: the user's loop and its events.

Events are (kind, epoch, number of batches delivered in the epoch, ...):

    ("kill", e, n)          kill a worker with SIGKILL
    ("kill_server", e, n)   kill the fork server
    ("fork", e, n)          fork as a user; the child holds the batch and checks it at the end
    ("break", e, n)         leave the epoch
    ("resume", e, n, w)     pass the state to a new loader with w workers, and continue
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from support import leftovers
from support.programs import parts
from support.programs.record import Event, Program

MAX_SHOWN_BYTES = 64
MAX_ERRORS = 50
"""The loop leaves an epoch after this many errors. Counting batches instead would end a run with
``in_order=False`` at another batch than its reference."""


@dataclass
class Run:
    """Observations of a loop."""

    epochs: list[list[Any]] = field(default_factory=list)
    """Descriptions of the batches of each epoch. See :func:`describe`."""
    drawn: list[tuple[float, ...]] = field(default_factory=list)
    """Numbers that the loop drew from Python's, NumPy's and torch's generators."""
    problems: list[str] = field(default_factory=list)
    num_done: dict[str, int] = field(default_factory=dict)
    """Number of events of each kind that took place."""


# -- descriptions of batches -----------------------------------------------------------------------


def describe(value: Any) -> Any:
    """Describe a batch as plain tuples that can be compared, hashed and printed, bit by bit."""
    if isinstance(value, torch.Tensor):
        array = value.detach().resolve_conj().resolve_neg().numpy()
        return ("tensor", str(value.dtype), *_describe_array(array))
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return ("objects", value.shape, tuple(map(describe, value.ravel().tolist())))
        return ("array", str(value.dtype), *_describe_array(value))
    if isinstance(value, dict):
        return ("dict", tuple((key, describe(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(map(describe, value)))
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        items = tuple((name, describe(getattr(value, name))) for name in names)
        return (type(value).__name__, items)
    return (type(value).__name__, repr(value))


def _describe_array(array: Any) -> tuple[Any, ...]:
    content = array.tobytes()
    if len(content) <= MAX_SHOWN_BYTES:
        return (
            array.shape,
            repr(array.tolist()),
            content.hex() if array.dtype.kind in "fc" else "",
        )
    return (array.shape, hashlib.sha256(content).hexdigest()[:16])


def describe_error(error: Exception) -> Any:
    """Describe an exception by its class and arguments. The engine adds a text to its class."""
    if isinstance(error, parts.BadFile):
        return ("error", "BadFile", repr(error.args))
    if _is_deserved(error):
        return ("error", type(error).__name__)
    kinds = (KeyError, IndexError, TypeError, ValueError, RuntimeError, OSError)
    kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), type(error).__name__)
    return ("error", kind)


def _is_deserved(error: Exception) -> bool:
    """Return True for an error that the documentation announces for this program."""
    names = ("NoSubstitute", "MismatchedSamples", "TooManyBad")
    return isinstance(error, tuple(getattr(penstock.errors, name) for name in names))


# -- loaders ---------------------------------------------------------------------------------------


def _length_of(program: Program, dataset: Any) -> int:
    return 0 if program.source == "iterable" else len(dataset)


def make_ours(program: Program, dataset: Any) -> Any:
    """Return the loader of a program."""
    batch = {"batch_size": program.batch_size, "drop_last": program.drop_last}
    arguments = parts.ORDERS[program.order](_length_of(program, dataset), batch)
    return penstock.DataLoader(
        dataset,
        **arguments,
        seed=program.seed,
        collate_fn=parts.make_collate(program.collate),
        num_workers=program.num_workers,
        pool=program.pool,
        multiprocessing_context=program.start_method,
        prefetch_factor=program.prefetch_factor,
        persistent_workers=program.persistent_workers,
        in_order=program.in_order,
        randomness=program.randomness,
        on_error=parts.mend if program.on_error == "function" else program.on_error,
        worker_init_fn=parts.INITS[program.worker_init],
    )


def make_torchs(program: Program, dataset: Any) -> Any:
    """Return torch's own loader without workers, over the same indices."""
    batch = {"batch_size": program.batch_size, "drop_last": program.drop_last}
    length = _length_of(program, dataset)
    arguments = parts.ORDERS[program.order](length, batch)
    if program.seed is not None and arguments.pop("shuffle", False):
        arguments["sampler"] = penstock.SeededOrder(length, seed=program.seed)
    return TorchDataLoader(dataset, **arguments, collate_fn=parts.make_collate(program.collate))


# -- the loop --------------------------------------------------------------------------------------


class Loop:
    """One run of a program.

    Args:
        makes: :func:`make_ours` or :func:`make_torchs`.
    """

    def __init__(self, program: Program, makes: Any, folder: Path) -> None:
        self.program = program
        self.run = Run()
        self._makes = makes
        self._dataset = parts.make_dataset(program, folder)
        self._loader = makes(program, self._dataset)
        self._held: list[tuple[Any, Any]] = []
        self._children: list[tuple[int, int, int]] = []
        self._batches: Any = None

    def go(self) -> Run:
        for epoch in range(self.program.epochs):
            self.run.epochs.append([])
            self._set_epoch(epoch)
            self._batches = iter(self._loader)
            while self._step(epoch):
                pass
            self._batches = None
        self._draw()
        self._check_held(0)
        if hasattr(self._loader, "close"):
            self._loader.close()
        self._loader = None
        self._end_children()
        return self.run

    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch of Penstock's orders under torch's loader, which does not count epochs."""
        if self._makes is make_torchs:
            for order in (self._loader.sampler, self._loader.batch_sampler):
                if hasattr(order, "set_epoch"):
                    order.set_epoch(epoch)

    def _step(self, epoch: int) -> bool:
        """Take one batch. Returns False at the end of the epoch."""
        seen = self.run.epochs[-1]
        try:
            batch = next(self._batches)
        except StopIteration:
            return False
        except Exception as error:
            if isinstance(error, penstock.errors.PenstockError) and not _is_deserved(error):
                raise
            seen.append(describe_error(error))
            return sum(one[0] == "error" for one in seen) < MAX_ERRORS
        seen.append(describe(batch))
        if self.program.changes_batches:
            _zero(batch)
        if self.program.keep:
            self._held.append((batch, describe(batch)))
            self._check_held(self.program.keep)
        if self.program.draws_between:
            self._draw()
        due = [event for event in self.program.events if event[1:3] == (epoch, len(seen))]
        goes_on = True
        for event in due:
            self.run.num_done[event[0]] = self.run.num_done.get(event[0], 0) + 1
            goes_on = self._act(event, batch) and goes_on
        return goes_on

    def _draw(self) -> None:
        drawn = (random.random(), np.random.rand(), float(torch.rand(1)))
        self.run.drawn.append(drawn)

    def _check_held(self, num_left: int) -> None:
        """Check the batches that the loop releases."""
        while len(self._held) > num_left:
            batch, was = self._held.pop(0)
            now = describe(batch)
            if now != was:
                self.run.problems.append(f"a batch that is held changed: {was} became {now}")

    # -- events ------------------------------------------------------------------------------------

    def _act(self, event: Event, batch: Any) -> bool:
        """Perform the event. Returns False if the loop leaves the epoch."""
        kind = event[0]
        if kind == "kill":
            _kill_worker(self._batches)
        elif kind == "kill_server":
            _kill_server()
        elif kind == "fork":
            self._fork(batch)
        elif kind == "break":
            return False
        elif kind == "resume":
            return self._resume(event)
        return True

    def _resume(self, event: Event) -> bool:
        epoch = event[1]
        state = json.dumps(self._loader.state_dict())
        self._batches = None
        self._loader.close()
        program = self.program.having(num_workers=event[3])
        if not program.num_workers:
            program = program.having(
                pool="auto", start_method=None, prefetch_factor=None, persistent_workers=False
            )
        self._loader = self._makes(program, self._dataset)
        self._loader.load_state_dict(json.loads(state))
        if json.loads(state)["epoch"] > epoch:
            return False  # the last batch
        self._batches = iter(self._loader)
        return True

    def _fork(self, batch: Any) -> None:
        """Fork a child that holds the batch until the end of the run."""
        was = describe(batch)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(write_end)
                os.read(read_end, 1)
                status = 0 if describe(batch) == was else 3
            finally:
                os._exit(status)
        os.close(read_end)
        self._children.append((pid, write_end, len(self.run.epochs)))

    def _end_children(self) -> None:
        for pid, write_end, epoch in self._children:
            os.write(write_end, b"!")  # not just close: the next child inherited this end
            os.close(write_end)
            _, status = os.waitpid(pid, 0)
            if status:
                self.run.problems.append(
                    f"a child that the user forked in epoch {epoch - 1} found its batch changed "
                    f"(status {status})"
                )


def _zero(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for item in value.values():
            _zero(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _zero(item)


def _kill_worker(batches: Any) -> None:
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    alive = [worker.pid for worker in getattr(batches, "_workers", ()) if worker.pid in family]
    if alive:
        os.kill(alive[-1], signal.SIGKILL)


def _kill_server() -> None:
    pid = leftovers.fork_server_pid()
    if pid is not None and leftovers.is_running(pid):
        os.kill(pid, signal.SIGKILL)


def run(program: Program, makes: Any = make_ours) -> Run:
    """Run a program. The seeds are the same each time."""
    random.seed(31)
    np.random.seed(32)
    torch.manual_seed(33)
    folder = Path(tempfile.mkdtemp(prefix="programs-"))
    try:
        return Loop(program, makes, folder).go()
    finally:
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)
