"""Everything that loads samples one at a time also loads those of async datasets."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import DataLoader
from penstock.cli.bench_dataset import BenchDataset
from penstock.cli.bench_measurement import measure
from penstock.cli.doctor.sample_check import SampleCheck
from penstock.order import event_loop
from penstock.order.event_loop import load_sample, loop_of_thread, sample_getter, wait_for
from penstock.verify.hashed_run import Extent, run_and_hash
from penstock.verify.settings import Setting
from support.datasets import assert_same


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """Close the event loop of this thread, whose sockets would be reported as leaked."""
    yield
    loop_of_thread().close()


class Pages:
    """Async samples with a random number. They keep an object that belongs to the event loop."""

    lock: Any = None

    def __len__(self) -> int:
        return 20

    async def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.lock is None:
            self.lock = asyncio.get_running_loop()
        assert self.lock is asyncio.get_running_loop()
        await asyncio.sleep(0.0001)
        return index, penstock.rng().random()

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Batches(Pages):
    """Samples that load only by batch."""

    async def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ should have been used")

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0.0001)
        return [(index, penstock.rng().random()) for index in indices]


class Plain(Pages):
    """The same samples without async."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index, penstock.rng().random()


@pytest.mark.legacy
def test_one_sample_is_awaited_and_a_plain_one_is_returned() -> None:
    assert load_sample(Pages(), 3)[0] == 3
    assert load_sample(Plain(), 3)[0] == 3
    assert sample_getter(Batches())(4)[0] == 4
    with pytest.raises(IndexError):
        load_sample(Pages(), 99)


def test_it_works_beside_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> Any:
        return load_sample(Pages(), 3)

    assert asyncio.run(cell())[0] == 3


INTERRUPTED = """
import asyncio, os, signal, threading, time
from penstock import DataLoader
from penstock.order import event_loop

class Pages:
    def __len__(self):
        return 20

    async def __getitem__(self, index):
        return await no_answer() if index == 13 else index

async def no_answer():
    # The main thread waits then, and so does this sample, if it does not block its thread.
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    asyncio.get_running_loop().call_soon(timer.start) if {ends} else timer.start()
    await asyncio.sleep(3600) if {ends} else time.sleep(3600)

async def cell():
    for _ in DataLoader(Pages(), batch_size=5):
        pass

event_loop.CANCEL_LIMIT_S = {limit_s}
before = event_loop.loop_of_thread()
try:
    asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt as error:
    print("interrupted", *getattr(error, "__notes__", []))
print("same loop", event_loop.loop_of_thread() is before)
os._exit(0)  # a sample that does not end would have to be waited for
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT from a thread")
@pytest.mark.parametrize("ends", [True, False])
def test_ctrl_c_in_a_notebook_names_the_sample_even_if_it_does_not_end(ends: bool) -> None:
    code = INTERRUPTED.format(ends=ends, limit_s=120 if ends else 0.5)
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "interrupted" in told.stdout, told.stderr
    assert f"same loop {ends}" in told.stdout
    if sys.version_info >= (3, 11):
        assert "while loading async sample 13" in told.stdout
        assert "in no_answer" in told.stdout or not ends


class Unanswered(Pages):
    """Sample 3 ends when a warning names it and ``text``, or after a hundred seconds."""

    def __init__(self, shown: list[Any], text: str) -> None:
        self.shown, self.text = shown, text

    async def __getitem__(self, index: int) -> Any:
        limit_s = time.monotonic() + 100
        while index == 3 and time.monotonic() < limit_s:
            if any(self.text in told for told in warnings_about(3, self.shown)):
                break
            await self.answer()
        return index

    async def answer(self) -> None:
        await asyncio.sleep(0.01)


def warnings_about(index: int, shown: list[Any]) -> list[str]:
    return [str(one.message) for one in shown if f"s for async sample {index}" in str(one.message)]


@pytest.mark.parametrize("way", ["loader", "one sample"])
def test_a_sample_that_hangs_in_a_notebook_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    text = "in answer" if way == "loader" else "sample_timeout_s"  # not while the sample computes

    async def cell(dataset: Any) -> None:
        if way == "loader":
            assert len(list(DataLoader(dataset, batch_size=5))) == 4
        else:
            assert load_sample(dataset, 3) is not None

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        asyncio.run(cell(Pages()))
        assert not warnings_about(3, shown)  # the limit is a minute
        monkeypatch.setattr(event_loop, "SLOW_S", 0.05)
        asyncio.run(cell(Unanswered(shown, text)))
    told = warnings_about(3, shown)[-1]
    assert text in told
    assert "sample_timeout_s" in told


def test_the_context_of_the_caller_is_seen() -> None:
    name = contextvars.ContextVar("name", default="")
    name.set("caller")

    async def read() -> str:
        return name.get()

    assert wait_for(read()) == "caller"


@pytest.mark.filterwarnings("ignore:sample 0 is different each time")
@pytest.mark.parametrize("kind", [Pages, Batches])
def test_an_async_dataset_is_packed_like_a_plain_one(tmp_path: Path, kind: Any) -> None:
    packed, plain = (
        penstock.pack(dataset, tmp_path / name, workers=workers, progress=False)
        for dataset, name, workers in ((kind(), "async", 2), (Plain(), "plain", 0))
    )
    assert list(map(tuple, packed)) == list(map(tuple, plain))
    other = penstock.pack(kind(), tmp_path / "other", workers=0, seed=1, progress=False)
    assert list(map(tuple, other)) != list(map(tuple, plain))


@pytest.mark.parametrize("kind", [Pages, Batches])
def test_an_async_dataset_is_cached(kind: Any) -> None:
    cache = penstock.cached(kind(), "ram")
    batches = [list(DataLoader(cache, batch_size=5, num_workers=n)) for n in (0, 2)]
    assert_same(batches[0], batches[1])
    assert torch.cat([indices for indices, _ in batches[0]]).tolist() == list(range(20))
    assert cache.num_ready == 20


@pytest.mark.parametrize("kind", [Pages, Batches, Plain])
def test_an_async_sample_is_replayed(kind: Any) -> None:
    loader = DataLoader(kind(), batch_size=5, shuffle=True, seed=2)
    for epoch in range(2):
        for indices, noise in loader:
            for index, number in zip(indices.tolist(), noise.tolist(), strict=True):
                assert penstock.replay(loader, epoch, index) == (index, number)


def test_a_verified_run_may_delay_async_samples() -> None:
    def make(num_workers: int = 0) -> Any:
        return DataLoader(Pages(), batch_size=5, num_workers=num_workers, seed=1)

    hashes = {
        run_and_hash(
            make, Setting(name="a", arguments={"num_workers": 1}, delays=delays), Extent()
        ).digest
        for delays in ("", "samples")
    }
    assert len(hashes) == 1


def test_doctor_checks_async_samples() -> None:
    check = SampleCheck(
        dataset=Pages(), is_iterable=False, length=20, indices=range(4), doing=lambda text: None
    )
    found = check.run()
    assert (check.good, found["errors"]) == ([0, 1, 2, 3], [])
    assert "tuple" in str(found["forms"]) or "int" in str(found["forms"])
    assert check.try_ends()["goes_on_after_end"] is False
    assert check.try_twice() == {"repeats": True}


def test_bench_measures_async_samples() -> None:
    source = BenchDataset(name="pages", dataset=Pages())
    found = measure(source, batch_size=4, workers=(0, 1), seconds=0.2, tell=lambda text: None)
    assert all(run.rate > 0 for run in found.runs)
    assert found.ceiling > 0


def test_a_plan_of_an_async_dataset_is_measured() -> None:
    assert penstock.plan(Pages(), batch_size=4).num_workers.source == "measured"
