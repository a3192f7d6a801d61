"""``penstock.to_device``: moves the batches of any iterable to a device.

::

    a thread                                    the caller's thread
    next(iterable), pinned  -- queue -->  copied ahead, on a separate stream --> step

``DataLoader(device=)`` needs no thread, because its workers already load ahead.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.device.nested import map_tensors
from penstock.device.on_demand_thread import WAIT_AT_EXIT_S
from penstock.device.prefetcher import DevicePrefetcher
from penstock.device.setup import resolve
from penstock.errors import DeviceFailed
from penstock.options import check_device, check_finish, check_prefetch

_POLL_S = 1.0


def to_device(
    iterable: Iterable[Any],
    device: Any,
    *,
    prefetch: int = 2,
    finish: Callable[[Any], Any] | None = None,
) -> DeviceIterable:
    """Wrap an iterable of batches, and copy its batches to ``device`` ahead of the training step.

    A thread fetches and pins the batches. Copies run on a separate stream. An exception from the
    iterable is raised after the batches before it, with its own traceback.

    Args:
        iterable: Any kind of loader. Each ``for`` loop iterates it again.
        prefetch: Number of batches to copy to the device before they are requested.
        finish: Applied to each batch on the device; see :func:`penstock.finish`.

    Example:
        >>> import torch, penstock
        >>> batches = [torch.zeros(2), torch.ones(2)]
        >>> for batch in penstock.to_device(batches, "cpu"):
        ...     print(batch.device, batch.tolist())
        cpu [0.0, 0.0]
        cpu [1.0, 1.0]
    """
    depth = check_prefetch("prefetch", prefetch)
    checked_finish = check_finish("finish", finish)
    return DeviceIterable(iterable, check_device("device", device), depth, checked_finish)


@dataclass(eq=False, repr=False)
class DeviceIterable:
    """The batches of an iterable on a device. Created by :func:`to_device`.

    It can be iterated repeatedly if the iterable can.
    """

    iterable: Iterable[Any]
    device: torch.device
    prefetch: int
    finish: Callable[[Any], Any] | None

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        device = resolve(self.device)
        prefetcher = DevicePrefetcher(device, self.prefetch, self.finish)
        fetcher = _FetchThread(iter(self.iterable), self.prefetch, device)
        try:
            while True:
                try:
                    batch = prefetcher.next(fetcher.take, fetcher.is_ready)
                except StopIteration:
                    return
                yield batch
        finally:
            fetcher.stop()


class _FetchThread:
    """A thread that fetches and pins batches until :meth:`stop` is called."""

    def __init__(self, batches: Iterator[Any], depth: int, device: torch.device) -> None:
        self._fetched: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._is_wanted = True
        self._thread = threading.Thread(
            target=self._run, args=(batches, device), name="penstock-to-device", daemon=True
        )
        _all.add(self)
        # Handlers run in reverse order. Registering again makes this one run before a loader stops
        # its workers, because the thread may be waiting for a batch from them.
        atexit.unregister(_wait_for_all)
        atexit.register(_wait_for_all)
        self._thread.start()

    def take(self) -> tuple[Any, list[Callable[[], None]]]:
        while True:
            try:
                batch, error = self._fetched.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if not self._thread.is_alive() and self._fetched.empty():
                    raise DeviceFailed(
                        "the thread that fetches batches for the device has exited",
                        likely="the interpreter is shutting down",
                    ) from None
        if error is not None:
            raise error
        return batch, []

    def is_ready(self) -> bool:
        return not self._fetched.empty()

    def _run(self, batches: Iterator[Any], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            for batch in batches:
                if not self._put(_pinned(batch, device), None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:
            self._put(None, error)
        finally:
            del batches

    def _put(self, batch: Any, error: BaseException | None) -> bool:
        while self._is_wanted and not sys.is_finalizing():
            try:
                self._fetched.put((batch, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def stop(self) -> None:
        """Stop the thread after the batch that it is fetching."""
        self._is_wanted = False
        while not self._fetched.empty():
            self._fetched.get()

    def wait(self, until_s: float) -> None:
        """Wait for the thread until it exits, or until the time ``until_s``."""
        self._thread.join(max(0.0, until_s - time.monotonic()))


_all: weakref.WeakSet[_FetchThread] = weakref.WeakSet()


def _wait_for_all() -> None:
    """Stop and join all fetch threads. Called at exit.

    A thread that returns from torch after the interpreter has shut down aborts the process.
    """
    until_s = time.monotonic() + WAIT_AT_EXIT_S
    fetchers = list(_all)
    for fetcher in fetchers:
        fetcher.stop()
    for fetcher in fetchers:
        fetcher.wait(until_s)


def _pinned(batch: Any, device: torch.device) -> Any:
    """Return the batch in pinned memory, so that its copy can overlap the training step."""
    if device.type != "cuda":
        return batch
    return map_tensors(batch, _pin)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    can = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if can else tensor
