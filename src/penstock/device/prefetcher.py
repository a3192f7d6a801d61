"""Batches on the GPU before they are asked for: copied on a stream of their own.

::

    host batch k+2 --copy stream: copy, finish, event--> k+1, k --> batch k, for whose event
    (kept until its event is over)                                  the step's stream waits

No thread: a copy is asked for in microseconds, and done by the GPU's copy engine beside the step.
What is handed out belongs to the stream that the user works on: ``record_stream`` keeps its memory
until that stream is done with it. Loading ahead is not delivering: what the loader counts (its
state, bad samples of iterable datasets) waits until the batch is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.device.device_errors import explained
from penstock.device.nested import change_tensors, tensors_in
from penstock.trace.gpu_events import GpuWatch

Effect = Callable[[], None]
Take = Callable[[], tuple[Any, list[Effect]]]
MOST_PER_CALL = 2
"""Batches sent ahead in one call, beyond the one that is needed: the first comes early."""


class _Sent(NamedTuple):
    batch: Any
    event: Any
    effects: list[Effect]


class DevicePrefetcher:
    """Brings batches to one device; see :class:`penstock.engine.parent.iterator.Prefetcher`.

    Args:
        device: Where to; with an index, for GPUs.
        depth: Batches that lie there ready at most, before they are asked for. Without streams
            of its own a device gains nothing by that.
        finish: Applied to each batch there, on the stream that copied it.
        keep: Called when a batch has tensors that could not be moved, and that the user may copy
            himself: their memory must be watched.
        watch: Notes when the copies ran.
    """

    def __init__(
        self,
        device: torch.device,
        depth: int,
        finish: Callable[[Any], Any] | None = None,
        keep: Callable[[], None] = lambda: None,
        watch: GpuWatch | None = None,
    ) -> None:
        self.device = device
        self._depth = depth if device.type == "cuda" else 0
        self._finish = finish
        self._keep = keep
        self._route: _Streamed | _Plain
        self._route = _Streamed(device, watch) if device.type == "cuda" else _Plain(device)
        self._sent: deque[_Sent] = deque()
        self._end: Exception | None = None

    def next(self, take: Take, is_ready: Callable[[], bool]) -> Any:
        """The next batch, on the device; others are sent off if that needs no waiting.

        Raises:
            StopIteration: As ``take`` did, after everything before it was handed out.
            DeviceFailed: The device did not take a batch.
        """
        if not self._sent:
            self._send(take)
        for _ in range(MOST_PER_CALL):
            if self._end is not None or len(self._sent) > self._depth or not is_ready():
                break
            self._send(take)
        if not self._sent:
            assert self._end is not None
            end, self._end = self._end, None
            try:
                raise end
            finally:
                del end  # its traceback would hold it, and it the traceback
        sent = self._sent.popleft()
        with explained(self.device, sent.batch):
            self._route.hand_over(sent.batch, sent.event)
        for effect in sent.effects:
            effect()
        return sent.batch

    def _send(self, take: Take) -> None:
        if self._end is not None:
            return
        try:
            batch, effects = take()
            moved, event = self._bring(batch)
        except StopIteration:
            self._end = StopIteration()  # without a traceback, which would hold the iterator
        except Exception as error:  # raised in its turn, after the batches before it
            self._end = error
        else:
            self._sent.append(_Sent(moved, event, effects))

    def _bring(self, batch: Any) -> tuple[Any, Any]:
        try:
            with explained(self.device, batch):
                moved, event = self._route.send(batch, self._finish)
                if any(tensor.device.type == "cpu" for tensor in tensors_in(moved)):
                    self._keep()
        except StopIteration as error:  # it would read as the end of the epoch
            raise RuntimeError("finish= raised StopIteration") from error
        return moved, event

    def reset(self) -> None:
        """Forget what was sent: a new epoch begins."""
        self._sent.clear()
        self._end = None
        self._route.reset()


class _Move:
    """How one tensor goes to the device."""

    def __init__(self, device: torch.device, *, non_blocking: bool) -> None:
        self.device = device
        self._non_blocking = non_blocking

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=self._non_blocking)


class _Plain:
    """CPU, MPS and whatever has no streams for us: the same face, without overlap."""

    def __init__(self, device: torch.device) -> None:
        self._move = _Move(device, non_blocking=False)

    def send(self, batch: Any, finish: Callable[[Any], Any] | None) -> tuple[Any, None]:
        moved = change_tensors(batch, self._move)
        return (moved if finish is None else finish(moved)), None

    def hand_over(self, batch: Any, event: None) -> None:
        """It is there."""

    def reset(self) -> None:
        """Nothing is under way."""


class _Streamed:
    """CUDA and HIP: a stream of our own, and an event for each batch."""

    def __init__(self, device: torch.device, watch: GpuWatch | None = None) -> None:
        self._device = device
        self._watch = watch
        self._num_sent = 0
        self._stream: Any = None
        self._move = _Move(device, non_blocking=True)
        self._under_way: deque[tuple[Any, Any]] = deque()

    def send(self, batch: Any, finish: Callable[[Any], Any] | None) -> tuple[Any, Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):  # and on its device
            copy = self._watch and self._watch.begin_copy(self._stream, self._num_sent)
            moved = arrays_apart(change_tensors(batch, self._move))
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
        self._under_way.append((event, batch))  # the slot stays until the copy is complete
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        return moved, event

    def hand_over(self, batch: Any, event: Any) -> None:
        stream = torch.cuda.current_stream(self._device.index)
        stream.wait_event(event)
        for tensor in tensors_in(batch):
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)

    def reset(self) -> None:
        """Batches are counted anew."""
        self._num_sent = 0


def arrays_apart(batch: Any) -> Any:
    """Arrays that stay on this side are copied: their slot goes back when the copy is complete."""
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if isinstance(batch, dict):
        for key, value in batch.items():
            batch[key] = arrays_apart(value)
    elif isinstance(batch, list):
        batch[:] = [arrays_apart(value) for value in batch]
    elif type(batch) is tuple:
        return tuple(arrays_apart(value) for value in batch)
    return batch
