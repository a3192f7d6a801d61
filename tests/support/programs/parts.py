"""Building blocks of programs: samples, generators, datasets, orders and collate functions.

Workers can import everything here, like a user's own module.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import penstock
from support.datasets import Pair, Record
from support.programs.record import Program

# -- samples ---------------------------------------------------------------------------------------


def _varying(index: int) -> torch.Tensor:
    return torch.arange(index % 5, dtype=torch.float32) + index


def _neg(index: int) -> torch.Tensor:
    return torch.tensor([1 + 1j * index, 2.0]).conj().imag


FORMS: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"sample {i}",
    "bytes": lambda i: f"sample {i}".encode(),
    "tensor": lambda i: torch.full((3,), float(i)),
    "scalar": lambda i: torch.tensor(i, dtype=torch.int16),
    "no elements": lambda i: torch.zeros(2, 0),
    "half": lambda i: torch.full((2, 2), i / 7, dtype=torch.float16),
    "big": lambda i: torch.arange(2000, dtype=torch.float64) * (i + 1),
    "very big": lambda i: torch.full((300, 400), i, dtype=torch.int32),
    "numpy": lambda i: np.full((2, 3), i, dtype=np.int16),
    "numpy scalar": lambda i: np.float32(i / 7),
    "dict": lambda i: {"x": torch.full((2,), i), "y": i, "name": f"{i}"},
    "tuple": lambda i: (torch.full((2,), float(i)), i),
    "list": lambda i: [i, np.arange(3) + i],
    "namedtuple": lambda i: Pair(torch.tensor([i]), i / 2),
    "dataclass": lambda i: Record(torch.tensor([i, i]), i),
    "nested": lambda i: {"a": [torch.tensor([i]), (i, {"b": np.ones(2) * i})], "c": f"{i}"},
    "conj": lambda i: torch.tensor([1j * i, 1 - 2j]).conj(),
    "neg": _neg,
    "transposed": lambda i: (torch.arange(6).reshape(2, 3) + i).t(),
    "expanded": lambda i: torch.tensor([i]).expand(4),
    "view": lambda i: torch.arange(100)[i % 50 : i % 50 + 3] + i,
    "ragged": _varying,
    "ragged dict": lambda i: {"x": _varying(i), "y": i},
    "ragged list": lambda i: list(range(i % 4)),
}
RAGGED = ("ragged", "ragged dict", "ragged list")
PACKABLE = ("int", "float", "str", "tensor", "big", "numpy", "dict", "tuple")

# -- locations of generators -----------------------------------------------------------------------

MODULE_GENERATOR = np.random.default_rng(1)
MODULE_RANDOM = random.Random(2)


class _Flip:
    """A user-defined transform."""

    shared = np.random.RandomState(3)

    def __init__(self, generator: Any = None) -> None:
        self.generator = generator

    def __call__(self) -> int:
        return int(self.generator.integers(1 << 60))


class _Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(9)


def _closure() -> Callable[[], int]:
    generator = np.random.default_rng(4)
    return lambda: int(generator.integers(1 << 60))


def _with_default(generator: random.Random = random.Random(5)) -> int:  # noqa: B008
    return generator.getrandbits(60)


def _draw_from(generator: random.Random) -> int:
    return generator.getrandbits(60)


class Holder:
    """Attributes that datasets and collate functions draw from, like a user's augmentation."""

    _class_generator = np.random.default_rng(6)
    _zebra = _antelope = np.random.default_rng(5)

    def __init__(self, draws: tuple[str, ...]) -> None:
        self.draws = draws
        self.generator = np.random.default_rng(7)
        self.state = np.random.RandomState(8)
        self.random = random.Random(9)
        # Old torch versions cannot pickle it, so only a dataset that draws from it has one.
        self.torch_generator = torch.Generator() if "torch generator" in draws else None
        self.transform = {"steps": [_Flip(None), _Flip(np.random.default_rng(10))]}
        self.closure = _closure()
        self.partial = functools.partial(_draw_from, random.Random(11))
        self.slotted = _Slotted()
        self.many = [np.random.default_rng(12 + n) for n in range(60)]
        self.lazy: Any = None
        self.folds = np.random.default_rng(80)
        self.kept: Any = None
        self.local = _make_local()
        self.by_key: dict[int, random.Random] = {}
        self.pipeline: Any = _make_pipelines(draws)

    def draw(self, index: int) -> torch.Tensor:
        return torch.tensor([DRAWS[name](self, index) for name in self.draws], dtype=torch.int64)

    def draw_lazily(self) -> int:
        if self.lazy is None:
            self.lazy = np.random.default_rng()
        return int(self.lazy.integers(1 << 60))

    def draw_once(self, index: int) -> int:
        if self.kept is None:
            self.kept = self.folds.permutation(1000)
        return int(self.kept[index % 1000])


def _make_local() -> Any:
    """Return an object of a class that workers receive by value."""

    class Local:
        zulu = np.random.default_rng(13)
        alpha = zulu

    return Local()


@functools.lru_cache(maxsize=8)
def _cached_generator(key: int) -> random.Random:
    return random.Random(key)


def _draw_and_restore(generator: random.Random) -> int:
    state = generator.getstate()
    drawn = generator.getrandbits(60)
    generator.setstate(state)
    return drawn


def _draw_unequally(index: int) -> int:
    for _ in range(index % 3):  # so that a leak would shift the next sample
        random.random(), np.random.rand(), torch.rand(1)
    return random.getrandbits(60)


def _draw_torch(generator: torch.Generator | None) -> int:
    high, low = torch.randint(1 << 24, (2,), generator=generator).tolist()
    return int(high << 24 | low)


DRAWS: dict[str, Callable[[Holder, int], int]] = {
    "random": lambda self, i: random.getrandbits(60),
    "numpy": lambda self, i: int(np.random.randint(1 << 60)),
    "torch": lambda self, i: _draw_torch(None),
    "all": lambda self, i: _draw_unequally(i),
    "late": lambda self, i: random.getrandbits(60) if i % 20 == 19 else i,
    "rng": lambda self, i: int(penstock.rng().integers(1 << 60)),
    "attribute": lambda self, i: int(self.generator.integers(1 << 60)),
    "numpy state": lambda self, i: int(self.state.randint(1 << 60)),
    "python state": lambda self, i: self.random.getrandbits(60),
    "torch generator": lambda self, i: _draw_torch(self.torch_generator),
    "nested": lambda self, i: self.transform["steps"][1](),
    "module": lambda self, i: int(MODULE_GENERATOR.integers(1 << 60)),
    "module random": lambda self, i: MODULE_RANDOM.getrandbits(60),
    "class body": lambda self, i: int(self._class_generator.integers(1 << 60)),
    "other class body": lambda self, i: int(_Flip.shared.randint(1 << 60)),
    "closure": lambda self, i: self.closure(),
    "default argument": lambda self, i: _with_default(),
    "partial": lambda self, i: self.partial(),
    "slots": lambda self, i: self.slotted.generator.getrandbits(60),
    "long list": lambda self, i: int(self.many[i % 60].integers(1 << 60)),
    "first use": lambda self, i: self.draw_lazily(),
    "kept": lambda self, i: self.draw_once(i),
    "local class": lambda self, i: int(self.local.zulu.integers(1 << 60)),
    "two names": lambda self, i: int(self._zebra.integers(1 << 60)),
    "bounded cache": lambda self, i: _cached_generator(i % 3).getrandbits(60),
    "by key": lambda self, i: self.by_key.setdefault(i % 70, random.Random(i % 70)).getrandbits(60),
    "restored": lambda self, i: _draw_and_restore(self.random),
    "torchvision": lambda self, i: _apply(self.pipeline["torchvision"], i),
    "torchvision v2": lambda self, i: _apply(self.pipeline["torchvision v2"], i),
    "albumentations": lambda self, i: _augment(self.pipeline["albumentations"], i),
}
GLOBAL_DRAWS = ("random", "numpy", "torch", "all", "late")
REPEATING_DRAWS = ("kept", "late", "torchvision", "torchvision v2", "albumentations")
"""Draws for which two samples can be equal without a fault."""
_NEEDED_PACKAGE = {
    "torchvision": "torchvision",
    "torchvision v2": "torchvision",
    "albumentations": "albumentations",
}


def usable_draws() -> list[str]:
    """Return the draws whose packages are installed and that torch can send to a worker."""
    usable = [
        name
        for name in DRAWS
        if name not in _NEEDED_PACKAGE or importlib.util.find_spec(_NEEDED_PACKAGE[name])
    ]
    if int(torch.__version__.split(".")[0]) < 2:
        usable.remove("torch generator")
    return usable


def _image(index: int) -> Any:
    return np.random.RandomState(index).randint(0, 256, (12, 12, 3)).astype(np.uint8)


def _apply(transform: Any, index: int) -> int:
    return zlib.crc32(transform(torch.from_numpy(_image(index)).permute(2, 0, 1)).numpy().tobytes())


def _augment(transform: Any, index: int) -> int:
    return zlib.crc32(np.ascontiguousarray(transform(image=_image(index))["image"]).tobytes())


def _make_pipelines(draws: tuple[str, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "torchvision" in draws:
        from torchvision import transforms as T

        made["torchvision"] = T.Compose(
            [T.RandomCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.5), T.RandomErasing()]
        )
    if "torchvision v2" in draws:
        from torchvision.transforms import v2

        made["torchvision v2"] = v2.Compose(
            [
                v2.RandomResizedCrop(8, antialias=True),
                v2.RandomVerticalFlip(),
                v2.RandomPosterize(4),
            ]
        )
    if "albumentations" in draws:
        import albumentations as A

        made["albumentations"] = A.Compose(
            [A.RandomCrop(8, 8), A.HorizontalFlip(), A.RandomBrightnessContrast(), A.GaussNoise()]
        )
    return made


# -- datasets --------------------------------------------------------------------------------------


class BadFile(OSError):
    """Raised by a bad sample."""


class Made(Dataset):
    """Sample i is ``FORMS[form](i)`` with its drawn numbers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.holder = Holder(program.draws)

    def __len__(self) -> int:
        return self.program.length

    def __getitem__(self, index: int) -> Any:
        program = self.program
        if program.sample_ms:
            time.sleep((index * 7 % 3) * program.sample_ms / 1000)
        drawn = self.holder.draw(index) if program.draws else None
        if index in program.bad:
            if program.bad_kind == "none":
                return None
            raise BadFile(f"file {index} is broken", index)
        sample = FORMS[program.form](index)
        return sample if drawn is None else (sample, drawn)


class MadeInBatches(Made):
    """The same dataset, with ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """Samples of ``Made`` in sequence. Each worker yields its own share."""

    def __init__(self, program: Program) -> None:
        self.made = Made(program)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, len(self.made), step):
            yield self.made[index]


class Transformed(Dataset):
    """A dataset that wraps another one and has its own transform."""

    def __init__(self, dataset: Any) -> None:
        self.inner = {"dataset": dataset}

    def __len__(self) -> int:
        return len(self.inner["dataset"])

    def __getitem__(self, index: int) -> Any:
        return self.inner["dataset"][index]


def _stack(dataset: Any, folder: Path) -> Any:
    from torch.utils.data import StackDataset

    return StackDataset(dataset, dataset)


def _pack(dataset: Any, folder: Path) -> Any:
    return penstock.pack(dataset, folder / f"packed-{len(list(folder.iterdir()))}", workers=0)


def _cache(dataset: Any, folder: Path) -> Any:
    return penstock.cached(dataset, folder / f"cache-{len(list(folder.iterdir()))}")


def _subset(dataset: Any, folder: Path) -> Any:
    return Subset(dataset, [*range(len(dataset))][::-2])


def _concat(dataset: Any, folder: Path) -> Any:
    return ConcatDataset([dataset, Subset(dataset, range(min(3, len(dataset))))])


def _split(dataset: Any, folder: Path) -> Any:
    return penstock.split(dataset, [0.75, 0.25], seed=3)[0]


WRAPS: dict[str, Callable[[Any, Path], Any]] = {
    "subset": _subset,
    "concat": _concat,
    "split": _split,
    "transformed": lambda dataset, folder: Transformed(dataset),
    "getitems": lambda dataset, folder: dataset,  # see make_dataset
    "stack": _stack,
    "cached": _cache,
    "cached ram": lambda dataset, folder: penstock.cached(dataset, "ram"),
    "packed": _pack,
}
STORING = ("cached", "cached ram", "packed")


def _make_source(program: Program) -> Any:
    made = (MadeInBatches if "getitems" in program.wraps else Made)(program)
    if program.source == "made":
        return made
    if program.source == "iterable":
        return Stream(program)
    if program.source == "range":
        return range(program.length)
    if program.source == "tensors":
        numbers = torch.arange(program.length)
        return TensorDataset(numbers, numbers.float().outer(torch.ones(5)), -numbers)
    samples = [FORMS[program.form](index) for index in range(program.length)]
    if program.source == "list":
        return samples
    if program.source == "shared_list":
        return penstock.SharedList(samples)
    assert program.source == "shared_dict"
    return penstock.SharedDict(enumerate(samples))


def make_dataset(program: Program, folder: Path) -> Any:
    """Return the dataset of a program. ``folder`` is for its stored files."""
    dataset = _make_source(program)
    for wrap in program.wraps:
        dataset = WRAPS[wrap](dataset, folder)
    return dataset


# -- orders ----------------------------------------------------------------------------------------


class _Sampler:
    """A user-defined sampler."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter([*range(1, self.length, 2), *range(0, self.length, 2)])


class _Batches:
    """A user-defined batch sampler, with batches of unequal sizes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def _batches(self) -> list[list[int]]:
        batches, start = [], 0
        while start < self.length:
            size = 1 + len(batches) % 4
            batches.append([*range(start, min(start + size, self.length))])
            start += size
        return batches

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())


class _RefilledBatches(_Batches):
    """Yields one list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for indices in self._batches():
            batch[:] = indices
            yield batch


def _seeded_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(5)
    return generator


def _weights(length: int) -> list[float]:
    return [1.0 + index % 3 for index in range(length)]


def _weighted(length: int, batch: dict[str, Any]) -> dict[str, Any]:
    generator = _seeded_generator()
    sampler = WeightedRandomSampler(_weights(length), length, generator=generator)
    return {"sampler": sampler, **batch}


def _replacing(length: int, batch: dict[str, Any]) -> dict[str, Any]:
    sampler = RandomSampler(
        range(length), replacement=True, num_samples=length + 3, generator=_seeded_generator()
    )
    return {"sampler": sampler, **batch}


def _batched(length: int, batch: dict[str, Any]) -> dict[str, Any]:
    sampler = RandomSampler(range(length), generator=_seeded_generator())
    return {"batch_sampler": BatchSampler(sampler, batch["batch_size"], batch["drop_last"])}


def _bucketed(length: int, batch: dict[str, Any]) -> dict[str, Any]:
    lengths = [1 + index * 5 % 7 for index in range(length)]
    batches = penstock.BucketedBatches(
        lengths,
        batch_size=batch["batch_size"],
        bucket_batches=2,
        seed=4,
        drop_last=batch["drop_last"],
    )
    return {"batch_sampler": batches}


ORDERS: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
    "sequential": lambda length, batch: {"shuffle": False, **batch},
    "shuffle": lambda length, batch: {"shuffle": True, **batch},
    "shuffle generator": lambda length, batch: {
        "shuffle": True,
        "generator": _seeded_generator(),
        **batch,
    },
    "weighted generator": _weighted,
    "replacement": _replacing,
    "sampler": lambda length, batch: {"sampler": _Sampler(length), **batch},
    "list": lambda length, batch: {"sampler": [*range(length)][::-1], **batch},
    "batches": lambda length, batch: {"batch_sampler": _Batches(length)},
    "batch list": lambda length, batch: {"batch_sampler": [*_Batches(length)]},
    "refilled batches": lambda length, batch: {"batch_sampler": _RefilledBatches(length)},
    "batch sampler": _batched,
    "seeded order": lambda length, batch: {
        "sampler": penstock.SeededOrder(length, seed=6),
        **batch,
    },
    "weighted order": lambda length, batch: {
        "sampler": penstock.WeightedOrder(_weights(length), num_samples=length + 2, seed=6),
        **batch,
    },
    "block order": lambda length, batch: {
        "sampler": penstock.BlockOrder(length, block_size=3, num_mixed=2, seed=6),
        **batch,
    },
    "buckets": _bucketed,
}
BATCH_ORDERS = ("batches", "refilled batches", "batch list", "batch sampler", "buckets")
REPLACING_ORDERS = ("weighted generator", "replacement", "weighted order")
"""Orders in which an index can occur twice in an epoch."""

# -- collate functions -----------------------------------------------------------------------------


def _collate_and_draw(samples: list[Any]) -> Any:
    drawn = [random.random(), np.random.rand(), float(torch.rand(1))]
    return default_collate(samples), drawn


class _HeldCollate:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(20)
        self.random = random.Random(21)

    def __call__(self, samples: list[Any]) -> Any:
        return samples, self.generator.random(), self.random.random()


def _collate_views(samples: list[Any]) -> Any:
    base = torch.arange(float(len(samples) * 4)).reshape(len(samples), 4)
    return base[:, 1:], base[:1], base.t(), samples


def _collate_padded(samples: list[Any]) -> Any:
    rows = [row if isinstance(row, torch.Tensor) and row.dim() == 1 else None for row in samples]
    if any(row is None or row.is_complex() for row in rows):
        return samples
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def make_collate(name: str) -> Any:
    """Return a ``collate_fn``, or None for the default one."""
    if name == "default":
        return None
    if name == "list":
        return list
    if name == "lambda":
        size = 1
        return lambda samples: (samples, len(samples) + size)
    if name == "numpy":
        return lambda samples: np.array([repr(sample) for sample in samples], dtype=object)
    if name == "held":
        return _HeldCollate()
    return {"draws": _collate_and_draw, "views": _collate_views, "pads": _collate_padded}[name]


# -- worker_init_fn and on_error -------------------------------------------------------------------


def init_nothing(worker: int) -> None:
    """A worker_init_fn that does nothing."""


def init_seeds(worker: int) -> None:
    """Set seeds, which has no effect if randomness belongs to the sample."""
    random.seed(worker)
    np.random.seed(worker)


INITS: dict[str, Any] = {"": None, "nothing": init_nothing, "seeds": init_seeds}


def mend(index: Any, error: Exception) -> Any:
    """``on_error`` as a function: skips samples with an odd index, and raises for the others."""
    if isinstance(index, int) and index % 2:
        return None
    raise error
