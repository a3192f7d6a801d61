"""What is loaded. In a module of its own, because PyTorch's spawned workers must import it."""

from __future__ import annotations

import time

import torch
from torch.utils.data import TensorDataset

ENDLESS = 10**9
"""More samples than a run can load: no epoch ends inside a measurement."""


class Pictures:
    """150 KB a sample and hardly any work: what is left is the way of the bytes to the parent."""

    shape = (3, 224, 224)

    def __init__(self, num_samples: int = ENDLESS) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(self.shape, index % 256, dtype=torch.uint8)


class Crumbs:
    """16 bytes a sample: what is left is the cost of each sample and each batch."""

    def __init__(self, num_samples: int = ENDLESS) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Pairs:
    """16 bytes a sample that cost nothing to make: an index and a label."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.5


class Working:
    """3 KB a sample after a known amount of work: computing, or waiting for something."""

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
            # The thread's own clock: a core that is shared with others does not count as work.
            end_s = time.thread_time() + self.work_s
            while time.thread_time() < end_s:
                pass
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8)


def make_images_in_memory(num_samples: int) -> TensorDataset:
    """Small pictures that lie in memory as one tensor."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, 3, 64, 64)
    return TensorDataset(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
