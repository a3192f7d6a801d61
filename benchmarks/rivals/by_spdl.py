"""SPDL, a pipeline of threads with its own decoder or with simplejpeg and OpenCV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import spdl.io
import torch
from contract import SIZE, Contender, Feed, Job, NotOffered, jpeg_files
from spdl.pipeline import PipelineBuilder
from work import CropJpeg, CropPixels, draw_crop


class _Order:
    """Batches of indices, shuffled again in each epoch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)

    def __iter__(self) -> Iterator[list[int]]:
        size = self.job.batch_size
        while True:
            order = self.random.permutation(self.job.count).tolist()
            for first in range(0, len(order) - size + 1, size):
                yield order[first : first + size]
            if not self.job.is_endless:
                return


class ByHand(Contender):
    """Python functions in its threads. simplejpeg and OpenCV release the GIL."""

    name = "SPDL, simplejpeg + OpenCV"
    has_processes = False

    def open(self, job: Job) -> Feed:
        return Feed(_Pipeline(self, job))

    def build(self, job: Job) -> Any:
        builder = PipelineBuilder().add_source(_Order(job))
        builder = builder.pipe(
            self.function(job), concurrency=job.num_workers, output_order="input"
        )
        return builder.add_sink(4).build(num_threads=job.num_workers)

    def function(self, job: Job) -> Any:
        if job.kind == "jpeg":
            files, crop = jpeg_files(job), CropJpeg(job.antialias)

            def load(indices: list[int]) -> torch.Tensor:
                made = np.empty((len(indices), SIZE, SIZE, 3), np.uint8)
                for place, index in enumerate(indices):
                    with open(files[index][0], "rb") as file:
                        made[place] = crop(file.read())
                return torch.from_numpy(made)

            return load
        if job.kind == "numbers":
            return lambda indices: torch.from_numpy(np.stack([job.work(i) for i in indices]))
        rows = np.load(job.data / f"{job.kind}.npy", mmap_mode="r")
        if job.kind == "raw":
            crop_pixels = CropPixels(job.antialias)
            return lambda indices: torch.from_numpy(
                np.stack([crop_pixels(rows[i]) for i in indices])
            )
        return lambda indices: torch.from_numpy(np.take(rows, indices, axis=0, mode="clip"))


class _Pipeline:
    """Creates a new pipeline for each epoch, because a pipeline runs only once."""

    def __init__(self, contender: ByHand, job: Job) -> None:
        self.contender, self.job = contender, job

    def __iter__(self) -> Iterator[Any]:
        pipeline = self.contender.build(self.job)
        with pipeline.auto_stop():
            yield from pipeline


class OwnDecoder(ByHand):
    """FFmpeg through SPDL. Crop, scale and flip are filters, with a single colour conversion."""

    name = "SPDL, its own decoder"
    kinds = formats = ("jpeg",)
    antialias = (False,)

    def prepare(self, job: Job) -> None:
        try:
            _decode(jpeg_files(job)[0][0])
        except RuntimeError as error:
            raise NotOffered("its decoder needs FFmpeg's libraries (Debian: ffmpeg)") from error

    def function(self, job: Job) -> Any:
        files = jpeg_files(job)

        def load(indices: list[int]) -> torch.Tensor:
            frames = [_decode(files[index][0]) for index in indices]
            buffer = spdl.io.convert_frames(frames)
            return spdl.io.to_torch(buffer)

        return load


def _decode(path: str) -> Any:
    top, left, height, width = draw_crop(375, 500)
    flip = "hflip," if np.random.random() < 0.5 else ""
    scale = f"scale={SIZE}:{SIZE}:flags=bilinear,format=pix_fmts=rgb24"
    graph = f"crop={width}:{height}:{left}:{top},{flip}{scale}"
    return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=graph)


CONTENDERS = (ByHand, OwnDecoder)
