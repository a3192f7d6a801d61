"""``GpuReading``: what one GPU is doing at one moment.

Tested by ``tests/unit/machine/test_gpu_usage.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """The state of one GPU at one moment. None means that the driver does not report the value.

    Args:
        index: The driver's index of the GPU. ``CUDA_VISIBLE_DEVICES`` does not change it.
        use_percent: Share of the last sampling period in which at least one kernel ran.
    """

    index: int
    name: str
    use_percent: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
