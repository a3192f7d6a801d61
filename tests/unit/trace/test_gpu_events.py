"""GPU events are placed on the host clock, although the two clocks drift apart."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
import torch

from penstock.trace import gpu_events as watching
from penstock.trace.gpu_events import GpuWatch
from penstock.trace.record import Kind

pytestmark = pytest.mark.legacy

MS = 1_000_000
DRIFT = 200e-6
"""Drift of the GPU's clock against the host's, much larger than on real hardware."""


class Clockwork:
    """A machine and its GPU, with one clock each. Streams run their work in order."""

    def __init__(self) -> None:
        self.now_ns = 5_000 * MS
        self.is_capturing = False
        self.is_lost = False
        self.truth: list[tuple[int, int]] = []

    def ask(self) -> int:
        """Return the time. Reading the clock takes time too."""
        self.now_ns += 200
        return self.now_ns


class Stream:
    device = torch.device("cuda", 0)

    def __init__(self, clockwork: Clockwork) -> None:
        self.clockwork = clockwork
        self.free_ns = 0

    def work(self, took_ns: int) -> None:
        start_ns = max(self.clockwork.now_ns, self.free_ns)
        self.free_ns = start_ns + took_ns
        self.clockwork.truth.append((start_ns, self.free_ns))


class Event:
    """An event on the GPU's clock, in single-precision milliseconds."""

    def __init__(self, clockwork: Clockwork) -> None:
        self.clockwork = clockwork
        self.at_ns = 0

    def record(self, stream: Stream) -> None:
        if self.clockwork.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.at_ns = max(self.clockwork.ask(), stream.free_ns)

    def query(self) -> bool:
        return self.clockwork.ask() >= self.at_ns

    def elapsed_time(self, other: Event) -> float:
        gap_ms = (other.at_ns - self.at_ns) * (1 + DRIFT) / MS
        return float(struct.unpack("f", struct.pack("f", gap_ms))[0])


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    made.stream = Stream(made)  # type: ignore[attr-defined]
    monkeypatch.setattr(watching, "now_ns", made.ask)
    monkeypatch.setattr(
        watching.time, "sleep", lambda s: made.__dict__.update(now_ns=made.now_ns + int(s * 1e9))
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: Event(made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.stream)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    return made


class Noted:
    """Records the spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int, int, int]] = []

    def __call__(self, kind: int, start: int, end: int, *, batch: int, num_bytes: int) -> None:
        self.spans.append((kind, batch, start, end, num_bytes))

    def of(self, kind: int) -> list[tuple[int, int]]:
        return [
            (start, end)
            for got, _, start, end, _ in sorted(self.spans, key=lambda s: s[1])
            if got == kind
        ]


def run(clockwork: Clockwork, watch: GpuWatch, num_batches: int, gap_ns: int, step_ns: int) -> Any:
    """Run a loop and return the true times of its copies and steps.

    A step lasts at least until the next batch is requested.
    """
    copies, steps = Stream(clockwork), clockwork.stream  # type: ignore[attr-defined]
    true_copies, true_steps = [], []
    for batch in range(num_batches):
        watch.end_step()
        copy = watch.begin_copy(copies, batch)
        copies.work(2 * MS)
        true_copies.append(clockwork.truth[-1])
        if copy is not None:
            watch.end_copy(copy, copies, 1000 + batch)
        watch.begin_step(batch)
        steps.work(step_ns)
        true_steps.append(clockwork.truth[-1])
        clockwork.now_ns += gap_ns
        start_ns, end_ns = true_steps[-1]
        true_steps[-1] = (start_ns, max(end_ns, clockwork.now_ns))
    watch.end_step()
    watch.end_pass()
    return true_copies, true_steps


def furthest(found: list[tuple[int, int]], true: list[tuple[int, int]]) -> int:
    assert len(found) == len(true)
    pairs = zip(found, true, strict=True)
    return max(max(abs(a - c), abs(b - d)) for (a, b), (c, d) in pairs)


def test_copies_and_steps_lie_where_they_were_through_minutes_of_drift(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    watch = GpuWatch(noted, is_asked=True)
    true_copies, true_steps = run(clockwork, watch, 10_000, gap_ns=10 * MS, step_ns=8 * MS)
    assert furthest(noted.of(Kind.COPY), true_copies) < MS // 4
    assert furthest(noted.of(Kind.GPU), true_steps) < MS // 4
    assert noted.spans[0][4] == 1000
    # Negative control: if the clocks are compared only once, they are 20 ms apart at the end, and a
    # copy can be anywhere between its request and its detection.
    monkeypatch.setattr(watching, "ANCHOR_NS", 10**18)
    adrift = Noted()
    true_copies, _ = run(clockwork, GpuWatch(adrift, is_asked=True), 10_000, 10 * MS, 1 * MS)
    assert furthest(adrift.of(Kind.COPY), true_copies) > 5 * MS


def test_steps_that_pile_up_on_the_gpu_are_in_turn_and_waited_for_in_the_end(
    clockwork: Clockwork,
) -> None:
    noted = Noted()
    watch = GpuWatch(noted, is_asked=True)
    _, true_steps = run(clockwork, watch, 50, gap_ns=1 * MS, step_ns=10 * MS)
    assert furthest(noted.of(Kind.GPU), true_steps) < MS // 4
    spans = noted.of(Kind.GPU)
    assert all(after[0] >= before[1] - 1000 for before, after in itertools.pairwise(spans))


def test_fast_batches_are_watched_only_when_a_trace_was_asked_for(clockwork: Clockwork) -> None:
    for gap_ns, is_asked, count in (
        (MS // 2, False, 0),
        (MS // 2, True, 200),
        (5 * MS, False, 150),
    ):
        noted = Noted()
        run(clockwork, GpuWatch(noted, is_asked=is_asked), 200, gap_ns, step_ns=MS // 4)
        assert len(noted.of(Kind.GPU)) >= count
        assert bool(noted.spans) == bool(count)


def test_nothing_is_recorded_into_a_graph(clockwork: Clockwork) -> None:
    noted = Noted()
    watch = GpuWatch(noted, is_asked=True)
    clockwork.is_capturing = True
    run(clockwork, watch, 10, gap_ns=5 * MS, step_ns=MS)
    assert not noted.spans
    clockwork.is_capturing = False
    run(clockwork, watch, 10, gap_ns=5 * MS, step_ns=MS)
    assert len(noted.of(Kind.GPU)) == 10


def test_a_gpu_that_is_lost_is_not_told_by_the_watch(clockwork: Clockwork) -> None:
    noted = Noted()
    watch = GpuWatch(noted, is_asked=True)
    run(clockwork, watch, 3, gap_ns=5 * MS, step_ns=MS)
    clockwork.is_lost = True
    for batch in range(3):
        watch.end_step()
        watch.begin_step(batch)
    watch.end_pass()
    assert len(noted.of(Kind.GPU)) == 3


def test_a_hanging_step_is_not_waited_for_longer_than_a_second(clockwork: Clockwork) -> None:
    noted = Noted()
    watch = GpuWatch(noted, is_asked=True)
    watch.end_step()
    watch.begin_step(0)
    clockwork.stream.work(3600_000 * MS)  # type: ignore[attr-defined]
    watch.end_step()
    before_ns = clockwork.now_ns
    watch.end_pass()
    assert clockwork.now_ns - before_ns < 1100 * MS
    assert not noted.spans
