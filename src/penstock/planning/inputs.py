"""Inputs of a plan besides the machine: what the user asked for, and what the work is like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """What the user asked for: the loader's arguments, as far as a choice depends on them.

    Args:
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"`` or None.
        persistent_workers, pin_memory: None leaves it to the plan.
        device: Where batches are brought to; None: they stay in CPU memory.
        has_init_fn: Whether a ``worker_init_fn`` was given.
        has_sample_limit: Whether a ``sample_timeout_s`` was given.
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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is known of the data. None: not known (yet).

    Args:
        sample_s: Wall time of one sample; ``busy_share`` of it is spent computing, the rest
            waiting for a disk or a network.
        num_samples: Length of the dataset or of its sampler.
        sample_bytes: Size of one sample as tensors.
        step_s: What the training step takes between two batches; ``step_busy_s`` is what it
            computes on this machine's cores meanwhile, all of them added up.
        is_iterable: An IterableDataset: each worker would read all of it.
        is_in_memory: The engine slices it (TensorDataset and its like).
        stays_because: Why the dataset cannot be sent to a worker process.
    """

    sample_s: float | None = None
    busy_share: float | None = None
    num_samples: int | None = None
    sample_bytes: int | None = None
    step_s: float | None = None
    step_busy_s: float = 0.0
    is_iterable: bool = False
    is_in_memory: bool = False
    stays_because: str | None = None
