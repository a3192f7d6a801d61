"""What does tracing cost, which is always on?

python benchmarks/tracing.py --repeats 7 --save my-laptop

Loaders with and without it take turns. What counts is the time that the cores were at work for a
batch, in the program and its workers together: on a machine that is shared with others, the rate
says more about the others. Linux only.
"""

from __future__ import annotations

import mmap
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock
from datasets import Pairs
from front import run
from measure import Case, Contender, Pace, Target
from penstock.engine.messages import Lease, Task, control_bytes
from penstock.engine.worker import Worker
from penstock.tracing import RING_BYTES

NUM_WORKERS, BATCH_SIZE = 2, 64
MOST = Target(bound=1.01, is_ceiling=True)
NUM_JPEGS, JPEG_SIZE, CROP = 64, (375, 500), 224


class Jpegs:
    """Pictures of 500 x 375 with shapes and noise, decoded and cropped to 224 by Pillow."""

    def __init__(self) -> None:
        from PIL import Image

        generator = np.random.default_rng(0)
        self._files = []
        for _ in range(NUM_JPEGS):
            rough = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(rough).resize(JPEG_SIZE[::-1]), dtype=np.int16)
            noisy = smooth + generator.normal(0, 12, smooth.shape).astype(np.int16)
            out = BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
            self._files.append(out.getvalue())

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        image = Image.open(BytesIO(self._files[index % NUM_JPEGS])).resize((CROP, CROP))
        return torch.from_numpy(np.array(image))


def _cpu_s(pids: list[int]) -> float:
    """What this process and those have computed so far."""
    files = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return time.process_time() + sum(int(path.read_text().split()[0]) for path in files) * 1e-9


def _cost(dataset: Any, trace: Any, num_batches: int, **arguments: Any) -> float:
    """Seconds of CPU for a thousand batches, in all processes."""
    loader = penstock.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, trace=trace, **arguments
    )
    batches: Any = iter(loader)
    for _ in range(max(4, num_batches // 20)):
        next(batches)
    pids = [worker.pid for worker in batches._workers]
    before_s = _cpu_s(pids)
    for _ in range(num_batches):
        next(batches)
    cpu_s = _cpu_s(pids) - before_s
    batches._shutdown_workers()
    return cpu_s / num_batches * 1000


def _pair(key: str, title: str, dataset: Any, num_batches: int) -> Case:
    cost = partial(_cost, dataset, num_batches=num_batches)
    turns: dict[str, Callable[[], float]] = {
        "tracing off": lambda: cost(trace=False),
        "tracing as always": lambda: cost(trace=None),
        "a trace is asked for": lambda: cost(trace=True),
    }
    return Case(
        key=key,
        title=f"{title}, batch {BATCH_SIZE}, {NUM_WORKERS} workers: CPU time of 1,000 batches",
        unit="s",
        contenders=[
            Contender(
                name=name,
                turn=turn,
                against=() if name == "tracing off" else ("tracing off",),
                target=MOST if name == "tracing as always" and key == "a" else None,
            )
            for name, turn in turns.items()
        ],
    )


def jpegs(pace: Pace) -> Case:
    """(a) A job of the usual kind."""
    return _pair("a", "JPEG 500x375 to 224 (Pillow)", Jpegs(), int(3 * pace.window_s))


def tiny(pace: Pace) -> Case:
    """(b) The worst case: batches that cost next to nothing."""
    return _pair("b", "Samples of 16 bytes", Pairs(), int(800 * pace.window_s))


class _Desk:
    """In the place of a pipe: the worker's slot is memory of this process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64 << 20)

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        return self._memory


def _make_worker(dataset: Any, ring_bytes: int) -> Any:
    from torch.utils.data import default_collate

    task = Task(
        is_iterable=False,
        auto_collation=True,
        drop_last=False,
        per_sample=True,
        base_seed=0,
        shared_seed=None,
        ring_bytes=ring_bytes,
    )
    cells = memoryview(bytearray(control_bytes(1, ring_bytes))).cast("q")
    objects = {"dataset": dataset, "collate_fn": default_collate}
    return Worker(number=0, task=task, objects=objects, desk=_Desk(), cells=cells, is_thread=True)


def _serve(dataset: Any, ring_bytes: int, rows: int, num_runs: int) -> float:
    """The quickest that a worker serves a part of a batch, in this thread; CPU time."""
    worker = _make_worker(dataset, ring_bytes)
    lease = Lease(0, 0, 0, list(range(rows)), 0, rows, 0, True, (0, 0), 0, 64 << 20)
    quickest = float("inf")
    for _ in range(num_runs):
        start_s = time.thread_time()
        reply = worker._serve(lease)
        quickest = min(quickest, time.thread_time() - start_s)
        assert reply.kind == "fixed", reply
    return quickest


def part(pace: Pace) -> Case:
    """(d) A part of a batch in a worker, without what others do to the machine: the quickest."""
    runs = int(20 * pace.window_s)
    jobs: dict[str, Callable[[int], float]] = {
        "8 JPEGs": lambda ring_bytes: _serve(Jpegs(), ring_bytes, 8, runs),
        "64 samples of 16 bytes": lambda ring_bytes: _serve(Pairs(), ring_bytes, 64, 100 * runs),
    }
    contenders = []
    for name, job in jobs.items():
        contenders += [
            Contender(name=f"{name}, off", turn=partial(job, 0)),
            Contender(
                name=f"{name}, as always",
                turn=partial(job, RING_BYTES),
                against=(f"{name}, off",),
                target=MOST if "JPEG" in name else None,
            ),
        ]
    return Case(key="d", title="One part of a batch in a worker", unit="s", contenders=contenders)


def span(pace: Pace) -> Case:
    """(c) One span of the user's: the quickest of many short runs."""
    del pace

    def timed() -> None:
        with penstock.span("cost"):
            pass

    def turn(function: Callable[[], Any]) -> float:
        return min(timeit.repeat(function, number=500, repeat=400)) / 500 * 1e6

    return Case(
        key="c",
        title="with penstock.span(...), a million times",
        unit="s",
        contenders=[
            Contender(name="a span", turn=lambda: turn(timed)),
            Contender(name="reading the clock", turn=lambda: turn(time.perf_counter_ns)),
        ],
    )


CASES = {"a": jpegs, "b": tiny, "c": span, "d": part}

if __name__ == "__main__":
    sys.exit(run("tracing", "What does tracing cost?", CASES, sys.argv[1:]))
