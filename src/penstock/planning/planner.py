"""What would a loader do here? The plan without the loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import BadArgument
from penstock.machine.collect import machine
from penstock.order.global_generators import preserved_generators
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Plan
from penstock.planning.rules import make_plan
from penstock.planning.sample_timing import (
    TimedSample,
    is_iterable_only,
    is_sliced_in_memory,
    length_of,
    pace_of,
    spread_indices,
    timed_samples,
)

LIMIT_S = 0.5
MAX_SAMPLES = 64


def plan(
    dataset: Any = None,
    *,
    batch_size: int | None = 1,
    num_workers: int | str = "auto",
    pool: str = "auto",
    start_method: str | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    pin_memory: bool | None = None,
    randomness: str = "sample",
) -> Plan:
    """What would ``DataLoader`` with these arguments do on this machine, and why?

    Args:
        dataset: A few of its samples are loaded here and timed, for about half a second. Without
            one, the plan is what the machine alone says.
        start_method: What ``multiprocessing_context`` would be.

    Raises:
        BadArgument: An argument has a value that the loader would refuse too.
        Whatever ``dataset[i]`` raises.

    Example:
        >>> import penstock
        >>> print(penstock.plan(range(1000), batch_size=10).pool.value)
        inline
    """
    request = LoaderRequest(
        num_workers=num_workers,
        pool=pool,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory=pin_memory,
        batch_size=batch_size,
        randomness=randomness,
    )
    _refuse_unknown(request)
    return make_plan(machine(), request, Workload() if dataset is None else measure_work(dataset))


def _refuse_unknown(request: LoaderRequest) -> None:
    """What the loader refuses has no plan."""
    is_known = {
        "num_workers": request.num_workers == "auto" or _is_count(request.num_workers, least=0),
        "batch_size": request.batch_size is None or _is_count(request.batch_size, least=1),
        "prefetch_factor": request.prefetch_factor is None
        or _is_count(request.prefetch_factor, least=1),
        "pool": request.pool in ("auto", "process", "thread", "inline"),
        "start_method": request.start_method in (None, "fork", "forkserver", "spawn"),
        "randomness": request.randomness in ("sample", "worker"),
    }
    for name, is_fine in is_known.items():
        if not is_fine:
            raise BadArgument(
                f"no loader can have {name}={getattr(request, name)!r}",
                remedy=f"penstock.plan(dataset) without {name}",
            )


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and value >= least


def measure_work(dataset: Any, limit_s: float = LIMIT_S) -> Workload:
    """What is the work like? From a few samples, loaded with the caller's generators put away.

    Example:
        >>> measure_work(list(range(100))).num_samples
        100
    """
    if is_iterable_only(dataset):
        return Workload(
            is_iterable=True
        )  # its samples have no index, and one worker reads it anyway
    length = length_of(dataset)
    if is_sliced_in_memory(dataset):
        return Workload(is_in_memory=True, num_samples=length)
    if length is None:
        return Workload()
    with preserved_generators():
        indices = spread_indices(length, MAX_SAMPLES)
        pace = pace_of(_raising(timed_samples(lambda i: dataset[i], indices, limit_s)))
    if pace is None:
        return Workload(num_samples=length)
    return Workload(
        sample_s=pace.mean_s,
        busy_share=pace.busy_share,
        num_samples=length,
        sample_bytes=pace.sample_bytes,
    )


def _raising(samples: Iterator[TimedSample]) -> Iterator[TimedSample]:
    """The samples; the first exception of user code is the caller's."""
    for timed in samples:
        if timed.error is not None:
            raise timed.error
        yield timed
