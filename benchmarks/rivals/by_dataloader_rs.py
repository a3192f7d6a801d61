"""dataloader-rs, with the datasets of PyTorch's rows. Its workers are threads."""

from __future__ import annotations

from typing import Any

import torch
from by_torch import PyTorch
from contract import Feed, Job
from dataloader_rs import PyDataloader, PyDataset


class _Same(PyDataset):
    """A dataset of PyTorch's row, behind the base class that dataloader-rs asks for."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class _Batches(_Same):
    """A dataset that loads a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data.__getitems__(indices)


class DataloaderRs(PyTorch):
    name = "dataloader-rs"
    kinds = ("jpeg", "small", "large", "raw", "numbers")
    has_processes = False

    def open(self, job: Job) -> Feed:
        data = self.dataset(job)
        is_whole = getattr(data, "__getitems__", None) is not None
        loader = PyDataloader(
            (_Batches if is_whole else _Same)(data),
            batch_size=job.batch_size,
            shuffle=True,
            seed=job.seed,
            num_workers=job.num_workers,
            collate_fn=torch.stack if is_whole else torch.utils.data.default_collate,
            drop_last=True,
        )
        return Feed(loader)


CONTENDERS = (DataloaderRs,)
