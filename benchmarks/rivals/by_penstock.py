"""Penstock, with plain datasets, image folders and packed sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from by_torch import Numbers, Strings
from contract import MEAN, STD, Contender, Feed, Job, make_names

import penstock


def _crop(job: Job) -> Any:
    crop = penstock.RandomResizedCrop(224, antialias=job.antialias)
    return penstock.Compose([crop, penstock.RandomHorizontalFlip()])


class Penstock(Contender):
    name = "Penstock"
    formats = ("small", "large", "raw")
    kinds = (*Contender.kinds, "strings")
    memory_format = torch.channels_last  # the default for images

    def open(self, job: Job) -> Feed:
        extras: dict[str, Any] = {}
        if job.is_float:
            mean, std = ([value / 255 for value in values] for values in (MEAN, STD))
            extras = {"device": "cpu", "finish": penstock.finish(mean=mean, std=std)}
        if job.seed is not None:
            extras["seed"] = job.seed
        num_workers = self.workers(job)
        loader: Any = penstock.DataLoader(
            self.dataset(job),
            batch_size=job.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            **extras,
        )
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)

    def workers(self, job: Job) -> int:
        """Mapped rows, without workers, which they do not need."""
        return 0 if job.kind in ("small", "large") else job.num_workers

    def prepare(self, job: Job) -> None:
        rows = np.load(job.data / f"{job.kind}.npy", mmap_mode="r")
        ragged = {"fields": {"value": penstock.Field(ragged=True)}} if job.kind == "raw" else {}
        penstock.pack(list(rows), job.folder, workers=0, **ragged)

    def dataset(self, job: Job) -> Any:
        if job.kind == "jpeg":
            crop = _crop(job)
            return penstock.ImageFolder(job.data / "jpeg", crop, memory_format=self.memory_format)
        if job.kind == "numbers":
            return Numbers(job.count, job.work)
        if job.kind == "strings":
            return Strings(make_names(job), job.count)
        packed = penstock.Packed(job.folder, memory_format=self.memory_format)
        return packed.with_transforms(value=_crop(job)) if job.kind == "raw" else packed


class PenstockContiguous(Penstock):
    """Batches with the channels first in memory, as PyTorch's collate makes them."""

    name = "Penstock, contiguous"
    kinds = ("jpeg", "raw")
    formats = ("raw",)
    memory_format = torch.contiguous_format


class PenstockPacked(Penstock):
    """JPEGs in a packed set."""

    name = "Penstock, packed"
    kinds = formats = ("jpeg",)

    def prepare(self, job: Job) -> None:
        source = penstock.ImageFolder(job.data / "jpeg")
        penstock.pack(source, job.folder, workers=0)

    def dataset(self, job: Job) -> Any:
        return penstock.Packed(job.folder, transforms={"image": _crop(job)})


class PenstockWorkers(Penstock):
    """Mapped rows with workers, although they do not need any."""

    name = "Penstock, with workers"
    kinds = ("small", "large")

    def workers(self, job: Job) -> int:
        return job.num_workers


class PenstockShared(Penstock):
    """The names in a SharedList, with one copy for all processes."""

    name = "Penstock, SharedList"
    kinds = ("strings",)

    def dataset(self, job: Job) -> Any:
        return Strings(penstock.SharedList(make_names(job)), job.count)


class PenstockInline(Penstock):
    name = "Penstock, 0 workers"
    kinds = ("numbers",)
    has_processes = False

    def workers(self, job: Job) -> int:
        return 0


CONTENDERS = (
    Penstock,
    PenstockContiguous,
    PenstockPacked,
    PenstockWorkers,
    PenstockShared,
    PenstockInline,
)
