"""What is loaded. In a module of its own, because PyTorch's spawned workers must import it."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

ENDLESS = 10**9
"""More samples than a run can load: no epoch ends inside a measurement."""


class Pictures:
    """150 KB a sample and hardly any work: what is left is the way of the bytes to the parent."""

    shape = (3, 224, 224)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(self.shape, index % 256, dtype=torch.uint8)


class Crumbs:
    """16 bytes a sample: what is left is the cost of each sample and each batch."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def make_images_in_memory(num_samples: int) -> TensorDataset:
    """Small pictures that lie in memory as one tensor."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, 3, 64, 64)
    return TensorDataset(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
