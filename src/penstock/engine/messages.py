"""What crosses a pipe: leases to a worker, replies from it; plain tuples, a few bytes each.

    parent -> worker   [Lease | Fresh, ...]        load these parts, in this order; None: stop
    worker -> parent   Reply                       one per lease, at once
    worker -> parent   ("failed", report)          could not start at all
    worker -> parent   ("note", text)              something the user should know

The first page of the shared file is the control page: 64-bit cells that need no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.engine.memory import FileHandle
from penstock.engine.travel.parcel import Parcel

CONTROL_BYTES = 65536
CELLS_PER_WORKER = 8
EPOCH_CELL = 0
"""The epoch that counts now; a worker drops leases of another one. -1: stop."""
STOP = -1
NOTHING = -1


def position_cell(worker: int) -> int:
    """The control cell where a worker notes the position that it is loading (or NOTHING).

    The next cell says how many samples it loads at once: more than 1 with ``__getitems__``.
    """
    return CELLS_PER_WORKER * (1 + worker)


class Lease(NamedTuple):
    """One part of one batch for one worker: which samples, and where they belong."""

    epoch: int
    job: int
    part: int
    index: Any
    position: int
    rows: int
    first_row: int
    is_whole: bool
    segment: tuple[int, int]
    start: int
    slot_bytes: int
    key_epoch: int = 0
    """The epoch that randomness is computed for; ``epoch`` counts passes of the engine."""


class Fresh(NamedTuple):
    """A new epoch of persistent workers, with the seed that torch's DataPipes share."""

    epoch: int
    shared_seed: int


class Reply(NamedTuple):
    """What became of a lease.

    ``kind``: "fixed" (content: layout number, layout or None, filled rows, objects), "payload"
    (content: PayloadMap), "odd" (send it whole), "error" (content: ErrorReport), "end" (an iterable
    is exhausted), "dropped" (its epoch is over).
    """

    epoch: int
    job: int
    part: int
    kind: str
    content: Any
    needed_bytes: int
    busy_ns: int
    is_kept: bool = False
    state: Any = None
    """What an iterable dataset says of itself after this batch, where it has a state_dict."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker does, as plain values; travels once, inside the parcel's dataclass."""

    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    per_sample: bool
    base_seed: int
    shared_seed: int | None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Everything that makes a bare process into worker ``worker``."""

    worker: int
    num_workers: int
    task: Task
    parcel: Parcel
    memory: FileHandle
    surroundings: dict[str, Any]
