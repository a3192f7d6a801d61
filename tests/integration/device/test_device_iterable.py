"""to_device moves the batches of any iterable to a device and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock import to_device
from penstock.errors import BadArgument, NoSuchDevice

pytestmark = pytest.mark.legacy


def num_threads() -> int:
    return sum(thread.name == "penstock-to-device" for thread in threading.enumerate())


def wait_until_no_thread(limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while num_threads():
        assert time.monotonic() < until_s, "the thread is still there"
        time.sleep(0.005)


def test_batches_come_in_order_again_and_again() -> None:
    batches = [(torch.full((2,), float(i)), f"name {i}") for i in range(10)]
    moved = to_device(batches, "cpu")
    assert len(moved) == 10
    for _ in range(2):
        got = list(moved)
        assert [name for _, name in got] == [f"name {i}" for i in range(10)]
        assert [tensor[0].item() for tensor, _ in got] == list(range(10))
    wait_until_no_thread()


def test_they_are_moved_and_finished() -> None:
    batches = [torch.zeros(1, 3, 2, 2, dtype=torch.uint8)]
    (done,) = to_device(batches, "cpu", finish=penstock.finish(mean=[0.5], std=[0.5]))
    assert torch.equal(done, torch.full((1, 3, 2, 2), -1.0))
    assert next(iter(to_device([torch.zeros(3)], "meta"))).device.type == "meta"


def produce(num_good: int) -> Iterator[torch.Tensor]:
    for number in range(num_good):
        yield torch.tensor(number)
    broken_line_of_the_users()


def broken_line_of_the_users() -> None:
    raise KeyError("labels.csv")


@pytest.mark.parametrize("num_good", [0, 1, 5])
def test_what_a_generator_raises_comes_in_its_turn_with_its_own_traceback(num_good: int) -> None:
    batches = iter(to_device(produce(num_good), "cpu"))
    assert [next(batches).item() for _ in range(num_good)] == list(range(num_good))
    with pytest.raises(KeyError, match=r"labels\.csv") as caught:
        next(batches)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-2:] == ["produce", "broken_line_of_the_users"]
    wait_until_no_thread()


def test_left_half_way_the_thread_ends_and_the_generator_is_closed() -> None:
    closed = threading.Event()

    def endless() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.zeros(1)
        finally:
            closed.set()

    for number, _ in enumerate(to_device(endless(), "cpu", prefetch=4)):
        if number == 3:
            break
    wait_until_no_thread()
    assert closed.wait(120)


def test_it_takes_only_as_many_ahead_as_it_was_told() -> None:
    taken: list[int] = []

    def counted() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    batches = iter(to_device(counted(), "cpu", prefetch=3))
    next(batches)
    time.sleep(0.05)
    assert len(taken) <= 1 + 3 + 1, "the one handed out, those in the queue, one in the hand"
    del batches
    wait_until_no_thread()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pytorchs_own_loader_works_with_it(num_workers: int) -> None:
    data = [(torch.full((3,), float(i)), i) for i in range(20)]
    loader = TorchDataLoader(
        data,
        batch_size=4,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    moved = to_device(loader, "cpu")
    assert len(moved) == 5
    for (x, y), (other_x, other_y) in zip(moved, loader, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
    wait_until_no_thread()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_pytorchs_own_loader_left_half_way_ends_its_workers() -> None:
    loader = TorchDataLoader(list(range(100)), num_workers=1, multiprocessing_context="fork")
    for batch in to_device(loader, "cpu"):
        assert batch.item() == 0
        break
    wait_until_no_thread()  # and the fixture checks that no child is left


def test_a_length_is_asked_of_the_iterable() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(to_device(produce(1), "cpu"))
    assert list(to_device([], "cpu")) == []


def test_batches_without_tensors_pass() -> None:
    batches: list[Any] = ["text", None, 3, {"a": [b"x"]}]
    assert list(to_device(batches, "cpu")) == batches


def test_a_device_that_is_not_there_is_said_before_anything_is_taken() -> None:
    taken = []

    def counted() -> Iterator[int]:
        taken.append(1)
        yield 1

    with pytest.raises(NoSuchDevice):
        to_device(counted(), "nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(NoSuchDevice):
            next(iter(to_device(counted(), "cuda")))
    assert taken == []


def test_none_as_a_batch_is_not_the_end() -> None:
    assert list(to_device([None, None], "cpu")) == [None, None]


def test_a_finish_that_is_no_function_is_said_at_once() -> None:
    with pytest.raises(BadArgument, match="finish=3 must be a function"):
        to_device([1], "cpu", finish=3)  # type: ignore[arg-type]


def test_a_finish_that_raises_stop_iteration_does_not_end_the_epoch_in_silence() -> None:
    empty: Iterator[int] = iter([])
    with pytest.raises(RuntimeError, match="finish= raised StopIteration"):
        list(to_device([1, 2], "cpu", finish=lambda _: next(empty)))


LEAVING = """
import atexit, sys, threading, torch, penstock
atexit.register(  # so early that it comes last
    lambda: print(*(t.name for t in threading.enumerate() if "to-device" in t.name))
)
{control}

def endless():
    x = torch.randn(700, 700)
    while True:
        yield x @ x

batches = iter(penstock.to_device(endless(), "cpu"))
next(batches)
sys.exit(3)
"""


def leave(control: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "leaving.py"
    script.write_text(LEAVING.format(control=control))
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_program_that_ends_while_a_batch_is_taken_keeps_its_exit_code(tmp_path: Path) -> None:
    end = leave("", tmp_path)
    assert (end.returncode, end.stdout.strip(), end.stderr) == (3, "", "")


def test_without_waiting_for_it_the_thread_would_outlast_the_program(tmp_path: Path) -> None:
    """It would return to a finalized interpreter, which aborts the process before Python 3.14."""
    stop = "import penstock.device.device_iterable as it; it._wait_for_all = lambda: None"
    assert leave(stop, tmp_path).stdout.strip() == "penstock-to-device"


def test_a_loader_of_ours_is_left_at_the_end_of_the_program_without_waiting(
    tmp_path: Path,
) -> None:
    script = tmp_path / "leaving_ours.py"
    script.write_text(
        "import atexit, time\n"
        "from penstock import to_device\n"
        "began = []\n"
        "atexit.register(lambda: print(time.monotonic() - began[0]))\n"
        "from penstock import DataLoader\n"
        "def load(i):\n    time.sleep(0.05)\n    return i\n"
        "class Slow:\n    __len__ = lambda self: 1000\n    __getitem__ = lambda self, i: load(i)\n"
        "it = iter(to_device(DataLoader(Slow(), batch_size=2, num_workers=1), 'cpu'))\n"
        "next(it)\n"
        "began.append(time.monotonic())\n"
    )
    command = [sys.executable, str(script)]
    end = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert end.returncode == 0, end.stderr
    assert float(end.stdout) < 25  # all samples take 50 s
