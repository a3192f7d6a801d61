"""Hung samples are detected in time, reported with a stack, and replaced. Slow ones are not."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.engine.parent import restarts as recovery
from penstock.errors import SampleTimeout, WorkerTimeout
from support import worker_faults
from support.datasets import PROCESS_WAYS, WAYS, Slow, assert_same, collect, differences
from support.worker_faults import HANGS, Fateful, FatefulBatches, FatefulStream, Log

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

LIMIT_S = 0.8
NAMED_WITHIN_S = 60.0
"""Far below the time for which samples hang, far above the time that a busy machine needs."""


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "met")


Told = Callable[[], list[logging.LogRecord]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """Messages logged so far."""
    caplog.set_level(logging.WARNING, "penstock")
    return lambda: caplog.get_records("call")


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, **arguments}
    return collect(DataLoader(dataset, **arguments))


@pytest.mark.legacy
@pytest.mark.parametrize(
    ("name", "way"), [*((name, "forkserver") for name in HANGS), ("C", "fork"), ("lock", "fork")]
)
def test_a_hang_is_named_with_its_stack_in_time_and_changes_nothing(
    name: str, way: str, log: Log, told: Told
) -> None:
    dataset = Fateful({13: name}, log)
    found = batches(dataset, sample_timeout_s=LIMIT_S, **WAYS[way])
    assert_same(found, batches(Fateful()))
    (record,) = told()
    text = record.getMessage()
    assert "sample 13" in text
    first_line, *rest = [line for line in text.splitlines() if line.startswith("  File")]
    assert first_line.endswith(f" in {HANGS[name].__name__}")
    assert worker_faults.__file__ in first_line
    assert any(line.endswith("in __getitem__") for line in rest)
    assert "penstock/engine" not in text
    assert record.created - os.stat(log.path).st_mtime < NAMED_WITHIN_S


def test_another_seed_is_told_apart() -> None:
    assert differences(batches(Fateful(), seed=4), batches(Fateful()))


@pytest.mark.parametrize(
    ("kind", "name"), [(Fateful, "C"), (Fateful, "until disturbed"), (FatefulBatches, "C")]
)
def test_the_second_hang_at_a_sample_is_an_error_that_has_it_all(
    kind: Any, name: str, log: Log
) -> None:
    with pytest.raises(SampleTimeout) as info:
        batches(kind({13: name}, log, times=99), num_workers=2, sample_timeout_s=LIMIT_S)
    facts: Any = info.value
    assert isinstance(facts, RuntimeError)
    named = facts.sample_index if isinstance(facts.sample_index, list) else [facts.sample_index]
    assert 13 in named
    assert LIMIT_S < facts.seconds < NAMED_WITHIN_S
    assert f" in {HANGS[name].__name__}\n" in facts.stack
    assert facts.stack in str(facts)
    assert log.lines == ["13", "13"]


@pytest.mark.parametrize(
    ("kind", "on_error"), [(Fateful, "skip"), (Fateful, "replace"), (FatefulBatches, "skip")]
)
def test_a_sample_that_always_hangs_is_left_out_or_replaced(
    kind: Any, on_error: str, log: Log
) -> None:
    loader = DataLoader(
        kind({13: "sleep"}, log, times=99),
        batch_size=4,
        num_workers=2,
        on_error=on_error,
        sample_timeout_s=LIMIT_S,
    )
    for _ in range(2):
        indices = torch.cat([batch[:, 0] for batch in loader]).tolist()
        if on_error == "skip":
            assert indices == [*range(13), *range(14, 48)]
        else:
            assert indices[:13] + indices[14:] == [*range(13), *range(14, 48)]
            assert indices[13] != 13
    assert [(one.index, one.count) for one in loader.bad_samples] == [(13, 2)]
    assert "SampleTimeout" in loader.bad_samples[0].error
    # Twice, plus twice more alone with __getitems__. Never in the second epoch.
    assert len(log.lines) == (2 if kind is Fateful else 4)


def test_a_stream_that_hangs_goes_on_and_is_an_error_the_second_time(log: Log) -> None:
    stream = FatefulStream({13: "sleep"}, log)
    loader = DataLoader(stream, batch_size=2, num_workers=2, sample_timeout_s=LIMIT_S)
    found = torch.cat(collect(loader))[:, 0]
    assert sorted(found.tolist()) == [*range(40)]
    stream.fate.times = 99
    with pytest.raises(SampleTimeout, match="in hang"):
        collect(loader)


def test_a_collate_fn_that_hangs_is_replaced_and_the_second_time_an_error(log: Log) -> None:
    def collate(samples: list[Any]) -> Any:
        if any(int(sample[0]) == 20 for sample in samples) and len(log.lines) < times:
            log.add("met")
            worker_faults.hang()
        return torch.stack(samples)

    times, arguments = 1, {"num_workers": 2, "collate_fn": collate, "sample_timeout_s": LIMIT_S}
    assert_same(batches(Fateful(), **arguments), batches(Fateful()))
    times = 99
    with pytest.raises(SampleTimeout, match="in hang") as info:
        batches(Fateful(), **arguments)
    assert info.value.sample_index is None  # type: ignore[attr-defined]


# -- not a hang ------------------------------------------------------------------------------------


def test_samples_below_the_limit_are_left_alone(told: Told) -> None:
    loader = DataLoader(Slow(8, sample_s=0.9), batch_size=4, num_workers=2, sample_timeout_s=3.0)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not told()  # although each batch took longer than the sample limit


def test_a_slow_consumer_is_not_blamed_on_the_workers(told: Told) -> None:
    loader = DataLoader(Slow(6), batch_size=2, num_workers=2, sample_timeout_s=2.0)
    for _ in loader:
        time.sleep(2.2)
    assert not told()


def test_without_workers_nobody_looks_which_is_said() -> None:
    with pytest.warns(
        UserWarning, match="sample_timeout_s has no effect.* Use num_workers=1 or more"
    ):
        assert len(collect(DataLoader(Slow(2, sample_s=0.3), sample_timeout_s=0.1))) == 2


def test_without_a_limit_nothing_is_ended(told: Told) -> None:
    assert len(collect(DataLoader(Slow(2, sample_s=0.7), num_workers=2))) == 2
    assert not told()


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()  # nothing else can end the thread


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_thread_that_hangs_cannot_be_replaced_and_is_named_at_once(
    on_error: str, release: threading.Event
) -> None:
    class Blocked(Fateful):
        def __getitem__(self, index: int) -> int:
            if index == 13:
                release.wait()
            return index

    loader = DataLoader(
        Blocked(),
        batch_size=4,
        num_workers=2,
        pool="thread",
        sample_timeout_s=LIMIT_S,
        on_error=on_error,
    )
    with pytest.raises(SampleTimeout, match="sample 13") as info:
        collect(loader)
    assert " in __getitem__" in info.value.stack  # type: ignore[attr-defined]
    assert "process" in str(info.value)  # suggests processes, which can be replaced


# -- timeout= --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*PROCESS_WAYS, "thread"])
def test_a_batch_that_is_late_is_an_error_with_the_stacks(way: str) -> None:
    loader = DataLoader(Slow(40, stuck=13, stuck_s=4.0), batch_size=4, timeout=1.5, **WAYS[way])
    with pytest.raises(WorkerTimeout, match="sample 13") as info:
        collect(loader)
    assert "in __getitem__" in str(info.value)
    assert 13 in info.value.samples.values()  # type: ignore[attr-defined]


# -- workers stopped by a signal -------------------------------------------------------------------


def few_ahead(**arguments: Any) -> Any:
    """Return a loader with most batches still to load when its workers are idle."""
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, "prefetch_factor": 1, **arguments}
    return DataLoader(Fateful(), **arguments)


def wait_until_idle(iterator: Any) -> None:
    """Wait until the workers have loaded all batches that they were given."""
    dispatcher = iterator._producer.dispatcher
    limit_s = time.monotonic() + 240
    while any(map(dispatcher._lease_queue.owed, range(2))) and time.monotonic() < limit_s:
        dispatcher._hear(0.01)
    assert not dispatcher._lease_queue.has_owed


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_an_idle_worker_that_was_stopped_is_replaced(
    way: str, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setattr(recovery, "OWN_LIMIT_S", 3.0)
    iterator = iter(few_ahead(**WAYS[way]))
    found = [next(iterator).clone()]
    wait_until_idle(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGSTOP)
    started = time.monotonic()
    found += [batch.clone() for batch in iterator]
    assert time.monotonic() - started > 2.9
    assert_same(found, batches(Fateful()))
    (record,) = told()
    assert "has not started its work" in record.getMessage()
    assert "T (stopped)" in record.getMessage()


def test_a_stopped_worker_that_goes_on_in_time_is_left_alone(
    told: Told,
) -> None:
    iterator = iter(few_ahead(num_workers=2))
    found = [next(iterator).clone()]
    wait_until_idle(iterator)
    pid = iterator._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
    found += [batch.clone() for batch in iterator]
    assert_same(found, batches(Fateful()))
    assert not told()


def test_a_worker_stopped_in_a_sample_is_one_that_hangs(log: Log, told: Told) -> None:
    class Stops(Fateful):
        def meet(self, index: int) -> None:
            if index in self.fates and self.log is not None and not self.log.lines:
                self.log.add(index)
                os.kill(os.getpid(), signal.SIGSTOP)

    found = batches(Stops({13: ""}, log), num_workers=2, sample_timeout_s=LIMIT_S)
    assert_same(found, batches(Fateful()))
    assert "the process does not respond to signals: T (stopped)" in told()[0].getMessage()
    assert told()[0].created - os.stat(log.path).st_mtime < NAMED_WITHIN_S
