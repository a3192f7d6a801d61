"""Real albumentations pipelines with their own generators give the same bits in any worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader
from support import stream_hash

pytestmark = pytest.mark.vision
A = pytest.importorskip("albumentations")

WAYS: dict[str, dict[str, Any]] = {
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "3 workers, prefetch 1": {"num_workers": 3, "prefetch_factor": 1},
    "2 threads": {"num_workers": 2, "pool": "thread"},
    "5 threads": {"num_workers": 5, "pool": "thread"},
    "2 workers, fork": {"num_workers": 2, "multiprocessing_context": "fork"},
}


def pipeline() -> Any:
    return A.Compose(
        [
            A.RandomCrop(16, 16),
            A.HorizontalFlip(),
            A.OneOf([A.GaussNoise(p=1), A.CoarseDropout(p=1)], p=0.9),
            A.SomeOf([A.RandomBrightnessContrast(p=1), A.HueSaturationValue(p=1)], n=1, p=0.9),
            A.Affine(rotate=(-30, 30), p=0.8),
        ]
    )


class Images(Dataset):
    """Small images. Only the transform is random."""

    def __init__(self) -> None:
        self.images = np.random.RandomState(0).randint(0, 255, (40, 24, 24, 3)).astype(np.uint8)
        self.transform = pipeline()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.transform(image=self.images[index])["image"]), index


def ours(**arguments: Any) -> str:
    loader = DataLoader(Images(), batch_size=7, shuffle=True, seed=5, **arguments)
    return stream_hash.hashed(stream_hash.whole(loader))


@pytest.fixture(scope="module")
def expected() -> str:
    return ours()


@pytest.mark.parametrize("way", WAYS)
def test_pipelines_give_one_hash(way: str, expected: str) -> None:
    assert ours(**WAYS[way]) == expected


def test_each_epoch_and_each_sample_is_augmented_anew() -> None:
    class Same(Images):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(0)[0]

    loader = DataLoader(Same(), batch_size=10, seed=5, num_workers=2)
    seen = {stream_hash.numbers_of(image) for _ in range(2) for batch in loader for image in batch}
    assert len(seen) > 70  # of 80; a flip alone gives few distinct images


def test_an_augmented_sample_is_replayed() -> None:
    loader = DataLoader(Images(), batch_size=7, shuffle=True, seed=5, num_workers=2)
    images, indices = next(iter(loader))
    again, _ = penstock.replay(loader, 0, int(indices[3]))
    assert torch.equal(again, images[3])


def test_torch_s_own_loader_fails_with_1_against_2_workers() -> None:
    def theirs(num_workers: int) -> str:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loader = TorchDataLoader(Images(), batch_size=7, num_workers=num_workers)
        return stream_hash.hashed(stream_hash.whole(loader))

    assert len({theirs(0), theirs(1), theirs(2)}) == 3
