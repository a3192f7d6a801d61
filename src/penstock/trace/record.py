"""Trace records: one record of fixed size per span, in a ring buffer per process.

    worker 0   TraceBuffer ==+
    worker 1   TraceBuffer ==+== memory owned by the parent: the records survive a killed worker
    parent     TraceBuffer, private: batches, and ``penstock.span`` outside workers
                 |
                 +--> read_records(): plain records, the input of penstock.Timeline

All times come from one clock, ``time.perf_counter_ns``. On Linux that is CLOCK_MONOTONIC, on macOS
``mach_absolute_time``, on Windows QueryPerformanceCounter. Each is shared by all processes of a
machine and is independent of the date. Times of different machines cannot be compared.

A record is either written once, when its span ends, or written at the start and completed later.
In the second case, spans that never ended are visible. Recording a span takes well under two
microseconds. A full buffer is overwritten from its beginning, and the reader counts the records it
missed.

Called in any process that loads or trains. This module needs only the standard library.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import BadArgument
from penstock.named_tuple import NamedTuple

now_ns = time.perf_counter_ns


class Kind:
    """Kinds of records, and the meaning of their fields ``a``, ``b`` and ``extra``.

    These are plain integers, because reading a member of an ``IntEnum`` takes a tenth of the time
    of recording a span.
    """

    USER = 0
    """A user's ``penstock.span()``."""
    START = 1
    """A worker process starts. a: its pid."""
    LEASE = 2
    """A worker loads a part of a batch. a: CPU time in ns, b: ns waiting for a core, extra:
    microseconds spent copying into the slot. Each is -1 if not measured."""
    COLLATE = 3
    """The user's collate_fn, within a lease."""
    SAMPLE = 4
    """One ``dataset[i]``, within a lease. Recorded only on request."""
    TRANSFORM = 5
    """One transform of a ``Compose``. Recorded only on request."""
    BATCH = 6
    """The parent delivers a batch. a: ns spent waiting for it, b: time at which the previous batch
    was delivered, extra: microseconds spent copying batches to the device, part: batches ready."""
    LAUNCH = 7
    """The parent starts workers. a: their number."""
    MEMORY = 8
    """a: kB held, b: major page faults so far. In the parent also extra: MiB of free memory on the
    machine, rows: CPU time of the process in milliseconds."""
    REFUSED = 9
    """No slot was free for the next batch. a: slots held by the user."""
    COPY = 10
    """A batch is copied to the device, timed by the device. a: bytes."""
    GPU = 11
    """The device computes, timed by the device."""
    NETWORK = 12
    """Loading waits for a block from object storage."""
    DOWNLOAD = 13
    """A block is downloaded, by a process that all programs share. a: bytes."""


NUM_KINDS = Kind.DOWNLOAD + 1

RECORD = struct.Struct("<qqqqqHHHHiiii")
"""Number, start, end, a, b; kind, name, thread, part; pass, batch, rows, extra."""
_pack_into = RECORD.pack_into
_INT32 = struct.Struct("<i")
_HEADER_BYTES = 64
_HEAD, _NUM_NAMES = 0, 1
MAX_NAMES, _NAME_BYTES = 128, 64
RECORDS_AT = _HEADER_BYTES + MAX_NAMES * _NAME_BYTES
_FIRST_CELL = RECORDS_AT // 8
TRACE_BYTES = 256 << 10
"""About 4,000 records."""
ASKED_TRACE_BYTES = 4 << 20
"""About 65,000 records. Used when a trace is requested, so that fewer are missed between reads."""
OFF = "PENSTOCK_TRACE"
"""Environment variable. ``0`` turns all tracing off."""
NO_PLACE = (-1, -1, 0)
"""Epoch, batch and part of a record that belongs to no batch."""
CLOSE_LOOK_NS, EARLY_LOOKS, LATER_LOOK_NS = 50_000_000, 10, 250_000_000
"""Intervals between detailed measurements, which take 30 to 60 microseconds each. The first
``EARLY_LOOKS`` are at least ``CLOSE_LOOK_NS`` apart, the later ones ``LATER_LOOK_NS``."""
_F = TypeVar("_F", bound=Callable[..., Any])


class Record(NamedTuple):
    """One decoded record. ``end_ns`` is 0 if it has not ended. :class:`Kind` explains the rest."""

    kind: int
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    pass_: int = -1
    batch: int = -1
    part: int = 0
    rows: int = 0
    a: int = 0
    b: int = 0
    extra: int = 0


class TraceBuffer:
    """Ring buffer with the records of one writer, which other processes can read at any time.

    Args:
        memory: The buffer's memory: zeros, or the buffer of the worker that this one replaces.

    Called in the process that writes. Readers use :func:`read_records`.

    Example:
        >>> buffer = TraceBuffer(bytearray(TRACE_BYTES))
        >>> number = buffer.add(Kind.BATCH, 100, 250, batch=3, rows=8)
        >>> spans, head = read_records(buffer.memory, 0)
        >>> spans[0].batch, spans[0].end_ns - spans[0].start_ns, head
        (3, 150, 1)
    """

    __slots__ = ("capacity", "cells", "memory", "names", "next_number", "place")

    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory).cast("B")
        self.cells = self.memory[: self.memory.nbytes // 8 * 8].cast("q")
        self.capacity = (self.memory.nbytes - RECORDS_AT) // RECORD.size
        self.next_number = itertools.count(self.cells[_HEAD]).__next__
        self.names = {name: number for number, name in enumerate(_read_names(self.memory), 1)}
        self.place = NO_PLACE
        """Epoch, batch and part of the user's spans."""

    def add(
        self,
        kind: int,
        start_ns: int,
        end_ns: int,
        pass_: int = -1,
        batch: int = -1,
        part: int = 0,
        rows: int = 0,
        a: int = 0,
        b: int = 0,
        extra: int = 0,
        name: int = 0,
        thread: int = 0,
    ) -> int:
        """Record a span and return its number. An ``end_ns`` of 0 means that it has not ended."""
        number = self.next_number()
        at = RECORDS_AT + number % self.capacity * 64
        # fmt: off
        _pack_into(self.memory, at, number, start_ns, end_ns, a, b, kind, name, thread, part,
                   pass_, batch, rows, extra)
        # fmt: on
        self.cells[0] = number + 1  # last, so that readers never see a partial record
        return number

    def end(self, number: int, end_ns: int, a: int = 0, b: int = 0) -> None:
        """Complete a span, unless it has been overwritten."""
        cell = _FIRST_CELL + number % self.capacity * 8
        cells = self.cells
        if cells[cell] == number:
            if a or b:
                cells[cell + 3], cells[cell + 4] = a, b
            cells[cell + 2] = end_ns

    def set_extra(self, number: int, extra: int) -> None:
        """Set the ``extra`` field of a record."""
        at = RECORDS_AT + number % self.capacity * RECORD.size
        _INT32.pack_into(self.memory, at + RECORD.size - 4, min(max(extra, -1), 2**31 - 1))

    def set_rows(self, number: int, rows: int) -> None:
        """Correct the number of samples of a record."""
        at = RECORDS_AT + number % self.capacity * RECORD.size
        _INT32.pack_into(self.memory, at + RECORD.size - 8, rows)

    def copy_to(self, fd: int, offset: int, since: int) -> int:
        """Copy the records from number ``since`` on to the same places in a file.

        Returns the next number. Records that ended after they were copied stay open in the copy.
        """
        head = self.cells[_HEAD]
        first = max(since, head - self.capacity)
        os.pwrite(fd, self.memory[8:RECORDS_AT], offset + 8)
        while first < head:
            place = first % self.capacity
            count = min(head - first, self.capacity - place)
            at = RECORDS_AT + place * RECORD.size
            os.pwrite(fd, self.memory[at : at + count * RECORD.size], offset + at)
            first += count
        os.pwrite(fd, head.to_bytes(8, "little"), offset)
        if not since:
            os.ftruncate(fd, offset + self.memory.nbytes)
        return head

    def name(self, text: str) -> int:
        """Return the number of a name, adding it to the table. Returns 0 if the table is full."""
        number = self.names.get(text)
        if number is not None:
            return number
        number = len(self.names) + 1
        if number > MAX_NAMES:
            return 0
        raw = str(text).encode("utf-8", "replace")[: _NAME_BYTES - 1]
        at = _HEADER_BYTES + (number - 1) * _NAME_BYTES
        self.memory[at : at + 1 + len(raw)] = bytes([len(raw)]) + raw
        self.names[text] = number
        self.cells[_NUM_NAMES] = number
        return number


def next_look_ns(at_ns: int, num_looks: int) -> int:
    """Return when the next detailed measurement is due, after ``num_looks`` of them."""
    return at_ns + (CLOSE_LOOK_NS if num_looks < EARLY_LOOKS else LATER_LOOK_NS)


def read_records(memory: Any, since: int) -> tuple[list[Record], int]:
    """Return the records from number ``since`` on, oldest first, and the next number.

    Records that were overwritten are missing. Called in any process that maps the memory.
    """
    view = memoryview(memory).cast("B")
    head = view[:8].cast("q")[0]
    capacity = (view.nbytes - RECORDS_AT) // RECORD.size
    names = ["", *_read_names(view)]
    found: list[Record] = []
    first = max(since, head - capacity, 0)
    while first < head:  # up to the end of the memory, then from its beginning
        place = first % capacity
        last = min(head, first + capacity - place)
        at = RECORDS_AT + place * RECORD.size
        raw = RECORD.iter_unpack(view[at : at + (last - first) * RECORD.size])
        for number, fields in zip(range(first, last), raw, strict=True):
            # fmt: off
            written, start_ns, end_ns, a, b, kind, name, thread, part, pass_, batch, rows, extra = (
                fields)
            if written != number or kind >= NUM_KINDS or start_ns <= 0:
                continue  # overwritten during the read, or never written
            text = names[name] if name < len(names) else ""
            found.append(Record(kind, text, start_ns, end_ns, thread, pass_, batch, part, rows,
                                a, b, extra))
            # fmt: on
        first = last
    return found, head


def first_since(memory: Any, since_ns: int) -> int:
    """Return the number of the first record that may have ended after ``since_ns``."""
    view = memoryview(memory).cast("B")
    number = head = view[:8].cast("q")[0]
    capacity = (view.nbytes - RECORDS_AT) // RECORD.size
    oldest = max(0, head - capacity)
    while number > oldest:
        number = max(oldest, number - 64)
        at = RECORDS_AT + number % capacity * RECORD.size
        found, _, end_ns = RECORD.unpack_from(view, at)[:3]
        if found == number and 0 < end_ns < since_ns:
            return number
    return oldest


def start_of_last(memory: Any, num_records: int) -> int:
    """Return when the last ``num_records`` records start, or 0 if there are fewer."""
    view = memoryview(memory).cast("B")
    head = view[:8].cast("q")[0]
    capacity = (view.nbytes - RECORDS_AT) // RECORD.size
    if head < num_records or num_records >= capacity:
        return 0
    at = RECORDS_AT + (head - num_records) % capacity * RECORD.size
    return int(RECORD.unpack_from(view, at)[1])


def _read_names(view: memoryview) -> list[str]:
    count = view[8:16].cast("q")[0]
    found = []
    for number in range(min(max(count, 0), MAX_NAMES)):
        at = _HEADER_BYTES + number * _NAME_BYTES
        raw = bytes(view[at + 1 : at + 1 + view[at]])
        found.append(raw.decode("utf-8", "replace"))
    return found


# -- the buffer of each process and thread ---------------------------------------------------------


class _ThreadBuffer(threading.local):
    writer: tuple[TraceBuffer | None, int] | None = None
    """The thread's buffer and the thread's number in it, or None if not yet assigned."""


_thread_buffer = _ThreadBuffer()
_process_buffer: TraceBuffer | None = None
_thread_numbers = itertools.count()


def is_on() -> bool:
    """Return True unless the environment turns tracing off."""
    return os.environ.get(OFF) != "0"


def enter_process(buffer: TraceBuffer | None) -> None:
    """Set the buffer of this process. Called once, in a worker process."""
    global _process_buffer
    _process_buffer = buffer
    enter_thread(buffer)


def enter_thread(buffer: TraceBuffer | None) -> None:
    """Set the buffer of this thread. Called once, in a worker thread."""
    _thread_buffer.writer = buffer, 0


def process_buffer() -> TraceBuffer | None:
    """Return the buffer of this process for spans outside workers.

    Returns None if nothing was recorded or tracing is off.
    """
    return _process_buffer


def _register_thread() -> tuple[TraceBuffer | None, int]:
    """Assign a buffer to this thread, for its first span outside workers."""
    global _process_buffer
    if _process_buffer is None and is_on():
        _process_buffer = TraceBuffer(bytearray(ASKED_TRACE_BYTES // 4))
    _thread_buffer.writer = _process_buffer, next(_thread_numbers) % 65536
    return _thread_buffer.writer


if hasattr(os, "register_at_fork"):
    # A child forked by the user must not write to its parent's buffer. These hooks run no Python
    # code, because a Ctrl-C during it would be lost.
    for owner, name in ((sys.modules[__name__], "_process_buffer"), (_thread_buffer, "writer")):
        os.register_at_fork(after_in_child=functools.partial(setattr, owner, name, None))


def _as_name(value: Any) -> str:
    if callable(value):  # @span without a name, which would never call the function
        name = getattr(value, "__name__", "part")
        raise BadArgument(
            f"penstock.span needs a name, but got the callable {name}",
            remedy=f'@penstock.span("{name}")',
        )
    return str(value)


class span:
    """Times a part of your own code, in the training loop or inside ``dataset[i]``.

    The span appears in the timeline under its name, in the lane of the process or thread that ran
    it. As a decorator, it times each call.

    Example:
        >>> import penstock
        >>> with penstock.span("decode"):
        ...     pass
        >>> @penstock.span("augment")
        ... def augment(image):
        ...     return image
        >>> augment(3)
        3
    """

    __slots__ = ("_buffer", "_kind", "_name", "_number")

    def __init__(self, name: str, *, kind: int = Kind.USER) -> None:
        self._name = name if type(name) is str else _as_name(name)
        self._kind = kind

    def __enter__(self) -> span:
        writer = _thread_buffer.writer
        if writer is None:
            writer = _register_thread()
        buffer = self._buffer = writer[0]
        if buffer is not None:
            name = buffer.names.get(self._name)
            if name is None:
                name = buffer.name(self._name)
            pass_, batch, part = buffer.place
            # TraceBuffer.add(), inlined: the call would be a fifth of the cost of a span.
            number = self._number = buffer.next_number()
            at = RECORDS_AT + number % buffer.capacity * 64
            # fmt: off
            _pack_into(buffer.memory, at, number, now_ns(), 0, 0, 0, self._kind, name, writer[1],
                       part, pass_, batch, 0, 0)
            # fmt: on
            buffer.cells[0] = number + 1
        return self

    def __exit__(self, *_: object) -> None:
        buffer = self._buffer
        if buffer is not None:
            number = self._number
            cell = _FIRST_CELL + number % buffer.capacity * 8
            if buffer.cells[cell] == number:
                buffer.cells[cell + 2] = now_ns()

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with span(self._name, kind=self._kind):
                return function(*arguments, **keywords)

        return timed  # type: ignore[return-value]
