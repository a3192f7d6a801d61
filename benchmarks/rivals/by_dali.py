"""DALI on the CPU, with its own readers, decoder and crops, in threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from contract import MEAN, SIZE, STD, Contender, Feed, Job
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator


@pipeline_def
def _images(job: Job) -> Any:
    """Decode only the crop, as its documentation recommends."""
    encoded, labels = fn.readers.file(
        file_root=str(job.data / "jpeg"),
        random_shuffle=True,
        name="reader",
        initial_fill=1024,
    )
    images = fn.decoders.image_random_crop(
        encoded, device="cpu", output_type=types.RGB, random_aspect_ratio=[0.75, 4 / 3]
    )
    images = fn.resize(images, size=(SIZE, SIZE), antialias=job.antialias)
    mirror = fn.random.coin_flip(probability=0.5)
    if job.is_float:
        images = fn.crop_mirror_normalize(
            images, mean=MEAN, std=STD, mirror=mirror, dtype=types.FLOAT, output_layout="CHW"
        )
    else:
        images = fn.flip(images, horizontal=mirror)
    return images, labels


@pipeline_def
def _rows(job: Job) -> Any:
    """Write one file per sample, for its reader of NumPy files."""
    return fn.readers.numpy(file_root=str(job.folder), random_shuffle=True, name="reader")


class _FromPython:
    """Source for its worker processes, with one sample per call."""

    def __init__(self, job: Job) -> None:
        self.count, self.work, self.seed = job.count, job.work, job.seed or 0
        self.order: Any = None

    def __call__(self, info: Any) -> np.ndarray:
        if info.idx_in_epoch >= self.count:
            raise StopIteration
        if self.order is None or self.order[0] != info.epoch_idx:
            random = np.random.default_rng([self.seed, info.epoch_idx])
            self.order = (info.epoch_idx, random.permutation(self.count))
        made: np.ndarray = self.work(int(self.order[1][info.idx_in_epoch]))
        return made


@pipeline_def
def _numbers(job: Job) -> Any:
    return fn.external_source(source=_FromPython(job), parallel=True, batch=False, num_outputs=None)


class Dali(Contender):
    name = "DALI on the CPU"
    kinds = ("jpeg", "small", "large", "numbers")
    formats = ("small", "large")
    without_state = "checkpoints of its own readers only, not of samples from Python"

    def prepare(self, job: Job) -> None:
        job.folder.mkdir(parents=True)
        for index, row in enumerate(np.load(job.data / f"{job.kind}.npy", mmap_mode="r")):
            np.save(job.folder / f"{index:06d}.npy", row)

    def open(self, job: Job) -> Feed:
        keywords: dict[str, Any] = {
            "batch_size": job.batch_size,
            "num_threads": job.num_workers,
            "device_id": None,
            "seed": -1 if job.seed is None else job.seed,
        }
        if job.kind == "numbers":
            return self.numbers(job, keywords)
        make = _images if job.kind == "jpeg" else _rows
        names = ["x", "label"] if job.kind == "jpeg" else ["x"]
        policy = {"last_batch_policy": LastBatchPolicy.DROP, "auto_reset": True}
        loader = DALIGenericIterator(make(job, **keywords), names, reader_name="reader", **policy)
        return Feed(loader, adapt=_first)

    def numbers(self, job: Job, keywords: dict[str, Any]) -> Feed:
        keywords |= {"py_num_workers": job.num_workers, "py_start_method": "fork"}
        policy = {"last_batch_policy": LastBatchPolicy.DROP, "auto_reset": True}
        return Feed(DALIGenericIterator(_numbers(job, **keywords), ["x"], **policy), adapt=_first)


def _first(batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch[0]["x"]
    return found


CONTENDERS = (Dali,)
