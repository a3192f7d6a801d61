"""LanceDB, with a table, its StreamingDataset and PyTorch's loader, as in its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from contract import Contender, Feed, Job, jpeg_files
from lancedb.streaming import StreamingDataset
from work import CropJpeg, CropPixels

ROWS_AT_ONCE = 512


class _Rows:
    """Transform of a record batch, which returns one sample per row."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        kinds = {"jpeg": CropJpeg, "raw": CropPixels}
        self.work = kinds[job.kind](job.antialias) if job.kind in kinds else job.work
        self.shape = _shape(job)

    def __call__(self, rows: pa.RecordBatch) -> list[Any]:
        column = rows.column("x")
        if self.kind == "jpeg":
            labels = rows.column("label").to_pylist()
            contents = (content.as_py() for content in column)
            return [
                (self.work(content), label) for content, label in zip(contents, labels, strict=True)
            ]
        if self.kind == "numbers":
            return [torch.from_numpy(self.work(number)) for number in column.to_pylist()]
        pixels = column.flatten().to_numpy().reshape(len(rows), *self.shape)
        if self.work is None:
            return list(torch.from_numpy(pixels.copy()))
        return [self.work(image) for image in pixels]


class _Loader:
    """One StreamingDataset per epoch, because a dataset is one pass over the table."""

    def __init__(self, job: Job) -> None:
        self.job, self.epoch, self.state = job, 0, None
        self.table = lancedb.connect(str(job.folder)).open_table("set")
        self.data: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.data = StreamingDataset(
            self.table,
            shuffle_seed=self.job.seed or 0,
            epoch=self.epoch,
            transform=_Rows(self.job),
            transform_parallelism=max(1, self.job.num_workers),
        )
        self.epoch += 1
        if self.state is not None:
            self.data.load_state_dict(self.state)
            self.state = None
        return iter(
            torch.utils.data.DataLoader(
                self.data, batch_size=self.job.batch_size, num_workers=0, drop_last=True
            )
        )

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Lance(Contender):
    name = "LanceDB"
    formats = Contender.kinds
    has_processes = False

    def prepare(self, job: Job) -> None:
        batches = self.batches(job)
        first = next(batches)
        table = lancedb.connect(str(job.folder)).create_table("set", first)
        for batch in batches:
            table.add(batch)
        table.optimize()

    def batches(self, job: Job) -> Iterator[pa.Table]:
        files = jpeg_files(job) if job.kind == "jpeg" else []
        rows = None
        if job.kind not in ("jpeg", "numbers"):
            rows = np.load(job.data / f"{job.kind}.npy", "r")
        for start in range(0, job.count, ROWS_AT_ONCE if job.kind != "numbers" else job.count):
            stop = min(job.count, start + ROWS_AT_ONCE)
            if job.kind == "jpeg":
                part = files[start:stop]
                contents = [Path(path).read_bytes() for path, _ in part]
                yield pa.table({"x": contents, "label": [label for _, label in part]})
            elif rows is None:
                yield pa.table({"x": np.arange(job.count)})
            else:
                flat = np.ascontiguousarray(rows[start:stop]).reshape(-1)
                size = int(np.prod(rows.shape[1:]))
                yield pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(flat), size)})

    def open(self, job: Job) -> Feed:
        loader = _Loader(job)
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)


def _shape(job: Job) -> tuple[int, ...]:
    if job.kind in ("jpeg", "numbers"):
        return ()
    return tuple(np.load(job.data / f"{job.kind}.npy", "r").shape[1:])


CONTENDERS = (Lance,)
