"""FFCV, with its .beton files and its pipeline compiled by Numba, in threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from contract import MEAN, SIZE, STD, Contender, Feed, Job, jpeg_files
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.decoders import (
    IntDecoder,
    NDArrayDecoder,
    RandomResizedCropRGBImageDecoder,
)
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image


class _Source:
    """Indexable source, as its writer requires."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        if job.kind == "jpeg":
            self.files = jpeg_files(job)
        else:
            self.rows = np.load(job.data / f"{job.kind}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.files) if self.kind == "jpeg" else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.kind == "jpeg":
            path, label = self.files[index]
            return Image.open(path).convert("RGB"), label
        row = np.ascontiguousarray(self.rows[index])
        return (Image.fromarray(row), 0) if self.kind == "raw" else (row, 0)


class Ffcv(Contender):
    name = "FFCV"
    kinds = formats = ("jpeg", "small", "large", "raw")
    antialias = (True,)  # always OpenCV's area filter
    has_processes = False

    def prepare(self, job: Job) -> None:
        field: Any = RGBImageField(write_mode="raw")
        if job.kind == "jpeg":
            field = RGBImageField(write_mode="jpg", jpeg_quality=90)
        elif job.kind != "raw":
            shape = np.load(job.data / f"{job.kind}.npy", mmap_mode="r").shape[1:]
            field = NDArrayField(np.dtype(np.uint8), shape)
        fields = {"x": field, "label": IntField()}
        writer = DatasetWriter(str(job.folder) + ".partial", fields, num_workers=2)
        writer.from_indexed_dataset(_Source(job))
        job.folder.with_name(job.folder.name + ".partial").rename(job.folder)

    def open(self, job: Job) -> Feed:
        if job.kind in ("small", "large"):
            steps: list[Any] = [NDArrayDecoder(), ToTensor()]
        else:
            steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
            if job.is_float:
                steps += [NormalizeImage(np.array(MEAN), np.array(STD), np.float32)]
            steps += [ToTensor(), ToTorchImage(channels_last=True, convert_back_int16=False)]
        loader = Loader(
            str(job.folder),
            batch_size=job.batch_size,
            num_workers=job.num_workers,
            order=OrderOption.RANDOM,
            os_cache=True,
            drop_last=True,
            seed=job.seed,
            pipelines={"x": steps, "label": [IntDecoder(), ToTensor()]},
        )
        return Feed(loader)


CONTENDERS = (Ffcv,)
