"""Measures the cost of tracing, which is always on.

python benchmarks/tracing.py --repeats 7 --save my-laptop

Loaders with and without tracing take turns. The result is the CPU time per batch, of the program
and its workers together, because rates on a shared machine depend mostly on other programs. Linux
only.
"""

from __future__ import annotations

import mmap
import statistics
import subprocess
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
from penstock.engine.memory.messages import Lease, WorkerTask, control_bytes
from penstock.engine.worker.loop import WorkerLoop
from penstock.trace.record import TRACE_BYTES

NUM_WORKERS, BATCH_SIZE = 2, 64
MOST = Target(bound=1.01, is_ceiling=True)
NUM_JPEGS, JPEG_SIZE, CROP = 64, (375, 500), 224


class Jpegs:
    """Images of 500 x 375 with shapes and noise, decoded and cropped to 224 by Pillow."""

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


def _workers_s(pids: list[int]) -> float:
    """Return the CPU time so far of some processes."""
    files = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in files) * 1e-9


def _settled_s(pids: list[int]) -> float:
    """Return the CPU time of workers once they have loaded all batches that they may load ahead."""
    before_s = -1.0
    while before_s < (now_s := _workers_s(pids)):
        before_s = now_s
        time.sleep(1.0)
    return now_s


def _cpu_s(pids: list[int]) -> float:
    """Return the CPU time so far of this process and the given ones."""
    return time.process_time() + _workers_s(pids)


def _cost(dataset: Any, trace: Any, num_batches: int, **arguments: Any) -> float:
    """Return the CPU seconds per thousand batches, over all processes."""
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


SCRAPER = """
import sys, urllib.request
for line in sys.stdin:
    urllib.request.urlopen(sys.argv[1], timeout=600).read()
    print(flush=True)
"""


class _EverythingOn:
    """Alternates second by second between a loader with everything on and one with everything off.

    "On" is tracing, the status for ``penstock top``, and a Prometheus endpoint that another process
    scrapes once per second. Both loaders exist all the time, so disturbances affect both. A turn is
    the CPU time of the training process while it iterates the loader, and of the loader's workers.
    """

    def __init__(self, num_seconds: int) -> None:
        self._num_seconds = num_seconds
        self._on_s = 0.0

    def off(self) -> float:
        loaders: list[Any] = [
            penstock.DataLoader(
                Jpegs(), batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, trace=trace
            )
            for trace in (False, None)
        ]
        endpoint = penstock.serve_metrics(loaders[1])
        command = [sys.executable, "-c", SCRAPER, endpoint.url]
        scraper: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        batches = [iter(loader) for loader in loaders]
        for _ in range(8):
            for one in batches:
                next(one)
        pids = [[worker.pid for worker in one._workers] for one in batches]
        main_s, counts = [0.0, 0.0], [0, 0]
        before_s = [_settled_s(some) for some in pids]
        for number in range(2 * self._num_seconds):
            way = (number + number // 2) % 2  # alternate which one is first
            start_s, until = time.process_time(), time.monotonic() + 1.0
            if way:
                scraper.stdin.write("\n")
                scraper.stdin.flush()
            while time.monotonic() < until:
                next(batches[way])
                counts[way] += 1
            if way:
                scraper.stdout.readline()
            main_s[way] += time.process_time() - start_s
        sums_s = [_settled_s(some) - s for some, s in zip(pids, before_s, strict=True)]
        scraper.kill()
        scraper.communicate()
        endpoint.close()
        for one in batches:
            one._shutdown_workers()
        costs = [(main_s[way] + sums_s[way]) / counts[way] * 1000 for way in (0, 1)]
        self._on_s = costs[1]
        return costs[0]

    def on(self) -> float:
        """Return the cost measured in the same turn."""
        return self._on_s


def everything(pace: Pace) -> Case:
    """(e) A typical workload with everything on and off, in alternation."""
    way = _EverythingOn(num_seconds=max(5, int(20 * pace.window_s)))
    target = Contender(name="all on", turn=way.on, against=("all off",), target=MOST)
    return Case(
        key="e",
        title=f"JPEG, batch {BATCH_SIZE}, {NUM_WORKERS} workers: CPU time of 1,000 batches with "
        "tracing, penstock top and a scrape each second",
        unit="s",
        contenders=[Contender(name="all off", turn=way.off), target],
    )


def second(pace: Pace) -> Case:
    """(f) What is done once a second: a scrape, and the status for penstock top.

    The loader is a fast one, which fills the trace buffers: metrics describe as many records as
    they ever do.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    from penstock.trace import prometheus

    loader: Any = penstock.DataLoader(Pairs(), batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    batches = iter(loader)
    prometheus.FRESH_S = 0.0
    registry = CollectorRegistry()
    registry.register(prometheus.LoaderCollector({"train": loader}))  # type: ignore[arg-type]

    def turn() -> float:
        took_s = []
        for _ in range(int(10 * pace.window_s)):
            for _ in range(4000):
                next(batches)
            start_s = time.thread_time()
            generate_latest(registry)
            loader._recorder._publish()
            took_s.append(time.thread_time() - start_s)
        return statistics.median(took_s)

    limit = "1% of a second"
    return Case(
        key="f",
        title=f"{NUM_WORKERS} workers: CPU time of a scrape and a status for penstock top",
        unit="s",
        contenders=[
            Contender(name=limit, turn=lambda: 0.01),
            Contender(
                name="both, once",
                turn=turn,
                against=(limit,),
                target=Target(bound=1.0, is_ceiling=True),
            ),
        ],
    )


def _pair(key: str, title: str, dataset: Any, num_batches: int) -> Case:
    cost = partial(_cost, dataset, num_batches=num_batches)
    turns: dict[str, Callable[[], float]] = {
        "tracing off": lambda: cost(trace=False),
        "tracing, the default": lambda: cost(trace=None),
        "trace=True": lambda: cost(trace=True),
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
                target=MOST if name == "tracing, the default" and key == "a" else None,
            )
            for name, turn in turns.items()
        ],
    )


def jpegs(pace: Pace) -> Case:
    """(a) A typical workload."""
    return _pair("a", "JPEG 500x375 to 224 (Pillow)", Jpegs(), int(3 * pace.window_s))


def tiny(pace: Pace) -> Case:
    """(b) The worst case: batches that take almost no time."""
    return _pair("b", "Samples of 16 bytes", Pairs(), int(800 * pace.window_s))


class _SlotMemory:
    """Replaces the connection to a worker. The slot is in the memory of this process."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64 << 20)

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        return self._memory


def _make_worker(dataset: Any, trace_bytes: int) -> Any:
    from torch.utils.data import default_collate

    task = WorkerTask(
        is_iterable=False,
        auto_collation=True,
        drop_last=False,
        per_sample=True,
        base_seed=0,
        shared_seed=None,
        trace_bytes=trace_bytes,
    )
    cells = memoryview(bytearray(control_bytes(1, trace_bytes))).cast("q")
    objects = {"dataset": dataset, "collate_fn": default_collate}
    return WorkerLoop(
        number=0, task=task, objects=objects, connection=_SlotMemory(), cells=cells, is_thread=True
    )


class _InTurn:
    """Alternates between two variants, so that disturbances affect both.

    A turn is the median CPU time of each.

    Args:
        make: Creates the function to time. Its argument says whether tracing is on.
    """

    def __init__(self, make: Callable[[bool], Callable[[], object]], num_runs: int) -> None:
        self._make, self._num_runs = make, num_runs
        self._with_s = 0.0

    def without(self) -> float:
        ways = self._make(False), self._make(True)
        took_s: tuple[list[float], list[float]] = ([], [])
        for number in range(2 * self._num_runs):
            way = (number + number // 2) % 2  # alternate which one is first
            start_s = time.thread_time()
            ways[way]()
            took_s[way].append(time.thread_time() - start_s)
        without_s, self._with_s = (statistics.median(one) for one in took_s)
        return without_s

    def with_tracing(self) -> float:
        """Return the time measured in the same turn."""
        return self._with_s


def _part_of_worker(dataset: Any, rows: int, is_on: bool) -> Callable[[], object]:
    worker = _make_worker(dataset, TRACE_BYTES if is_on else 0)
    lease = Lease(0, 0, 0, list(range(rows)), 0, rows, 0, True, (0, 0), 0, 64 << 20)

    def serve() -> None:
        reply = worker._serve(lease)
        assert reply.kind == "fixed", reply

    return serve


def _batch_of_loader(dataset: Any, rows: int, is_on: bool) -> Callable[[], object]:
    loader = penstock.DataLoader(dataset, batch_size=rows, trace=None if is_on else False)
    return iter(loader).__next__


def part(pace: Pace) -> Case:
    """(d) A part of a batch in a worker, and a batch of a loader without workers."""
    runs, jpegs = int(100 * pace.window_s), Jpegs()
    ways = {
        "8 JPEGs in a worker": _InTurn(partial(_part_of_worker, jpegs, 8), runs),
        "8 JPEGs, loader": _InTurn(partial(_batch_of_loader, jpegs, 8), runs),
        "64 tiny samples in a worker": _InTurn(partial(_part_of_worker, Pairs(), 64), 50 * runs),
    }
    contenders = []
    for name, way in ways.items():
        contenders += [
            Contender(name=f"{name}, off", turn=way.without),
            Contender(
                name=f"{name}, on",
                turn=way.with_tracing,
                against=(f"{name}, off",),
                target=MOST if "JPEG" in name else None,
            ),
        ]
    title = "CPU time, alternating batch by batch between tracing on and off"
    return Case(key="d", title=title, unit="s", contenders=contenders)


def span(pace: Pace) -> Case:
    """(c) One user span: the fastest of many short runs."""
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


CASES = {"a": jpegs, "b": tiny, "c": span, "d": part, "e": everything, "f": second}

if __name__ == "__main__":
    sys.exit(run("tracing", "Measures the cost of tracing.", CASES, sys.argv[1:]))
