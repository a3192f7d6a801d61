"""Times the samples of a dataset by loading a few in the current process, within a time limit.

Called in the user's process by ``penstock.plan`` and, sample by sample, by ``penstock doctor``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.machine.host import queued_s
from penstock.planning.inputs import Workload
from penstock.user_objects import probe

LIMIT_S = 0.5
MAX_SAMPLES = 64

_STEP = 0.6180339887498949
"""The golden ratio. Its multiples modulo 1 fill the unit interval evenly for any count."""
_TOO_SHORT_TO_WAIT_S = 100e-6
"""The two clocks are read a microsecond apart, and no disk responds faster than this."""


@dataclass(frozen=True, kw_only=True)
class TimedSample:
    """One sample, or the exception that loading it raised.

    Args:
        busy_s: CPU time within ``wall_s``. The rest was waiting.
    """

    index: Any
    wall_s: float
    busy_s: float
    sample: Any = None
    error: Exception | None = None


def time_samples(
    load: Callable[[Any], Any], indices: Iterable[Any], limit_s: float, at_least: int = 1
) -> Iterator[TimedSample]:
    """Load samples until loading has taken ``limit_s``, but at least ``at_least`` samples.

    Example:
        >>> [timed.sample for timed in time_samples(lambda i: i * i, [0, 1, 2], limit_s=60.0)]
        [0, 1, 4]
    """
    spent_s = 0.0
    for num_done, index in enumerate(indices):
        if spent_s >= limit_s and num_done >= at_least:
            return
        sample, error = None, None
        busy_s, start_s = time.process_time() + queued_s(), time.perf_counter()
        try:
            sample = load(index)
        except Exception as raised:  # the consumer decides what to do with it
            error = raised
        wall_s = time.perf_counter() - start_s
        # Time in which another program had the core does not count as waiting for data.
        busy_s = min(wall_s, time.process_time() + queued_s() - busy_s)
        spent_s += wall_s
        yield TimedSample(index=index, wall_s=wall_s, busy_s=busy_s, sample=sample, error=error)


def spread_indices(length: int, most: int) -> Iterator[int]:
    """Yield distinct indices from all over a dataset: first, last, middle, then in between.

    Example:
        >>> list(spread_indices(10, most=6))
        [0, 9, 5, 6, 2, 8]
    """
    seen: set[int] = set()
    golden = (int(length * (place * _STEP % 1.0)) for place in range(1, 4 * most))
    firsts = (0, length - 1, length // 2)
    for index in (*firsts[: max(0, length)], *golden):
        if len(seen) >= min(most, length):
            return
        if index not in seen:
            seen.add(index)
            yield index


@dataclass(frozen=True, kw_only=True)
class SampleTiming:
    """Summary of the times of several samples.

    Args:
        p10_s, p90_s: The 10th and 90th percentile.
        first_s: Time of the first sample, which often opens files or fills caches. Not included in
            the other values.
        busy_share: Fraction of the time spent computing. The rest was waiting.
    """

    num_samples: int
    first_s: float
    median_s: float
    p10_s: float
    p90_s: float
    slowest_s: float
    slowest_index: Any
    mean_s: float
    busy_share: float
    sample_bytes: int


def summarize_timings(samples: Iterable[TimedSample]) -> SampleTiming | None:
    """Summarize the times and sizes of the samples that loaded. Returns None if none loaded.

    Example:
        >>> timing = summarize_timings(time_samples(lambda i: b"x" * 100, range(20), limit_s=60.0))
        >>> timing.num_samples, timing.sample_bytes
        (20, 100)
    """
    good: list[tuple[Any, float, float, int]] = [
        (timed.index, timed.wall_s, timed.busy_s, num_bytes(timed.sample))
        for timed in samples
        if timed.error is None
    ]
    if not good:
        return None
    counted = good[1:] or good
    walls = sorted(wall_s for _, wall_s, _, _ in counted)
    total_s = max(sum(walls), 1e-9)
    slowest = max(counted, key=lambda row: row[1])
    busy_share = min(1.0, sum(busy_s for _, _, busy_s, _ in counted) / total_s)
    return SampleTiming(
        num_samples=len(good),
        first_s=good[0][1],
        median_s=statistics.median(walls),
        p10_s=walls[len(walls) // 10],
        p90_s=walls[min(len(walls) - 1, len(walls) * 9 // 10)],
        slowest_s=slowest[1],
        slowest_index=slowest[0],
        mean_s=total_s / len(walls),
        busy_share=busy_share if total_s / len(walls) > _TOO_SHORT_TO_WAIT_S else 1.0,
        sample_bytes=int(statistics.mean(size for _, _, _, size in good)),
    )


def num_bytes(sample: Any) -> int:
    """Return the total size of the tensors, arrays and strings in a sample.

    Example:
        >>> num_bytes({"name": "ab", "data": [b"xyz", 7]})
        13
    """
    nbytes = probe(sample, "nbytes")
    if isinstance(nbytes, int):
        return nbytes
    if hasattr(type(sample), "element_size") and hasattr(type(sample), "nelement"):
        return int(sample.element_size() * sample.nelement())  # a tensor of torch 1.13
    if isinstance(sample, (str, bytes, bytearray)):
        return len(sample)
    if isinstance(sample, (bool, int, float)):
        return 8  # its size in a batch
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(num_bytes(item) for item in sample)
    return 0


def is_iterable_only(dataset: Any) -> bool:
    """Return True if the dataset is iterable, like torch's IterableDataset, and has no indices."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.IterableDataset):
        return True
    return hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__")


def is_sliced_in_memory(dataset: Any) -> bool:
    """Return True for a TensorDataset or a subset of one. Loading a batch is then a single copy."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False  # without torch, it cannot be a TensorDataset
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    return type(dataset) is torch.utils.data.TensorDataset


def length_of(dataset: Any) -> int | None:
    """Return ``len(dataset)``, or None if it has no length."""
    try:
        return len(dataset)
    except Exception:  # missing, negative, not a number, or user code that fails
        return None


def measure_workload(dataset: Any, limit_s: float = LIMIT_S) -> Workload:
    """Return the workload of a dataset, measured by loading a few samples in this process.

    Restores the caller's random generators.

    Raises:
        Any exception that ``dataset[i]`` raises.

    Example:
        >>> measure_workload(list(range(100))).num_samples
        100
    """
    from penstock.order.event_loop import sample_getter  # late: it imports NumPy
    from penstock.order.global_generators import preserved_generators

    if is_iterable_only(dataset):  # its samples have no index, and only one worker reads it
        return Workload(is_iterable=True)
    length = length_of(dataset)
    if is_sliced_in_memory(dataset):
        return Workload(is_in_memory=True, num_samples=length)
    if length is None:
        return Workload()
    indices = spread_indices(length, MAX_SAMPLES)

    def samples() -> Iterator[TimedSample]:
        for timed in time_samples(sample_getter(dataset), indices, limit_s):
            if timed.error is not None:
                raise timed.error
            yield timed

    with preserved_generators():
        timing = summarize_timings(samples())
    if timing is None:
        return Workload(num_samples=length)
    return Workload(
        sample_s=timing.mean_s,
        busy_share=timing.busy_share,
        num_samples=length,
        sample_bytes=timing.sample_bytes,
    )
