"""Async samples in one event loop: order, limits, cancellation, draws, a loop that already runs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock import rng
from penstock.engine.loading.async_samples import AsyncSamples
from penstock.errors import BadArgument, SampleTimeout, SharedDraw
from penstock.order.async_randomness import AsyncRandomness
from penstock.order.event_loop import loop_of_thread
from penstock.order.global_generators import preserved_generators

pytestmark = pytest.mark.legacy


@pytest.fixture(scope="module", autouse=True)
def event_loop_of_this_thread() -> None:
    """Create it before the first test, because it is kept."""
    loop_of_thread()


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with preserved_generators():
        yield


class Gate:
    """Samples that wait until enough of them are in flight."""

    def __init__(self, num_together: int) -> None:
        self.num_together = num_together
        self.now = self.most = 0
        self.opened = asyncio.Event()
        self.ended: list[Any] = []

    async def get(self, index: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self.num_together:
            self.opened.set()
        try:
            await self.opened.wait()
            await asyncio.sleep(0)
        finally:
            self.now -= 1
            self.ended.append(index)
        return index * 10


def flight(in_flight: int | str = 8, **given: Any) -> AsyncSamples:
    given = {"randomness": AsyncRandomness(0, None), "is_shared": False, **given}
    return AsyncSamples(in_flight, **given)


@pytest.mark.parametrize("num_together", [1, 3, 8])
def test_samples_are_in_flight_together_and_come_in_order(num_together: int) -> None:
    gate, samples = Gate(num_together), flight(num_together)
    samples.start("a", gate.get, enumerate(range(20), 100), 0)
    assert list(samples.results("a")) == [10 * index for index in range(20)]
    assert gate.most == num_together


def test_samples_of_the_next_group_start_before_their_turn() -> None:
    gate, samples = Gate(8), flight(8)
    samples.start("a", gate.get, enumerate(range(4)), 0)
    samples.start("b", gate.get, enumerate(range(4, 8), 4), 0)
    assert list(samples.results("a")) == [0, 10, 20, 30]  # the gate opens for 8
    assert list(samples.results("b")) == [40, 50, 60, 70]


def test_dropped_samples_are_cancelled_and_their_cleanup_runs() -> None:
    gate, samples = Gate(99), flight(3)
    samples.start("a", gate.get, enumerate(range(5)), 0)
    samples.run(samples.loop.create_task(asyncio.sleep(0.01)))
    samples.drop("a")
    samples.settle()
    assert sorted(gate.ended) == [0, 1, 2]  # the other two never started
    gate.opened.set()
    samples.start("b", gate.get, enumerate([7]), 0)
    assert list(samples.results("b")) == [70]


def test_an_error_is_raised_in_its_place_and_can_be_taken_again() -> None:
    async def get(index: int) -> int:
        if index == 1:
            raise ValueError("truncated")
        return index

    samples = flight()
    samples.start("a", get, enumerate(range(3)), 0)
    results = samples.results("a")
    assert next(results) == 0
    with pytest.raises(ValueError, match="truncated"):
        next(results)
    with pytest.raises(ValueError, match="truncated"):
        samples.fetch("a", get, 1, 1, 0)
    assert samples.fetch("a", get, 2, 1, 0) == 2  # a substitute, in its position
    assert samples.fetch("a", get, 2, 2, 0) == 2


def test_code_that_cancels_itself_is_an_error_of_that_sample() -> None:
    async def get(index: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)
        return index

    samples = flight()
    samples.start("a", get, [(0, 5)], 0)
    with pytest.raises(RuntimeError, match=r"dataset\[5\] cancelled its own task"):
        next(samples.results("a"))


def test_a_sample_that_is_not_awaitable_is_refused() -> None:
    samples = flight()
    samples.start("a", lambda index: index, [(0, 5)], 0)
    with pytest.raises(BadArgument, match=r"dataset\[5\] returned an object of type int"):
        next(samples.results("a"))


def test_rng_belongs_to_the_sample_across_awaits_tasks_and_threads() -> None:
    async def get(index: int) -> list[float]:
        drawn = [rng().random()]
        await asyncio.sleep(0.001 * (3 - index))
        drawn.append(rng().random())
        drawn.append(await asyncio.create_task(in_task()))
        drawn.append(await asyncio.to_thread(lambda: rng().random()))
        return drawn

    async def in_task() -> float:
        return float(rng().random())

    found = []
    for in_flight in (1, 3):
        samples = flight(in_flight)
        samples.start("a", get, enumerate(range(3), 40), 1)
        found.append(list(samples.results("a")))
    assert found[0] == found[1]
    expected = AsyncRandomness(0, None).rng_at(1, 41).generator().random(4).tolist()
    assert found[0][1] == expected
    assert found[0][0] != expected


async def draw_after_await(number: int = 0) -> float:
    await asyncio.sleep(0.001 * number)
    return float(rng().random())


async def draw_before_await() -> float:
    number = float(rng().random())
    await asyncio.sleep(0)
    return number


async def at_once() -> Any:
    return await asyncio.gather(*map(draw_after_await, range(3)))


async def at_once_with_a_pause() -> Any:
    first, second = map(asyncio.ensure_future, map(draw_after_await, range(2)))
    return [await first, await second]


async def before_await() -> Any:
    return await asyncio.gather(draw_before_await(), draw_before_await(), asyncio.sleep(0))


async def one_after_the_other() -> Any:
    return [await asyncio.wait_for(draw_after_await(number), 60) for number in range(3)]


async def in_the_code_that_awaits() -> Any:
    await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(3)))
    return [rng().random(), await asyncio.create_task(draw_after_await())]


@pytest.mark.parametrize(
    ("load", "is_error"),
    [
        (at_once, True),
        (at_once_with_a_pause, True),
        (before_await, False),
        (one_after_the_other, False),
        (in_the_code_that_awaits, False),
    ],
)
def test_tasks_that_draw_in_the_order_of_the_answers_are_an_error(
    load: Any, is_error: bool
) -> None:
    async def get(index: int) -> Any:
        return await load()

    samples = flight()
    samples.start("a", get, [(0, 5)], 0)
    if is_error:
        with pytest.raises(SharedDraw, match=r"several tasks of async sample 5 drew"):
            next(samples.results("a"))
    else:
        again = flight()
        again.start("a", get, [(0, 5)], 0)
        assert next(samples.results("a")) == next(again.results("a"))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("where", ["first turn", "later turn", "task", "suppressed"])
def test_a_draw_from_a_shared_generator_is_an_error(where: str, is_shared: bool) -> None:
    async def draw() -> float:
        return random.random()

    async def get(index: int) -> int:
        if where == "first turn":
            random.random()
        await asyncio.sleep(0)
        if where == "later turn":
            random.random()
        elif where == "task":
            await asyncio.gather(draw())
        elif where == "suppressed":
            with suppress(Exception):
                await asyncio.create_task(draw())
        return index

    samples = flight(is_shared=is_shared)
    samples.start("a", get, [(0, 3)], 0)
    with pytest.raises(SharedDraw, match="async sample 3 drew from Python's random module"):
        next(samples.results("a"))


def test_a_draw_of_another_thread_is_not_blamed_on_a_sample() -> None:
    blamed = []

    async def get(index: int) -> int:
        if not blamed:
            blamed.append(index)
            random.random()  # once, as another thread might at this moment
        return index

    samples = flight(is_shared=True)
    samples.start("a", get, [(0, 3)], 0)
    assert next(samples.results("a")) == 3


def test_draws_are_the_users_concern_without_randomness() -> None:
    async def get(index: int) -> float:
        return random.random()

    samples = flight(randomness=None)
    samples.start("a", get, [(0, 3)], 0)
    assert 0 <= next(samples.results("a")) < 1


def test_a_hung_sample_is_cancelled_loaded_again_and_then_named_with_its_stack() -> None:
    calls, cancelled = [], []

    async def get(index: int) -> int:
        calls.append(index)
        if index == 1 and len(calls) < 90:
            try:
                await no_answer()
            finally:
                cancelled.append(index)
        return index

    async def no_answer() -> None:
        await asyncio.Event().wait()

    samples = flight(timeout_s=0.05)
    samples.start("a", get, enumerate(range(3)), 0)
    results = samples.results("a")
    assert next(results) == 0
    with pytest.raises(SampleTimeout, match=r"sample 1 did not finish within 0\.05 s") as caught:
        next(results)
    assert calls.count(1) == len(cancelled) == 2
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  File")]
    assert lines[0].endswith(" in get")
    assert lines[1].endswith(" in no_answer")
    assert caught.value.sample_index == 1  # type: ignore[attr-defined]
    assert samples.take_notes() == [
        "samples exceeded sample_timeout_s; they were cancelled and loaded again"
    ]


def test_time_in_which_the_loop_does_not_run_does_not_count() -> None:
    calls, answered = [], asyncio.Event()

    async def get(index: int) -> int:
        calls.append(index)
        await answered.wait()
        return index

    samples = flight(timeout_s=0.2)
    samples.start("a", get, [(0, 3)], 0)
    samples.run(samples.loop.create_task(asyncio.sleep(0)))
    answered.set()
    time.sleep(0.5)  # a slow collate_fn
    assert next(samples.results("a")) == 3
    assert calls == [3]


def test_a_loop_that_already_runs_is_no_obstacle() -> None:
    gate, samples = Gate(4), flight(4)

    async def notebook_cell() -> list[int]:
        samples.start("a", gate.get, enumerate(range(4)), 0)
        return list(samples.results("a"))

    assert asyncio.run(notebook_cell()) == [0, 10, 20, 30]


def test_the_loop_is_kept_for_the_connections_of_the_dataset() -> None:
    assert flight().loop is flight().loop is loop_of_thread()
