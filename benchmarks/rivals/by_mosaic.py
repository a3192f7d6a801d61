"""MosaicML Streaming, with MDS shards, its StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from typing import Any

import numpy as np
import streaming
import torch
from contract import Contender, Feed, Job, jpeg_files
from work import CropJpeg, CropPixels


class _Mapped(streaming.StreamingDataset):
    def __init__(self, function: Any, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.function = function

    def __getitem__(self, index: Any) -> Any:
        return self.function(super().__getitem__(index))


class _Sample:
    """Transforms a sample, depending on the kind of data."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        kinds = {"jpeg": CropJpeg, "raw": CropPixels}
        self.work = kinds[job.kind](job.antialias) if job.kind in kinds else job.work

    def __call__(self, sample: dict[str, Any]) -> Any:
        if self.kind == "jpeg":
            return self.work(sample["x"]), sample["label"]
        if self.kind == "numbers":
            return torch.from_numpy(self.work(sample["x"]))
        return self.work(sample["x"]) if self.work else sample["x"]


class Mosaic(Contender):
    name = "MosaicML Streaming"
    formats = Contender.kinds

    def prepare(self, job: Job) -> None:
        columns = {"x": {"jpeg": "bytes", "numbers": "int"}.get(job.kind, "ndarray")}
        if job.kind == "jpeg":
            columns["label"] = "int"
        else:
            rows = None if job.kind == "numbers" else np.load(job.data / f"{job.kind}.npy", "r")
            if rows is not None:  # faster, because the shape is in the header
                columns["x"] = f"ndarray:uint8:{','.join(map(str, rows.shape[1:]))}"
        with streaming.MDSWriter(out=str(job.folder), columns=columns) as writer:
            for sample in self.samples(job):
                writer.write(sample)

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
        streaming.base.util.clean_stale_shared_memory()
        data = _Mapped(
            _Sample(job),
            local=str(job.folder),
            shuffle=True,
            shuffle_seed=job.seed or 9176,
            num_canonical_nodes=1,
            batch_size=job.batch_size,
        )
        loader = streaming.StreamingDataLoader(
            data,
            batch_size=job.batch_size,
            num_workers=job.num_workers,
            persistent_workers=job.num_workers > 0,
            drop_last=True,
        )
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)


CONTENDERS = (Mosaic,)
