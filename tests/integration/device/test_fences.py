"""A fence is over when all earlier work on the GPU is done, and not before."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from penstock.device.cuda_runtime import CudaRuntime
from penstock.device.fences import EventFence, IsDone, SynchronizingFence, choose_fence
from support import fake_gpu
from support.fake_gpu import PretendGpu

pytestmark = pytest.mark.legacy


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest) -> Iterator[PretendGpu]:
    with fake_gpu.pretended(request.param) as gpu:
        yield gpu


@pytest.fixture
def nvidia() -> Iterator[PretendGpu]:
    with fake_gpu.pretended("cuda") as gpu:
        yield gpu


@pytest.fixture
def amd() -> Iterator[PretendGpu]:
    with fake_gpu.pretended("hip") as gpu:
        yield gpu


def is_soon(question: IsDone, limit_s: float = 5.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not question() and time.monotonic() < until_s:
        time.sleep(0.001)
    return question()


def test_nvidia_gets_events_of_the_context_and_amd_a_thread_that_waits(gpu: PretendGpu) -> None:
    expected = EventFence if gpu.vendor == "cuda" else SynchronizingFence
    assert isinstance(choose_fence(CudaRuntime(0)), expected)


def test_a_driver_without_events_of_the_context_gets_the_thread(
    nvidia: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake_gpu.Driver, "cuCtxRecordEvent")  # like drivers before 12.5
    assert isinstance(choose_fence(CudaRuntime(0)), SynchronizingFence)


def test_a_fence_is_over_when_copies_before_it_are_done_and_not_before(gpu: PretendGpu) -> None:
    fence = choose_fence(CudaRuntime(0))
    gpu.begin_copy()
    is_over = fence.record()
    time.sleep(0.02)
    assert not is_over()
    gpu.finish_all()
    assert is_soon(is_over)


def test_a_copy_after_a_fence_does_not_hold_it(gpu: PretendGpu) -> None:
    fence = choose_fence(CudaRuntime(0))
    is_over = fence.record()
    if gpu.vendor == "hip":
        assert is_soon(is_over)  # a device synchronization covers the work queued when it runs
    gpu.begin_copy()
    assert is_over()
    later = fence.record()
    assert not later()


def test_the_thread_that_waits_serves_all_that_asked_meanwhile_and_ends(
    amd: PretendGpu,
) -> None:
    gpu = amd
    fence = SynchronizingFence(CudaRuntime(1))
    gpu.begin_copy()
    first = fence.record()
    while "synchronise" not in gpu.names():
        time.sleep(0.001)
    others = [fence.record() for _ in range(20)]
    gpu.finish_all()
    assert is_soon(first)
    assert all(is_soon(question) for question in others)
    assert gpu.names().count("synchronise") == 2, "once for the first, once for all the others"
    assert gpu.devices_of("synchronise") == {1}
    assert is_soon(lambda: not fence.thread.is_running)


def test_events_are_used_again(nvidia: PretendGpu) -> None:
    gpu = nvidia
    fence = choose_fence(CudaRuntime(1))
    for _ in range(20):
        assert fence.record()()
    gpu.begin_copy()
    fence.record()  # its result is not used
    assert not fence.record()()
    assert gpu.names().count("make event") == 1
    assert gpu.devices_of("record event") == {0}
    assert [call[2] for call in gpu.calls if call[0] in ("retain", "record event")] == [1] * 23


def test_a_capture_in_another_thread_delays_the_event_and_loses_nothing(
    nvidia: PretendGpu,
) -> None:
    gpu = nvidia
    gpu.is_elsewhere_capturing = True
    gpu.begin_copy()
    is_over = choose_fence(CudaRuntime(0)).record()
    gpu.finish_all()
    assert not is_over()
    gpu.is_elsewhere_capturing = False
    assert not is_over()  # this call records it
    assert is_over()


def test_of_a_gpu_that_is_lost_every_fence_is_over(gpu: PretendGpu) -> None:
    fence = choose_fence(CudaRuntime(0))
    gpu.begin_copy()
    before = fence.record()
    gpu.lost = True
    gpu.num_done = gpu.num_asked  # the waiting call returns with an error
    after = fence.record()
    assert is_soon(before)
    assert is_soon(after)
