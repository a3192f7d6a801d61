"""LitData, with its own chunk format and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

import litdata
import numpy as np
import torch
from contract import Contender, Feed, Job, jpeg_files
from litdata.streaming.writer import BinaryWriter
from work import CropJpeg, CropPixels


class _Mapped(litdata.StreamingDataset):
    """Dataset that applies a function to its samples, as in its documentation."""

    def __init__(self, function: Any, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.function = function

    def __getitem__(self, index: Any) -> Any:
        return self.function(super().__getitem__(index))


class _Jpeg:
    def __init__(self, antialias: bool) -> None:
        self.crop = CropJpeg(antialias)

    def __call__(self, sample: dict[str, Any]) -> Any:
        return self.crop(sample["image"]), sample["label"]


class _Number:
    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self, sample: Any) -> torch.Tensor:
        return torch.from_numpy(self.work(int(sample)))


class LitData(Contender):
    name = "LitData"
    formats = Contender.kinds

    def prepare(self, job: Job) -> None:
        writer = BinaryWriter(str(job.folder), chunk_bytes="64MB")
        for index, sample in enumerate(self.samples(job)):
            writer[index] = sample
        writer.done()
        writer.merge()

    def samples(self, job: Job) -> Any:
        if job.kind == "jpeg":
            for path, label in jpeg_files(job):
                with open(path, "rb") as file:
                    yield {"image": file.read(), "label": label}
        elif job.kind == "numbers":
            yield from range(job.count)
        else:
            yield from np.load(job.data / f"{job.kind}.npy", mmap_mode="r")

    def open(self, job: Job) -> Feed:
        keywords = {"input_dir": str(job.folder), "shuffle": True, "drop_last": True}
        keywords["seed"] = job.seed or 42
        function: Any = torch.from_numpy
        if job.kind == "jpeg":
            function = _Jpeg(job.antialias)
        elif job.kind == "numbers":
            function = _Number(job.work)
        elif job.kind == "raw":
            function = CropPixels(job.antialias)
        loader = litdata.StreamingDataLoader(
            _Mapped(function, **keywords),
            batch_size=job.batch_size,
            num_workers=job.num_workers,
            persistent_workers=job.num_workers > 0,
            drop_last=True,
        )
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)


CONTENDERS = (LitData,)
