"""Inputs of a plan: the loader's options and the facts about the data (the machine is separate).

Tested by ``tests/unit/planning/test_decisions.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class LoaderRequest(NamedTuple):
    """Options of a loader that the plan depends on.

    Args:
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"`` or None.
        persistent_workers, pin_memory: None lets the plan decide.
        device: The device that batches are copied to. None: they stay in CPU memory.
        has_init_fn: True if a ``worker_init_fn`` was given.
        has_sample_limit: True if a ``sample_timeout_s`` was given.
    """

    num_workers: int | str = "auto"
    pool: str = "auto"
    start_method: str | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    device: str | None = None
    batch_size: int | None = 1
    randomness: str = "sample"
    has_init_fn: bool = False
    has_sample_limit: bool = False


class Workload(NamedTuple):
    """Facts about the data. None means unknown.

    Args:
        sample_s: Wall time of one sample. ``busy_share`` of it is spent computing, the rest waiting
            for a disk or a network.
        num_samples: Length of the dataset or of its sampler.
        sample_bytes: Size of one sample as tensors.
        step_s: Time of the training step between two batches. ``step_busy_s`` is the CPU time it
            uses on this machine, summed over all cores.
        is_iterable: True for an IterableDataset, which every worker would read completely.
        is_in_memory: True if the engine slices it (TensorDataset and similar).
        in_flight: Async samples that a worker has in flight at once. 0: the dataset is not async.
        num_running: Workers that the times come from. 0: they were measured without workers.
        tuned: Number of workers that was chosen while loading, and why.
        stays_because: The reason why the dataset cannot be sent to a worker process.
    """

    sample_s: float | None = None
    busy_share: float | None = None
    num_samples: int | None = None
    sample_bytes: int | None = None
    step_s: float | None = None
    step_busy_s: float = 0.0
    is_iterable: bool = False
    is_in_memory: bool = False
    in_flight: int = 0
    num_running: int = 0
    tuned: tuple[int, str] | None = None
    stays_because: str | None = None
