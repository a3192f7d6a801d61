"""Grain, with a MapDataset prefetched by processes or threads."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np
import torch
from contract import Contender, Feed, Job, jpeg_files, make_names
from work import CropJpeg, CropPixels, Random


class _Files:
    """Source for Grain, with a length and an index."""

    def __init__(self, files: list[tuple[str, int]], crop: Any) -> None:
        self.files, self.crop = files, crop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path, label = self.files[index]
        with open(path, "rb") as file:
            return self.crop(file.read()), np.int64(label)


class _Mapped:
    """Rows of an array file, opened in the process that reads them."""

    def __init__(self, path: str, count: int) -> None:
        self.path, self.count, self.rows = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
        return self.rows[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rows": None}


class _Draw(grain.transforms.RandomMap):
    """Like Random, but with the generator that Grain provides for reproducible transforms."""

    def random_map(self, element: Any, rng: np.random.Generator) -> np.ndarray:
        return np.array([element, *rng.random(3)], np.float64)


def _length(name: Any) -> np.ndarray:
    return np.int64(len(name))


class Processes(Contender):
    name = "Grain, processes"
    kinds = (*Contender.kinds, "strings")

    def open(self, job: Job) -> Feed:
        dataset = self.map(job).repeat() if job.is_endless else self.map(job)
        dataset = dataset.batch(job.batch_size, drop_remainder=True)
        return self.feed(self.prefetch(dataset, job))

    def feed(self, dataset: Any) -> Feed:
        return _GrainFeed(dataset)

    def map(self, job: Job) -> Any:
        source = grain.MapDataset.source(self.source(job)).seed(job.seed or 0).shuffle()
        if job.kind == "raw":
            return source.map(CropPixels(job.antialias))
        if job.kind == "strings":
            return source.map(_length)
        if job.kind != "numbers":
            return source
        return source.random_map(_Draw()) if isinstance(job.work, Random) else source.map(job.work)

    def source(self, job: Job) -> Any:
        if job.kind == "jpeg":
            return _Files(jpeg_files(job), CropJpeg(job.antialias))
        if job.kind in ("numbers", "strings"):
            return make_names(job) if job.kind == "strings" else range(job.count)
        return _Mapped(str(job.data / f"{job.kind}.npy"), job.count)

    def prefetch(self, dataset: Any, job: Job) -> Any:
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=job.num_workers)
        reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        return dataset.to_iter_dataset(reading).mp_prefetch(options)


class Threads(Processes):
    name = "Grain, threads"
    kinds = Contender.kinds
    has_processes = False

    def prefetch(self, dataset: Any, job: Job) -> Any:
        options = grain.ReadOptions(num_threads=job.num_workers, prefetch_buffer_size=8)
        return dataset.to_iter_dataset(options)


class _GrainFeed(Feed):
    """Iterator with a state. Converts arrays to tensors without a copy."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, state=self._state, restore=self._restore)
        self.iterator: Any = None
        self.saved: Any = None

    def _state(self) -> Any:
        return self.iterator.get_state()

    def _restore(self, state: Any) -> None:
        self.saved = state

    def __iter__(self) -> Any:
        self.iterator = iter(self.loader)
        if self.saved is not None:
            self.iterator.set_state(self.saved)
        return map(_to_tensor, self.iterator)


def _to_tensor(batch: Any) -> Any:
    return torch.from_numpy(batch[0] if isinstance(batch, tuple) else batch)


CONTENDERS = (Processes, Threads)
