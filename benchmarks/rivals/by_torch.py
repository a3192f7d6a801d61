"""PyTorch's own DataLoader, with typical datasets."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from contract import MEAN, STD, Contender, Feed, Job, jpeg_files, make_names
from work import CropJpeg, CropPixels


class JpegFiles(torch.utils.data.Dataset[Any]):
    """Reads, decodes and crops with simplejpeg and OpenCV."""

    def __init__(self, files: list[tuple[str, int]], crop: Any) -> None:
        self.files, self.crop = files, crop

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path, label = self.files[index]
        with open(path, "rb") as file:
            return self.crop(file.read()), label


class Numbers(torch.utils.data.Dataset[Any]):
    """Applies the work to a number."""

    def __init__(self, count: int, work: Any) -> None:
        self.count, self.work = count, work

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.work(index))


class Rows(torch.utils.data.Dataset[Any]):
    """np.memmap, a batch at a time: the fastest handwritten dataset."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, None
        self.count = len(np.load(path, mmap_mode="r"))

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.take(self._rows(), indices, axis=0, mode="clip"))

    def _rows(self) -> Any:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
        return self.rows


class RawPixels(Rows):
    """Pixels in a memmap, cropped one by one."""

    def __init__(self, path: str, crop: Any) -> None:
        super().__init__(path)
        self.crop = crop

    __getitems__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> np.ndarray:
        made: np.ndarray = self.crop(self._rows()[index])
        return made


def as_it_is(batch: Any) -> Any:
    return batch


class ByPillow:
    """The recipe of the tutorials: Pillow and torchvision's transforms."""

    def __init__(self, antialias: bool, is_float: bool) -> None:
        from torchvision.transforms import v2

        end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*_unit())] if is_float else []
        crop = v2.RandomResizedCrop(224, antialias=antialias)
        self.steps = v2.Compose([crop, v2.RandomHorizontalFlip(), *self.middle(v2), *end])

    def middle(self, v2: Any) -> list[Any]:
        return [v2.PILToTensor()]

    def __call__(self, content: bytes) -> Any:
        from PIL import Image

        return self.steps(Image.open(io.BytesIO(content)).convert("RGB"))


class ByTorchvision(ByPillow):
    """torchvision's own decoder, with its transforms on tensors."""

    def middle(self, v2: Any) -> list[Any]:
        return []

    def __call__(self, content: bytes) -> Any:
        from torchvision.io import decode_jpeg

        return self.steps(decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8)))


def _unit() -> tuple[list[float], list[float]]:
    return [value / 255 for value in MEAN], [value / 255 for value in STD]


class PyTorch(Contender):
    name = "PyTorch"
    kinds = (*Contender.kinds, "strings")
    kind_of_loader: Any = torch.utils.data.DataLoader

    def open(self, job: Job) -> Feed:
        return self.feed(self.make(job, self.dataset(job), **self.extras(job)))

    def feed(self, loader: Any) -> Feed:
        return Feed(loader)

    def dataset(self, job: Job) -> Any:
        if job.kind == "jpeg":
            return JpegFiles(jpeg_files(job), self.crop(job))
        if job.kind == "numbers":
            return Numbers(job.count, job.work)
        if job.kind == "strings":
            return Strings(make_names(job), job.count)
        if job.kind == "raw":
            return RawPixels(str(job.data / "raw.npy"), CropPixels(job.antialias))
        return Rows(str(job.data / f"{job.kind}.npy"))

    def crop(self, job: Job) -> Any:
        return CropJpeg(job.antialias)

    def extras(self, job: Job) -> dict[str, Any]:
        return {"collate_fn": as_it_is} if job.kind in ("small", "large") else {}

    def make(self, job: Job, dataset: Any, **extras: Any) -> Any:
        if job.seed is not None:
            torch.manual_seed(job.seed)
            extras["generator"] = torch.Generator().manual_seed(job.seed)
        return self.kind_of_loader(
            dataset,
            batch_size=job.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=job.num_workers,
            persistent_workers=job.num_workers > 0,
            **extras,
        )


class PyTorchInline(PyTorch):
    """Without workers, which is best for data in memory and tiny samples."""

    name = "PyTorch, 0 workers"
    kinds = ("small", "large", "numbers")
    has_processes = False

    def open(self, job: Job) -> Feed:
        return super().open(job.with_workers(0))


class PyTorchTensors(PyTorch):
    """All data in memory, as a TensorDataset."""

    name = "PyTorch, TensorDataset, 0 workers"
    kinds = ("small", "large")

    def dataset(self, job: Job) -> Any:
        rows = np.load(job.data / f"{job.kind}.npy")
        return torch.utils.data.TensorDataset(torch.from_numpy(rows))

    def open(self, job: Job) -> Feed:
        return self.feed(self.make(job.with_workers(0), self.dataset(job)))


class PyTorchPillow(PyTorch):
    name = "PyTorch, Pillow"
    kinds = ("jpeg",)
    antialias = (True,)

    def crop(self, job: Job) -> Any:
        return ByPillow(job.antialias, job.is_float)


class PyTorchTorchvision(PyTorch):
    name = "PyTorch, torchvision's decoder"
    kinds = ("jpeg",)

    def crop(self, job: Job) -> Any:
        return ByTorchvision(job.antialias, job.is_float)


class Strings(torch.utils.data.Dataset[Any]):
    """List of names, as in most datasets. A sample is the length of a name."""

    def __init__(self, names: Any, count: int) -> None:
        self.names, self.count = names, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


class PyTorchArray(PyTorch):
    """The names in one array of bytes, which forked workers share. PyTorch's usual advice."""

    name = "PyTorch, NumPy array"
    kinds = ("strings",)

    def dataset(self, job: Job) -> Any:
        return Strings(np.array(make_names(job), np.bytes_), job.count)


CONTENDERS = (
    PyTorch,
    PyTorchInline,
    PyTorchTensors,
    PyTorchPillow,
    PyTorchTorchvision,
    PyTorchArray,
)
