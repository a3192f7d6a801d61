"""num_workers="auto" changes the number of workers during an epoch. The batches stay the same."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.engine.parent import resizing
from penstock.engine.parent.fork_server import ForkServer
from penstock.engine.parent.resizing import ResizingProducer
from penstock.machine.collect import quick_facts
from penstock.machine.host import busy_s_of
from support.datasets import assert_same, collect, draw

needs_cores = pytest.mark.skipif(
    quick_facts().usable_cores < 2 or not busy_s_of(os.getpid()), reason="one core, or no schedstat"
)


class Changing(Dataset):
    """Samples that wait ``before_s``, and from index ``at`` on ``after_s``."""

    def __init__(self, length: int, at: int, before_s: float, after_s: float) -> None:
        self.length, self.at, self.before_s, self.after_s = length, at, before_s, after_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.before_s if index < self.at else self.after_s)
        return draw(index)


class Still(Changing):
    def __getitem__(self, index: int) -> Any:
        return draw(index)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "WINDOW_S", 0.2)
    monkeypatch.setattr(resizing, "MIN_BATCHES", 2)


def loader_with(num_workers: int, data: Changing) -> DataLoader[Any]:
    """Return a loader whose first measurement was wrong: it chose ``num_workers``."""
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=4, num_workers="auto")
    loader._measured = {"sample_s": 0.002, "busy_share": 0.02, "tuned": (num_workers, "wrong")}
    loader._settle(loader._settings(loader.plan))
    return loader


def expected(data: Changing) -> list[Any]:
    torch.manual_seed(0)
    return collect(DataLoader(Still(data.length, 0, 0, 0), batch_size=4))


def take_until_changed(
    loader: DataLoader[Any],
    num_workers: int,
    *,
    reason: str = "",
    step_s: float = 0.0,
    num_more: int = 20,
) -> tuple[list[Any], list[Any]]:
    """Take batches until the number of workers has changed for a reason, and ``num_more`` more.

    Returns them, and the choices up to that change.
    """
    batches, choices, num_after, limit_s = [], [], 0, time.monotonic() + 240
    for batch in loader:
        batches.append(batch)
        if not choices or choices[-1].value == num_workers or reason not in choices[-1].reason:
            choices.append(loader.plan.num_workers)
        else:
            num_after += 1
        if num_after == num_more or time.monotonic() > limit_s:
            break
        time.sleep(step_s)
    return batches, choices


@pytest.mark.slow
@needs_cores
def test_workers_are_added_when_samples_begin_to_wait() -> None:
    data = Changing(4_000, 200, 0.002, 0.05)
    loader = loader_with(1, data)
    # On a busy machine, a second worker may be tried before, because batches take long.
    batches, choices = take_until_changed(loader, 1, reason="samples wait")
    assert_same(collect(batches), expected(data)[: len(batches)])
    assert choices[0].value == 1
    assert choices[-1].value > 1
    assert "samples wait" in choices[-1].reason
    spans = [span for lane in loader.timeline().lanes for span in lane.spans]
    shown = [span.name for span in spans if "auto: " in span.name]
    assert shown
    assert all("workers, samples wait" in name for name in shown)


@pytest.mark.slow
@needs_cores
def test_workers_are_removed_when_samples_no_longer_wait() -> None:
    data = Changing(10_000, 0, 0, 0.001)
    loader = loader_with(16, data)
    # One worker is enough for the training step.
    batches, choices = take_until_changed(loader, 16, step_s=0.1)
    assert choices[0].value == 16
    assert choices[-1].value < 16
    assert_same(collect(batches), expected(data)[: len(batches)])


class Bounded(Still):
    """A server that answers one request at a time, however many clients there are."""

    def __init__(self, length: int, file: Any) -> None:
        super().__init__(length, 0, 0, 0)
        self.file = str(file)

    def __getitem__(self, index: int) -> Any:
        import fcntl

        with open(self.file, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.02)
        return draw(index)


@pytest.mark.slow
@needs_cores
def test_numbers_that_are_tried_and_taken_back_change_no_batch(tmp_path: Any) -> None:
    data = Bounded(2_500, tmp_path / "server")
    loader = loader_with(1, data)
    batches, choices = take_until_changed(loader, 1, num_more=60)
    assert_same(collect(batches), expected(data)[: len(batches)])
    assert choices[-1].value > 1


def watched(data: Changing) -> tuple[DataLoader[Any], Iterator[tuple[Any, ResizingProducer]]]:
    """Return a loader with one worker, and its batches with the producer."""
    loader = loader_with(1, data)

    def batches() -> Iterator[tuple[Any, Any]]:
        batches = iter(loader)
        for batch in batches:
            inner: Any = batches
            yield batch, inner._producer

    return loader, batches()


@pytest.mark.slow
@needs_cores
def test_workers_that_cannot_be_started_leave_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = Changing(4_000, 200, 0.002, 0.05)
    loader, watched_batches = watched(data)
    fork, batches, limit_s = ForkServer.fork, [], time.monotonic() + 240

    def fail(self: ForkServer, *given: Any) -> Any:
        if threading.current_thread().name == "penstock-start-workers":
            raise OSError(errno.EAGAIN, "no more processes")
        return fork(self, *given)

    def is_noted() -> bool:
        return any("could not be started" in note for note in loader.plan.notes)

    monkeypatch.setattr(ForkServer, "fork", fail)
    for batch, producer in watched_batches:
        batches.append(batch)
        if (is_noted() and producer._next is None) or time.monotonic() > limit_s:
            break
    assert is_noted()
    assert loader.plan.num_workers.value == 1
    batches += [batch for (batch, _), _ in zip(watched_batches, range(8), strict=False)]
    assert_same(collect(batches), expected(data)[: len(batches)])


@pytest.mark.slow
@needs_cores
def test_an_epoch_left_while_workers_start_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, forked = ForkServer.fork, list[Any]()
    has_forked, has_left = threading.Event(), threading.Event()

    def fork_and_wait(self: ForkServer, *given: Any) -> Any:
        process = fork(self, *given)
        if threading.current_thread().name == "penstock-start-workers":
            forked.append(process)
            has_forked.set()
            has_left.wait(240)
        return process

    monkeypatch.setattr(ForkServer, "fork", fork_and_wait)
    _, batches = watched(Changing(4_000, 200, 0.002, 0.05))
    for _, producer in batches:
        if producer._next is not None:
            break
    assert has_forked.wait(240)
    start, pool = producer._next._start, producer._next._pool  # type: ignore[union-attr]
    del producer, batches
    assert pool._is_stopped
    has_left.set()
    start._thread.join(240)  # type: ignore[union-attr]
    limit_s = time.monotonic() + 240
    while forked[0].is_alive() and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert not forked[0].is_alive()
    assert len(forked) == 1 < pool._num_workers  # type: ignore[union-attr]  # it did not go on


class Epochs(Changing):
    """Samples whose wait can be changed between epochs."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.before_s)
        return draw(index)


@pytest.mark.slow
@needs_cores
@pytest.mark.parametrize("is_persistent", [False, True])
def test_epochs_shorter_than_a_window_count_together(
    monkeypatch: pytest.MonkeyPatch, is_persistent: bool
) -> None:
    monkeypatch.setattr(resizing, "WINDOW_S", 1e9)
    data = Epochs(32, 0, 0.05, 0)
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=4, num_workers="auto", persistent_workers=is_persistent)
    # The first measurement is wrong: one worker seems to be enough.
    loader._measured = {"sample_s": 0.002, "busy_share": 0.02, "tuned": (1, "wrong")}
    loader._settle(loader._settings(loader.plan))
    numbers = []
    for epoch in range(60):
        collect(loader)
        numbers.append(loader.num_workers)
        if numbers[-1] > 1:
            break
        if epoch == 0:  # from now on, a window has two epochs, however long they are
            carried = loader._tuning.carried
            assert carried.num_batches == len(loader)
            monkeypatch.setattr(resizing, "WINDOW_S", 2 * carried.wall_s)
    assert numbers[0] == 1
    assert numbers[-1] > 1
    data.before_s = 0.0
    assert len(list(loader)) == 8
    assert len(loader.timeline().lanes) > numbers[-1]
    loader.close()


@pytest.mark.legacy
@needs_cores
def test_a_given_number_stays() -> None:
    data = Changing(200, 100, 0.001, 0.01)
    loader = DataLoader(data, batch_size=4, num_workers=2)
    for _ in loader:
        assert loader.num_workers == 2
