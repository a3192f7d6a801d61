"""Tracks which slots may still be read by processes that the user forked.

Slots are shared memory. A child that was forked while the user held a batch continues to see its
slot, so the slot is not reused until that child has exited or called exec.

    era 0       | fork | era 1            | fork | era 2
    lend slot A          lend slot B               slots A and B are returned
                                                   A waits for eras 0 and 1, B for era 1

Forks divide time into eras. Every child inherits the write end of a close-on-exec pipe. The next
era has its own pipe. The read end of the old pipe reports a hang-up once no child holds the pipe.

- The hook that counts forks is a C callable, because a KeyboardInterrupt in a Python hook would be
  lost.
- Forks are detected when a slot is lent or returned. After an interrupt at any point of
  :meth:`ForkWatch.era`, the next call detects them again.
- The number of open pipes is limited. With more eras, or when no descriptors are left, one pipe
  covers several eras. Slots then wait longer, but no slot is reused too early.
- A forked child opens its own pipes. It keeps its parent's pipes open, and so do its own children.

A fork by native code that bypasses Python is not detected.
"""

from __future__ import annotations

import functools
import os
import select
import threading
import weakref
from collections.abc import Iterable
from typing import NamedTuple, Protocol

_CAN_FORK = hasattr(os, "register_at_fork") and hasattr(select, "poll")
MAX_PIPES = 32
"""Maximum number of pipes for past eras. One more is open for the current era."""


class Eras(NamedTuple):
    """The eras from ``first`` up to, but not including, ``last``."""

    first: int
    last: int

    def overlaps(self, other: Eras) -> bool:
        return self.first < other.last and other.first < self.last


class SlotOwner(Protocol):
    """An owner of slots that forked children may read, such as a ring."""

    def eras_in_use(self) -> Iterable[Eras]:
        """Return the eras in which its slots were viewed. Open-ended for slots still in use."""


class _Pipe:
    """A pipe held open by the children of some eras. Without descriptors, it never ends."""

    __slots__ = ("first", "last", "read_fd", "write_fd")

    def __init__(self, first: int, fds: tuple[int, int]) -> None:
        self.first = self.last = first
        self.read_fd, self.write_fd = fds

    @property
    def eras(self) -> Eras:
        return Eras(self.first, self.last)

    def close_write(self) -> None:
        fd, self.write_fd = self.write_fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.close_write()
        fd, self.read_fd = self.read_fd, -1
        if fd >= 0:
            os.close(fd)


class ForkWatch:
    """Tracks the forks of one process. All methods are thread-safe.

    Example:
        >>> watch = ForkWatch()
        >>> before = watch.era()
        >>> watch.note_fork()  # the at-fork hook
        >>> watch.era() > before
        True
    """

    def __init__(self) -> None:
        self._forks: list[None] = []
        self.note_fork = functools.partial(self._forks.append, None)
        """The hook called before each fork of this process. It runs no Python code."""
        self.lock = threading.RLock()
        self._number = 0
        self._pipes: list[_Pipe] = []
        """The next fork inherits the last pipe."""
        self._owners: weakref.WeakSet[SlotOwner] = weakref.WeakSet()
        self._process = os.getpid()

    def add_owner(self, owner: SlotOwner) -> None:
        """Start watching forks for the slots of ``owner``."""
        with self.lock:
            self._owners.add(owner)
            self.era()
            self._close_unused(with_unwanted=True)
            if not self._pipes:
                self._pipes.append(_Pipe(self._number, _open_pipe() or (-1, -1)))

    def era(self) -> int:
        """Return the number of the current era. It changes after every fork."""
        if self._forks:
            self._begin_era()
        return self._number

    def living(self) -> list[Eras]:
        """Return the eras whose children may still be alive. Adjacent eras are merged."""
        with self.lock:
            self.era()
            self._close_unused(with_unwanted=False)
            if self._begin_pipe():
                self._close_unused(with_unwanted=False)
            living: list[Eras] = []
            for pipe in self._pipes:
                if living and pipe.first <= living[-1].last:
                    living[-1] = Eras(living[-1].first, pipe.last)
                elif pipe.last > pipe.first:
                    living.append(pipe.eras)
            return living

    @property
    def fds(self) -> list[int]:
        """The open descriptors of all pipes."""
        fds = [fd for pipe in self._pipes for fd in (pipe.read_fd, pipe.write_fd)]
        return [fd for fd in fds if fd >= 0]

    def _begin_era(self) -> None:
        with self.lock:
            num_forks = len(self._forks)
            if self._process != os.getpid():  # in a child: keep the parent's pipes open
                self._pipes, self._owners = [], weakref.WeakSet()
                self._process = os.getpid()
            self._number += 1
            if self._pipes:
                self._pipes[-1].last = self._number
                self._close_unused(with_unwanted=True)
                self._begin_pipe()
            del self._forks[:num_forks]

    def _begin_pipe(self) -> bool:
        """Open a pipe for the current era if it has none. Return True if one was opened."""
        if not self._pipes or self._pipes[-1].first == self._number:
            return False
        fds = _open_pipe() if len(self._pipes) <= MAX_PIPES else None
        if fds is None:
            return False
        self._pipes.append(_Pipe(self._number, fds))
        self._pipes[-2].close_write()
        return True

    def _close_unused(self, *, with_unwanted: bool) -> None:
        """Close pipes whose children are gone and, optionally, pipes that no slot waits for."""
        past = self._pipes[:-1]
        for pipe in past:
            pipe.close_write()  # in case an interrupt prevented it
        unused = _find_ended(past)
        if with_unwanted and past:
            wanted = [eras for owner in self._owners for eras in owner.eras_in_use()]
            unused += [pipe for pipe in past if not any(map(pipe.eras.overlaps, wanted))]
        for pipe in unused:
            if pipe in self._pipes:
                self._pipes.remove(pipe)
            pipe.close()


def _find_ended(pipes: list[_Pipe]) -> list[_Pipe]:
    """Return the pipes that no process holds open for writing."""
    by_fd = {pipe.read_fd: pipe for pipe in pipes if pipe.read_fd >= 0}
    if not by_fd:
        return []
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, event in poller.poll(0) if event & select.POLLHUP]


def _open_pipe() -> tuple[int, int] | None:
    """Return a new pipe, or None if no descriptors are left or the platform has no fork."""
    try:
        return os.pipe() if _CAN_FORK else None
    except OSError:
        return None


process_forks = ForkWatch()
if _CAN_FORK:
    os.register_at_fork(
        before=process_forks.note_fork,
        after_in_child=process_forks.lock._at_fork_reinit,  # type: ignore[attr-defined]
    )
