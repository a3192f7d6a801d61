"""Copies batches to the GPU before they are requested, on a separate stream.

::

    host batch k+2 --copy stream: copy, finish, event--> k+1, k --> batch k: the step's stream
    (kept until its event completes)                                waits for its event

It uses no thread. Submitting a copy takes microseconds, and the GPU's copy engine runs it in
parallel with the step. A delivered batch belongs to the user's stream: ``record_stream`` keeps its
memory until that stream is done with it. Prefetching a batch does not deliver it: the loader's
counters (its state, bad samples of iterable datasets) change when the batch is delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.device.device_errors import explained_errors
from penstock.device.nested import copy_arrays, move_tensors, tensors_in
from penstock.trace.gpu_events import GpuWatch

Effect = Callable[[], None]
Take = Callable[[], tuple[Any, list[Effect]]]
MAX_PER_CALL = 2
"""Maximum number of batches to copy ahead in one call. The limit lets the first batch of an epoch
arrive early."""


class _InFlight(NamedTuple):
    batch: Any
    event: Any
    effects: list[Effect]


class DevicePrefetcher:
    """Copies batches to one device.

    Args:
        device: The target device. A GPU must have an index.
        depth: The most batches to copy before they are requested. Ignored for devices without
            streams, which would not benefit.
        finish: Applied to each batch on the device, on the stream that copied it.
        on_unmoved: Called if a batch has tensors that were not moved. The user may copy them, so
            their memory must be fenced.
        watch: Records when the copies ran.
    """

    def __init__(
        self,
        device: torch.device,
        depth: int,
        finish: Callable[[Any], Any] | None = None,
        on_unmoved: Callable[[], None] = lambda: None,
        watch: GpuWatch | None = None,
    ) -> None:
        self.device = device
        self._finish = finish
        self._on_unmoved = on_unmoved
        self._depth = 0
        self._copier: _StreamCopier | _DirectCopier = _DirectCopier(device)
        if device.type == "cuda":
            self._depth, self._copier = depth, _StreamCopier(device, watch)
        self._sent: deque[_InFlight] = deque()
        self._end: Exception | None = None

    def next(self, take: Take, is_ready: Callable[[], bool]) -> Any:
        """Return the next batch on the device. Starts further copies if that needs no waiting.

        Raises:
            StopIteration: ``take`` raised it, and all batches before it were delivered.
            DeviceFailed: A batch could not be copied to the device.
        """
        if not self._sent:
            self._send_next(take)
        for _ in range(MAX_PER_CALL):
            if self._end is not None or len(self._sent) > self._depth or not is_ready():
                break
            self._send_next(take)
        if not self._sent:
            assert self._end is not None
            end, self._end = self._end, None
            try:
                raise end
            finally:
                del end  # breaks the reference cycle with its traceback
        sent = self._sent.popleft()
        with explained_errors(self.device, sent.batch):
            self._copier.deliver(sent.batch, sent.event)
        for effect in sent.effects:
            effect()
        return sent.batch

    def _send_next(self, take: Take) -> None:
        if self._end is not None:
            return
        try:
            batch, effects = take()
            moved, event = self._copy(batch)
        except StopIteration:
            self._end = StopIteration()  # without a traceback, which would keep the iterator alive
        except Exception as error:  # raised after the batches before it
            self._end = error
        else:
            self._sent.append(_InFlight(moved, event, effects))

    def _copy(self, batch: Any) -> tuple[Any, Any]:
        try:
            with explained_errors(self.device, batch):
                moved, event = self._copier.send(batch, self._finish)
                if any(tensor.device.type == "cpu" for tensor in tensors_in(moved)):
                    self._on_unmoved()
        except StopIteration as error:  # would look like the end of the epoch
            raise RuntimeError("finish= raised StopIteration") from error
        return moved, event

    def reset(self) -> None:
        """Discard the batches in flight, at the start of a new epoch."""
        self._sent.clear()
        self._end = None
        self._copier.reset()


class _DirectCopier:
    """Copies batches to the CPU, MPS and other devices without streams, without overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: Any, finish: Callable[[Any], Any] | None) -> tuple[Any, None]:
        moved = move_tensors(batch, self._device)
        return (moved if finish is None else finish(moved)), None

    def deliver(self, batch: Any, event: None) -> None:
        """Do nothing: the batch is already on the device."""

    def reset(self) -> None:
        """Do nothing: no copy is in flight."""


class _StreamCopier:
    """Copies batches to CUDA and HIP devices, on a separate stream with an event per batch."""

    def __init__(self, device: torch.device, watch: GpuWatch | None = None) -> None:
        self._device = device
        self._watch = watch
        self._num_sent = 0
        self._stream: Any = None
        self._copying: deque[tuple[Any, Any]] = deque()

    def send(self, batch: Any, finish: Callable[[Any], Any] | None) -> tuple[Any, Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):  # also sets the current device
            copy = self._watch and self._watch.begin_copy(self._stream, self._num_sent)
            moved = copy_arrays(move_tensors(batch, self._device, non_blocking=True))
            if copy and self._watch:
                num_bytes = sum(t.nelement() * t.element_size() for t in tensors_in(moved))
            if finish is not None:
                moved = finish(moved)
            if copy and self._watch:
                event = self._watch.end_copy(copy, self._stream, num_bytes)
            else:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        self._num_sent += 1
        self._copying.append((event, batch))  # the slot stays until the copy is complete
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        return moved, event

    def deliver(self, batch: Any, event: Any) -> None:
        stream = torch.cuda.current_stream(self._device.index)
        stream.wait_event(event)
        for tensor in tensors_in(batch):
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)

    def reset(self) -> None:
        """Count batches from 0 again."""
        self._num_sent = 0
