"""HF datasets, with Arrow files and a transform, in PyTorch's loader as in its documentation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from contract import Contender, Feed, Job, jpeg_files
from work import CropJpeg, CropPixels

import datasets


class _Batch:
    """Transform of a whole batch, for with_transform."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        kinds = {"jpeg": CropJpeg, "raw": CropPixels}
        self.work = kinds[job.kind](job.antialias) if job.kind in kinds else job.work

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": [self.work(sample) for sample in batch["x"]]}


class HuggingFace(Contender):
    name = "HF datasets"
    without_state = "a state only in its iterable datasets, not in one with an index"
    kinds = formats = ("jpeg", "small", "large", "numbers")

    def prepare(self, job: Job) -> None:
        datasets.disable_progress_bars()
        rows = None
        if job.kind not in ("jpeg", "numbers"):
            rows = np.load(job.data / f"{job.kind}.npy", mmap_mode="r")
        features = datasets.Features(self.features(job, rows))
        made = datasets.Dataset.from_generator(
            self.samples,
            gen_kwargs={"job": job},
            features=features,
            cache_dir=str(job.home / "cache"),
        )
        made.save_to_disk(str(job.folder))

    def features(self, job: Job, rows: Any) -> dict[str, Any]:
        if job.kind == "jpeg":
            return {"x": datasets.Value("binary"), "label": datasets.Value("int64")}
        if job.kind == "numbers":
            return {"x": datasets.Value("int64")}
        return {"x": datasets.Array3D(rows.shape[1:], "uint8")}

    def samples(self, job: Job) -> Any:
        if job.kind == "jpeg":
            for path, label in jpeg_files(job):
                with open(path, "rb") as file:
                    yield {"x": file.read(), "label": label}
        elif job.kind == "numbers":
            yield from ({"x": number} for number in range(job.count))
        else:
            yield from ({"x": row} for row in np.load(job.data / f"{job.kind}.npy", "r"))

    def open(self, job: Job) -> Feed:
        data = datasets.load_from_disk(str(job.folder))
        if job.kind in ("small", "large"):
            data = data.with_format("torch")
        else:
            data = data.with_transform(_Batch(job))
        generator = None
        if job.seed is not None:
            torch.manual_seed(job.seed)
            generator = torch.Generator().manual_seed(job.seed)
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=job.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=job.num_workers,
            persistent_workers=job.num_workers > 0,
            generator=generator,
        )
        return Feed(loader)


CONTENDERS = (HuggingFace,)
