"""Batches are prefetched in order, errors keep their place, and delivery is what counts."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.device import prefetcher as prefetching
from penstock.device.prefetcher import MAX_PER_CALL, DevicePrefetcher
from penstock.errors import BadArgument, DeviceFailed

pytestmark = pytest.mark.legacy


class RecordingCopier:
    """Fake copier that records the batches sent and delivered."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.handed: list[Any] = []
        self.refuses: Any = None

    def send(self, batch: Any, finish: Callable[[Any], Any] | None) -> tuple[Any, str]:
        if batch == self.refuses:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.sent.append(batch)
        return batch if finish is None else finish(batch), f"event of {batch}"

    def deliver(self, batch: Any, event: str) -> None:
        assert event.startswith("event of")
        self.handed.append(batch)

    def reset(self) -> None:
        """Do nothing. There is no state."""


class Source:
    """Returns numbers, or raises the exceptions among them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = deque(items)
        self.num_ready = len(items) + 1
        self.counted: list[Any] = []

    def take(self) -> tuple[Any, list[Callable[[], None]]]:
        if not self.items:
            raise StopIteration
        item = self.items.popleft()
        self.num_ready -= 1
        if isinstance(item, BaseException):
            raise item
        number = item if isinstance(item, int) else len(self.counted)
        return item, [lambda: self.counted.append(number)]

    def is_ready(self) -> bool:
        return self.num_ready > 0


def ahead(depth: int, finish: Any = None) -> tuple[DevicePrefetcher, RecordingCopier]:
    """Return a prefetcher that works ahead even without a GPU."""
    prefetcher, copier = DevicePrefetcher(torch.device("cpu"), depth, finish), RecordingCopier()
    prefetcher._depth, prefetcher._copier = depth, copier  # type: ignore[assignment]
    return prefetcher, copier


def take_all(prefetcher: DevicePrefetcher, source: Source) -> list[Any]:
    taken = []
    try:
        while True:
            taken.append(prefetcher.next(source.take, source.is_ready))
    except StopIteration:
        return taken


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_come_in_order_and_the_end_after_all_of_them(depth: int) -> None:
    prefetcher, copier = ahead(depth)
    source = Source(list(range(20)))
    assert take_all(prefetcher, source) == list(range(20))
    assert copier.sent == copier.handed == source.counted == list(range(20))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_is_ahead_by_its_depth_and_no_more(depth: int) -> None:
    prefetcher, copier = ahead(depth)
    source = Source(list(range(50)))
    for number in range(1, 20):
        prefetcher.next(source.take, source.is_ready)
        num_ahead = len(copier.sent) - number
        assert num_ahead <= depth
        if number * (MAX_PER_CALL - 1) >= depth:
            assert num_ahead == depth
    assert source.counted == list(range(19)), "what lies ahead is not counted"


def test_the_first_batch_waits_for_few_others() -> None:
    prefetcher, copier = ahead(100)
    source = Source(list(range(50)))
    prefetcher.next(source.take, source.is_ready)
    assert len(copier.sent) == 1 + MAX_PER_CALL


def test_nothing_is_taken_that_would_have_to_be_waited_for() -> None:
    prefetcher, copier = ahead(3)
    source = Source(list(range(10)))
    source.num_ready = 0
    for number in range(5):
        assert prefetcher.next(source.take, source.is_ready) == number
        assert len(copier.sent) == number + 1


def test_an_error_comes_in_its_turn_and_then_it_goes_on() -> None:
    prefetcher, _ = ahead(4)
    source = Source([0, 1, ValueError("of sample 17"), 3, 4])
    assert [prefetcher.next(source.take, source.is_ready) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="of sample 17"):
        prefetcher.next(source.take, source.is_ready)
    assert source.counted == [0, 1]
    assert take_all(prefetcher, source) == [3, 4]


def test_ctrl_c_is_not_kept_for_later_and_loses_no_batch() -> None:
    prefetcher, _ = ahead(2)
    source = Source([0, KeyboardInterrupt(), 1, 2])
    with pytest.raises(KeyboardInterrupt):
        prefetcher.next(source.take, source.is_ready)
    assert take_all(prefetcher, source) == [0, 1, 2]


def test_what_the_device_refuses_is_explained_after_the_batches_before_it() -> None:
    prefetcher, copier = ahead(3)
    copier.refuses = 2
    source = Source([0, 1, 2, 3])
    assert [prefetcher.next(source.take, source.is_ready) for _ in range(2)] == [0, 1]
    with pytest.raises(DeviceFailed, match="MiB to cpu failed: CUDA error: unspecified") as caught:
        prefetcher.next(source.take, source.is_ready)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert source.counted == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), BadArgument("no such field")])
def test_a_mistake_in_finish_stays_what_it_is(error: Exception) -> None:
    def finish(batch: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        DevicePrefetcher(torch.device("cpu"), 2, finish).next(Source([0]).take, lambda: False)
    assert caught.value is error


def test_another_epoch_begins_with_nothing_of_the_one_before() -> None:
    prefetcher, copier = ahead(3)
    prefetcher.next(*each(Source([0, 1, 2, 3])))
    prefetcher.reset()
    source = Source([10, 11])
    assert take_all(prefetcher, source) == [10, 11]
    assert copier.handed == [0, 10, 11]


def test_an_end_that_was_seen_ahead_is_forgotten_with_the_epoch() -> None:
    prefetcher, _ = ahead(3)
    prefetcher.next(*each(Source([0])))
    prefetcher.reset()
    assert take_all(prefetcher, Source([5])) == [5]


def test_on_the_cpu_nothing_is_ahead_and_tensors_are_not_copied() -> None:
    prefetcher = DevicePrefetcher(torch.device("cpu"), 5)
    tensor, source = torch.zeros(3), Source([])
    source.items.extend([[tensor, "name"], [torch.ones(1), "other"]])
    got = prefetcher.next(source.take, source.is_ready)
    assert got[0] is tensor
    assert len(source.items) == 1


def test_tensors_that_stay_behind_are_told_of() -> None:
    told: list[int] = []
    prefetcher = DevicePrefetcher(torch.device("meta"), 1, on_unmoved=lambda: told.append(1))

    class Holder:
        def __init__(self) -> None:
            self.tensor = torch.zeros(1)

    prefetcher.next(lambda: (torch.zeros(1), []), lambda: False)
    assert told == []
    prefetcher.next(lambda: ([torch.zeros(1), Holder()], []), lambda: False)
    assert told == [1]


def each(source: Source) -> tuple[Any, Any]:
    return source.take, source.is_ready


class PretendStreams:
    """Fakes of torch's streams and events that record calls and completed copies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.num_over = 0
        streams = self

        class Event:
            number = 0

            def record(self, stream: Any) -> None:
                self.number = len([call for call in streams.calls if call[0] == "record"])
                streams.calls.append(("record", stream))

            def query(self) -> bool:
                return self.number < streams.num_over

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                streams.calls.append(("wait", self.name, event.number))

        @contextmanager
        def use(stream: Any) -> Iterator[None]:
            streams.calls.append(("begin", stream))
            yield
            streams.calls.append(("end", stream))

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", use)
        patch.setattr(torch.cuda, "current_stream", lambda index: Stream("the user's"))


def test_a_batch_is_kept_until_its_copy_is_over_and_your_stream_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = PretendStreams(monkeypatch)
    prefetcher = DevicePrefetcher(torch.device("cpu"), 2)
    prefetcher._depth, prefetcher._copier = 2, prefetching._StreamCopier(torch.device("cpu"))
    hosts = [HostBatch([number]) for number in range(6)]
    alive = [weakref.ref(host) for host in hosts]
    source = Source(hosts)
    del hosts
    prefetcher.next(source.take, source.is_ready)
    names = [call[0] for call in streams.calls]
    assert names == ["begin", "record", "end"] * 3 + ["wait"], "three sent, one handed over"
    assert streams.calls[-1] == ("wait", "the user's", 0)
    source.counted.clear()
    assert all(ref() is not None for ref in alive), "copies are under way"
    streams.num_over = 2
    prefetcher.next(source.take, source.is_ready)
    source.counted.clear()
    assert [ref() is None for ref in alive[:4]] == [True, True, False, False]


class HostBatch(list[Any]):
    """A list that supports weak references."""


def test_the_finish_runs_on_the_stream_that_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = PretendStreams(monkeypatch)
    prefetcher = DevicePrefetcher(
        torch.device("cpu"), 1, lambda batch: streams.calls.append(("finish",)) or batch
    )
    prefetcher._copier = prefetching._StreamCopier(torch.device("cpu"))
    prefetcher.next(lambda: (torch.zeros(1), []), lambda: False)
    assert [call[0] for call in streams.calls] == ["begin", "finish", "record", "end", "wait"]
