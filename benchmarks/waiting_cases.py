"""Cases of waiting.py.

Rates are measured after a warm-up, in which "auto" finds its number of workers, in a program whose
fork server is running. Workers that start together finish their batches together, so that batches
arrive in waves of up to a second. The rate is therefore the slope of a line through all arrivals
(least squares): counting them would depend on the number of waves in the window. The ramp-up is a
case of its own: the time from the creation of the loader to its first thousand samples.
dataloader-rs takes part where it is installed (Python 3.13).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

import penstock
from measure import Case, Contender, Pace, Target
from waiting_datasets import AsyncDelayed, AsyncFetched, Delayed, Fetched, InThreads

BATCH_SIZE = 16
WAIT_S = 0.02
WARM_UP_S, TUNING_S = 1.0, 14.0
"""Before a rate is measured. "auto" tries several numbers of workers."""
NUM_WINDOWS = 3
"""A rate is measured for this many windows of the other benchmarks: 4.5 s."""
NUM_RAMP = 1_000
NUM_STARTED = 64
FIXED = (32, 64, 128)
TORCH: Any = torch.utils.data.DataLoader
OURS: Any = penstock.DataLoader
AUTO, ASYNC = "Penstock, num_workers='auto'", "Penstock, async, 2 workers, in_flight=64"
TWO, RUST = "PyTorch, 2 workers", "dataloader-rs, 128 threads"
Makers = Mapping[str, Callable[[], Any]]
warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores


def _theirs(num_workers: int) -> str:
    return f"PyTorch, {num_workers} workers"


def _makers(data: Any, async_data: Any) -> dict[str, Callable[[], Any]]:
    peers = {RUST: partial(_make_rust, data)} if importlib.util.find_spec("dataloader_rs") else {}
    return {
        **{_theirs(n): partial(TORCH, data, BATCH_SIZE, num_workers=n) for n in FIXED},
        **peers,
        AUTO: partial(OURS, data, BATCH_SIZE, num_workers="auto"),
        ASYNC: partial(OURS, async_data, BATCH_SIZE, num_workers=2, in_flight=64),
    }


def _make_rust(data: Any) -> Any:
    """Return dataloader-rs with 128 samples in flight, as its manual advises for waiting."""
    rust: Any = importlib.import_module("dataloader_rs")
    kind = type("Samples", (InThreads, rust.PyDataset), {})
    return rust.PyDataloader(
        kind(data),
        batch_size=BATCH_SIZE,
        num_workers=128 // BATCH_SIZE,
        items_in_parallel=BATCH_SIZE,
        collate_fn=torch.utils.data.default_collate,
    )


@functools.lru_cache(maxsize=1)
def _warm_fork_server() -> None:
    """Start the process that forks Penstock's workers, as the first loader of a program does."""
    next(iter(OURS(range(4), num_workers=1)))


def _rate(make: Callable[[], Any], pace: Pace) -> float:
    _warm_fork_server()
    is_auto = isinstance(make, partial) and make.keywords.get("num_workers") == "auto"
    warm_up_s = (TUNING_S if is_auto else WARM_UP_S) * pace.window_s / Pace().window_s
    start_s, arrivals = 0.0, list[float]()
    for _ in make():
        now_s = time.perf_counter()
        start_s = start_s or now_s + warm_up_s
        if now_s >= start_s:
            arrivals.append(now_s)
        if len(arrivals) > 1 and now_s >= start_s + NUM_WINDOWS * pace.window_s:
            break
    return BATCH_SIZE * statistics.linear_regression(arrivals, range(len(arrivals))).slope


def _case(
    key: str,
    title: str,
    makers: Makers,
    turn: Callable[[Callable[[], Any]], float],
    targets: Mapping[str, tuple[Target, tuple[str, ...]]],
    unit: str = "samples/s",
) -> Case:
    contenders = [
        Contender(
            name=name,
            turn=partial(turn, make),
            target=targets[name][0] if name in targets else None,
            against=targets[name][1] if name in targets else (),
        )
        for name, make in makers.items()
    ]
    return Case(key=key, title=title, unit=unit, contenders=contenders)


def _delays(wait_s: float, work_s: float = 0.0) -> dict[str, Callable[[], Any]]:
    return _makers(Delayed(wait_s, work_s), AsyncDelayed(wait_s, work_s))


def _level(pace: Pace, key: str, title: str, makers: Makers) -> Case:
    """Compare "auto" and async with PyTorch's best number of workers."""
    best = tuple(map(_theirs, FIXED))
    targets = {AUTO: (Target(bound=0.95), best), ASYNC: (Target(bound=1.0), best)}
    return _case(key, title, makers, partial(_rate, pace=pace), targets)


def _two_workers(pace: Pace) -> Case:
    data = Delayed(WAIT_S)
    makers = {
        TWO: partial(TORCH, data, BATCH_SIZE, num_workers=2),
        AUTO: partial(OURS, data, BATCH_SIZE, num_workers="auto"),
    }
    targets = {AUTO: (Target(bound=8.0), (TWO,))}
    return _case("a", "20 ms a sample, 2 workers", makers, partial(_rate, pace=pace), targets)


def _first_samples(make: Callable[[], Any]) -> float:
    """Return the seconds until a new loader has delivered its first samples."""
    start_s = time.perf_counter()
    batches = iter(make())
    for _ in islice(batches, NUM_RAMP // BATCH_SIZE):
        pass
    return time.perf_counter() - start_s


def _ramp(pace: Pace) -> Case:
    title = f"20 ms a sample, the first {NUM_RAMP:,} samples of a loader"
    return _case("c", title, _delays(WAIT_S), _first_samples, {}, unit="s")


def _mixed(pace: Pace) -> Case:
    title = "18 ms of waiting and 2 ms of decoding"
    return _level(pace, "e", title, _delays(0.018, 0.002))


@functools.lru_cache(maxsize=1)
def _server_port() -> int:
    script = Path(__file__).with_name("waiting_server.py")
    command = [sys.executable, str(script), str(WAIT_S)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    return int(server.stdout.readline())


def _web(pace: Pace) -> Case:
    port = _server_port()
    makers = _makers(Fetched(port), AsyncFetched(port))
    return _level(pace, "d", "A web server that answers after 20 ms", makers)


def _private_mib(make: Callable[[], Any]) -> float:
    """Return the memory that the workers of a loader do not share, in MiB."""
    batches = iter(make())
    for _ in islice(batches, 200):
        pass
    total = sum(_uss(process) for process in _workers())
    del batches
    return total / 2**20


def _workers() -> Iterator[psutil.Process]:
    for child in psutil.Process().children(recursive=True):
        if "waiting_server" not in " ".join(child.cmdline()):
            yield child


def _uss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0


def _memory(pace: Pace) -> Case:
    data, name = Delayed(WAIT_S), "Penstock, 64 workers"
    makers = {
        _theirs(64): partial(TORCH, data, BATCH_SIZE, num_workers=64),
        name: partial(OURS, data, BATCH_SIZE, num_workers=64),
        ASYNC: partial(OURS, AsyncDelayed(WAIT_S), BATCH_SIZE, num_workers=2, in_flight=64),
    }
    title = "Private memory of all workers, 20 ms a sample"
    targets = {name: (Target(bound=1.0, is_ceiling=True), (_theirs(64),))}
    return _case("f", title, makers, _private_mib, targets, unit="MiB")


def _start_s(make: Callable[[], Any]) -> float:
    """Return the seconds until every worker of a new loader has answered."""
    start_s = time.perf_counter()
    batches = iter(make())
    for _ in islice(batches, NUM_STARTED):
        pass
    return time.perf_counter() - start_s


def _start(pace: Pace) -> Case:
    _warm_fork_server()
    options: dict[str, Any] = {"num_workers": NUM_STARTED, "prefetch_factor": 1}
    data, name = Delayed(WAIT_S), f"Penstock, {NUM_STARTED} workers"
    makers = {
        _theirs(NUM_STARTED): partial(TORCH, data, 1, **options),
        name: partial(OURS, data, 1, **options),
    }
    targets = {name: (Target(bound=1.0, is_ceiling=True), (_theirs(NUM_STARTED),))}
    title = f"Start of {NUM_STARTED} workers, until each has loaded a sample"
    return _case("g", title, makers, _start_s, targets, unit="s")


CASES: Mapping[str, Callable[[Pace], Case]] = MappingProxyType(
    {
        "a": _two_workers,
        "b": lambda pace: _level(pace, "b", "20 ms a sample", _delays(WAIT_S)),
        "c": _ramp,
        "d": _web,
        "e": _mixed,
        "f": _memory,
        "g": _start,
    }
)
