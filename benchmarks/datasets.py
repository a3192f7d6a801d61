"""Datasets of the benchmarks, in a separate module that PyTorch's spawned workers can import."""

from __future__ import annotations

import time

import torch
from torch.utils.data import TensorDataset

ENDLESS = 10**9
"""More samples than a run can load, so that no epoch ends during a measurement."""


class Pictures:
    """Samples of 150 KB with little work, to measure the transport of bytes to the parent."""

    shape = (3, 224, 224)

    def __init__(self, num_samples: int = ENDLESS) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(self.shape, index % 256, dtype=torch.uint8)


class Crumbs:
    """Samples of 16 bytes, to measure the overhead per sample and per batch."""

    def __init__(self, num_samples: int = ENDLESS) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Pairs:
    """Samples of 16 bytes that take no time to make: an index and a label."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.5


class Working:
    """Samples of 3 KB that take a given time to compute or to wait for."""

    def __init__(self, num_samples: int, work_s: float, *, waits: bool = False) -> None:
        self.num_samples = num_samples
        self.work_s = work_s
        self.waits = waits

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.waits:
            time.sleep(self.work_s)
        else:
            # The thread's CPU clock, so that time without a core does not count as work.
            end_s = time.thread_time() + self.work_s
            while time.thread_time() < end_s:
                pass
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8)


def make_images_in_memory(num_samples: int) -> TensorDataset:
    """Return small images in memory, as one tensor."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, 3, 64, 64)
    return TensorDataset(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
