"""Real torchvision v2 transforms give one pixel hash over 3 epochs, with any kind of worker."""

from __future__ import annotations

import itertools
import platform
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock import DataLoader
from support import stream_hash
from support.datasets import assert_same

pytest.importorskip("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")
from torchvision import datasets  # noqa: E402

pytestmark = pytest.mark.vision

QUICK = stream_hash.quick_grid()
TRANSFORM = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop((16, 16), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandAugment(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(p=0.5),
    ]
)


class Images:
    """Small images, created once. Only the transform is random."""

    def __init__(self, transform: Any = TRANSFORM) -> None:
        fake = datasets.FakeData(40, (3, 24, 24), num_classes=5)
        self.images = [fake[index] for index in range(40)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, label = self.images[index]
        return self.transform(image), int(label)


IMAGES = Images()


def make(**arguments: Any) -> Any:
    return DataLoader(IMAGES, batch_size=7, shuffle=True, seed=5, **arguments)


@pytest.fixture(scope="module")
def expected() -> str:
    return stream_hash.hashed(stream_hash.whole(make()))


@pytest.mark.parametrize("way", QUICK)
def test_transforms_give_one_hash(way: str, expected: str) -> None:
    assert stream_hash.hashed(stream_hash.whole(make(**QUICK[way]))) == expected


@pytest.mark.parametrize(
    "way", ["2 workers, forkserver, prefetch 4", "7 workers, thread, prefetch 4"]
)
def test_transforms_give_one_hash_when_killed_and_resumed(way: str, expected: str) -> None:
    ways = itertools.cycle([QUICK[way], {}, {"num_workers": 3}])
    assert stream_hash.hashed(stream_hash.interrupted(make, ways, random.Random(way))) == expected


def test_transforms_give_one_hash_under_spawn(expected: str) -> None:
    loader = make(num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
    assert stream_hash.hashed(stream_hash.whole(loader)) == expected
    loader.close()


def test_a_transformed_sample_is_replayed() -> None:
    images, _ = next(iter(make(num_workers=3)))
    first = penstock.SeededOrder(40, seed=5).index_at(0)
    assert_same(
        torch.as_tensor(penstock.replay(make(), 0, first)[0]).as_subclass(torch.Tensor), images[0]
    )


@pytest.mark.skipif(
    platform.machine() == "aarch64",
    reason="torch's own forked workers hang on arm64 once this process has used OpenMP",
)
def test_torch_s_own_loader_fails_with_2_against_4_workers() -> None:
    def theirs(num_workers: int) -> str:
        torch.manual_seed(0)
        loader = TorchDataLoader(IMAGES, batch_size=7, num_workers=num_workers)
        return stream_hash.hashed(stream_hash.whole(loader))

    assert theirs(2) != theirs(4)
    assert theirs(2) == theirs(2)
