"""``penstock.simulate``: predicts from a trace how a run would go with different settings.

Called by user code, ``penstock bench`` and tests. :mod:`penstock.trace.simulator` does the work.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from penstock.errors import BadArgument
from penstock.trace.simulator import (
    MAX_WORKERS,
    NUM_BATCHES,
    Cost,
    calibrate,
    measure_costs,
    simulate_run,
)
from penstock.trace.timeline import Timeline

MAX_COUNT = 10_000_000
"""Upper limit for batch size, prefetch depth and number of cores, to catch mistakes."""
PACKED_S, PACKED_BYTES_PER_S = 2e-5, 2e9
"""Cost of a packed sample: lookup time and copy speed (measured: 150 KB samples, one core)."""


def simulate(
    run: Any,
    *,
    workers: int | None = None,
    prefetch: int | None = None,
    batch_size: int | None = None,
    device_prefetch: int | None = None,
    packed: bool = False,
    faster_decode: float = 1.0,
    step_ms: float | None = None,
    cores: int | None = None,
    num_batches: int = NUM_BATCHES,
) -> Timeline:
    """Simulate a run with different settings. Returns its timeline.

    Args:
        run: A loader that has delivered batches, its timeline, or the path of a trace.
        workers, prefetch, batch_size: Values for ``num_workers``, ``prefetch_factor`` and
            ``batch_size``.
        device_prefetch: Batches copied to the device ahead of the step. With 0, the step waits for
            each copy.
        packed: Assume that the samples come from a packed file.
        faster_decode: Assume that computing a sample is this many times faster.
        step_ms: Assume that each step takes this long.
        cores: Assume this number of cores.
        num_batches: Number of batches to simulate.

    Example:
        >>> import time, penstock
        >>> class Slow:
        ...     def __len__(self):
        ...         return 120
        ...     def __getitem__(self, i):
        ...         time.sleep(0.01)
        ...         return i
        >>> loader = penstock.DataLoader(Slow(), batch_size=4, num_workers=1)
        >>> for batch in loader:
        ...     pass
        >>> one, four = (penstock.simulate(loader, workers=n).account.rate for n in (1, 4))
        >>> four > one
        True
    """
    timeline = _timeline_of(run)
    _check_counts(workers=workers, device_prefetch=device_prefetch, least=0)
    _check_counts(prefetch=prefetch, batch_size=batch_size, cores=cores, num_batches=num_batches)
    _check_numbers(faster_decode=faster_decode, step_ms=step_ms)
    costs, settings = measure_costs(timeline.model, num_batches)
    costs = calibrate(costs, settings, timeline.account.rate)
    if step_ms is not None:
        costs = replace(costs, steps=(Cost(0.0, step_ms * 1e-3),))
    elif batch_size is not None:
        factor = batch_size / settings.batch_rows
        costs = replace(costs, steps=tuple(step.times(factor) for step in costs.steps))
    if packed:
        known = timeline.facts.get("sample_bytes")
        sample_bytes = known if isinstance(known, (int, float)) else 0
        costs = replace(costs, rows=(Cost(PACKED_S + sample_bytes / PACKED_BYTES_PER_S, 0.0),))
    else:
        rows = tuple(Cost(row.cpu_s / faster_decode, row.wait_s) for row in costs.rows)
        costs = replace(costs, rows=rows)
    if device_prefetch:
        costs = replace(costs, transfer_s=0.0)
    settings = replace(
        settings,
        num_workers=settings.num_workers if workers is None else workers,
        batch_rows=batch_size or settings.batch_rows,
        depth=prefetch or settings.depth,
        cores=cores or settings.cores,
    )
    facts = {
        **timeline.facts,
        "num_workers": settings.num_workers,
        "batch_size": settings.batch_rows,
        "prefetch_factor": settings.depth,
        "imagined": True,
    }
    return Timeline({"facts": facts, "lanes": simulate_run(costs, settings).lanes()})


def _check_counts(*, least: int = 1, **counts: Any) -> None:
    for name, value in counts.items():
        most = MAX_WORKERS if name == "workers" else MAX_COUNT
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise BadArgument(
                f"{name}={value!r} is invalid: it must be an integer from {least} to {most:,}",
                remedy=f"simulate(..., {name}=2)",
            )


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_factor = name == "faster_decode"
        if value is not None and not (is_number and (value > 0 if is_factor else 0 <= value < 1e9)):
            rule = "a positive number" if is_factor else "a non-negative number of milliseconds"
            raise BadArgument(
                f"{name}={value!r} is invalid: it must be {rule}",
                remedy=f"simulate(..., {name}=1.5)",
            )


def _timeline_of(run: Any) -> Timeline:
    if isinstance(run, Timeline):
        return run
    if isinstance(run, (str, os.PathLike)):
        return Timeline.load(run)
    if callable(getattr(run, "timeline", None)):
        return run.timeline()  # type: ignore[no-any-return]
    raise BadArgument(
        f"expected a loader, a timeline or the path of a trace, got {type(run).__name__}",
        remedy="penstock.simulate(loader, workers=4)",
    )
