"""WebDataset, with tar files that workers read in order and shuffle in a buffer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import webdataset as wds
from contract import Contender, Feed, Job, jpeg_files
from work import CropJpeg, CropPixels

NUM_SHARDS = 8


class _Sample:
    """Transforms a sample, depending on the kind of data."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        kinds = {"jpeg": CropJpeg, "raw": CropPixels}
        self.work = kinds[job.kind](job.antialias) if job.kind in kinds else job.work

    def __call__(self, sample: dict[str, bytes]) -> Any:
        if self.kind == "jpeg":
            return self.work(sample["jpg"]), int(sample["cls"])
        if self.kind == "numbers":
            return (torch.from_numpy(self.work(int(sample["cls"]))),)
        array = _read_npy(sample["npy"])
        return (self.work(array) if self.work else array,)


def _read_npy(content: bytes) -> np.ndarray:
    """Decode an array like NumPy's own reader, without a copy."""
    length = int.from_bytes(content[8:10], "little")
    header: dict[str, Any] = eval(content[10 : 10 + length].decode("latin-1"), {})
    flat = np.frombuffer(content, header["descr"], offset=10 + length)
    return flat.reshape(header["shape"])


class WebDataset(Contender):
    name = "WebDataset"
    formats = Contender.kinds

    def prepare(self, job: Job) -> None:
        job.folder.mkdir(parents=True)
        per_shard = -(-job.count // max(NUM_SHARDS, job.num_workers))
        pattern = str(job.folder / "shard-%04d.tar")
        with wds.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
            for index, sample in enumerate(self.samples(job)):
                writer.write({"__key__": f"{index:08d}", **sample})

    def samples(self, job: Job) -> Any:
        if job.kind == "jpeg":
            for path, label in jpeg_files(job):
                with open(path, "rb") as file:
                    yield {"jpg": file.read(), "cls": label}
        elif job.kind == "numbers":
            yield from ({"cls": number} for number in range(job.count))
        else:
            yield from ({"npy": row} for row in np.load(job.data / f"{job.kind}.npy", "r"))

    def open(self, job: Job) -> Feed:
        shards = sorted(map(str, job.folder.glob("*.tar")))
        given = {} if job.seed is None else {"seed": job.seed}
        data = wds.WebDataset(shards, shardshuffle=len(shards), **given)
        generator = random.Random(job.seed) if job.seed is not None else None
        data = data.shuffle(1000, **({"rng": generator} if generator else {}))
        data = data.map(_Sample(job)).batched(job.batch_size, partial=False)
        loader = wds.WebLoader(
            data,
            batch_size=None,
            num_workers=job.num_workers,
            persistent_workers=job.num_workers > 0,
        )
        return Feed(loader)


CONTENDERS = (WebDataset,)
