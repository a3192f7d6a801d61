"""torchvision's datasets, transforms and tensors give the same batches as with torch's loader."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, default_collate

from penstock import DataLoader
from support.datasets import QUICK_WAYS, WAYS, assert_same, collect, differences

torchvision = pytest.importorskip("torchvision")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")
v2 = pytest.importorskip("torchvision.transforms.v2")
from torchvision import datasets, transforms  # noqa: E402

pytestmark = pytest.mark.vision


def fake(transform: Any, size: int = 24) -> Any:
    return datasets.FakeData(24, (3, size, size), num_classes=5, transform=transform)


FIXED = {
    "to tensor": transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)]
    ),
    "v2, resized": v2.Compose(
        [v2.ToImage(), v2.Resize((16, 16)), v2.ToDtype(torch.float32, scale=True)]
    ),
    "v2 image as it is": v2.ToImage(),
    "to array": np.array,
}
RANDOM = {
    "crop and flip": transforms.Compose(
        [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    ),
    "v2 crop, flip and colours": v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop((16, 16), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.ToDtype(torch.float32, scale=True),
        ]
    ),
    "v2 auto-augment": v2.Compose([v2.ToImage(), v2.RandAugment(), v2.ToDtype(torch.float32)]),
    "a lambda": transforms.Compose(
        [transforms.ToTensor(), transforms.Lambda(lambda image: image + torch.randn(1))]
    ),
}


@pytest.mark.parametrize("way", [*QUICK_WAYS, "spawn"])
@pytest.mark.parametrize("name", ["v2, resized"])
def test_images_are_torch_s_in_every_way(name: str, way: str) -> None:
    ours = collect(DataLoader(fake(FIXED[name]), batch_size=5, **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(fake(FIXED[name]), batch_size=5)))


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("size", [24, 100])
def test_fixed_transforms_give_torch_s_batches(name: str, way: str, size: int) -> None:
    ours = collect(DataLoader(fake(FIXED[name], size), batch_size=5, **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(fake(FIXED[name], size), batch_size=5)))


def random_epoch(name: str, kind: Any = DataLoader, seed: int = 0, **arguments: Any) -> list[Any]:
    torch.manual_seed(seed)
    return collect(kind(fake(RANDOM[name]), batch_size=5, shuffle=True, **arguments))


@pytest.mark.parametrize("name", RANDOM)
def test_random_transforms_give_the_same_bits_for_any_number_of_workers(name: str) -> None:
    inline = random_epoch(name)
    assert_same(random_epoch(name, num_workers=1), inline)
    assert_same(random_epoch(name, num_workers=3), inline)
    assert_same(random_epoch(name, num_workers=2, pool="thread"), inline)
    assert differences(random_epoch(name, seed=1), inline)


@pytest.mark.skipif(
    platform.machine() == "aarch64",
    reason="torch's own forked workers hang on arm64 once this process has used OpenMP",
)
@pytest.mark.parametrize("name", RANDOM)
def test_torch_s_own_loader_gives_other_bits_with_2_workers_than_with_1(name: str) -> None:
    one, two = (random_epoch(name, TorchDataLoader, num_workers=n) for n in (1, 2))
    assert differences(one, two)


class Detection(Dataset):
    """Samples for detection models: an image and a dict of boxes, labels and masks."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        count = 1 + index % 3
        boxes = torch.tensor([[0.0, 0.0, 5.0 + n, 6.0] for n in range(count)])
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(20, 20)),
            "labels": torch.arange(count),
            "masks": tv_tensors.Mask(torch.ones(count, 20, 20, dtype=torch.uint8) * index),
        }
        image = tv_tensors.Image(torch.full((3, 20, 20), index, dtype=torch.uint8))
        return v2.RandomHorizontalFlip(p=1.0)(image, target)


def as_lists(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_tv_tensors_keep_their_classes_and_their_facts(way: str) -> None:
    ours = list(DataLoader(Detection(), batch_size=3, collate_fn=as_lists, **WAYS[way]))
    theirs = list(TorchDataLoader(Detection(), batch_size=3, collate_fn=as_lists))
    assert_same(ours, theirs)
    boxes = ours[1][1][0]["boxes"]
    assert type(boxes) is tv_tensors.BoundingBoxes
    assert boxes.canvas_size == (20, 20)
    assert boxes.format == theirs[1][1][0]["boxes"].format


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_tv_tensors_under_default_collate_become_what_torch_makes_of_them(way: str) -> None:
    class Images(Detection):
        def __getitem__(self, index: int) -> Any:
            image, _ = super().__getitem__(index)
            return image, tv_tensors.Mask(image[0])

    ours = list(DataLoader(Images(), batch_size=4, **WAYS[way]))
    assert_same(ours, list(TorchDataLoader(Images(), batch_size=4)))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_cutmix_and_mixup_in_a_collate_fn_work(way: str) -> None:
    mix = v2.MixUp(num_classes=5)

    def collate(samples: list[Any]) -> Any:
        return mix(*default_collate(samples))

    loader = DataLoader(fake(transforms.ToTensor()), batch_size=6, collate_fn=collate, **WAYS[way])
    for images, labels in loader:
        assert images.shape == (6, 3, 24, 24)
        assert labels.shape == (6, 5)
        assert torch.allclose(labels.sum(1), torch.ones(6))


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_an_image_folder_gives_torch_s_batches(way: str, tmp_path: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(6):
            pixels = np.full((20 + number, 30, 3), number * 20, np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    transform = transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])
    folder = datasets.ImageFolder(str(tmp_path), transform)
    ours = collect(DataLoader(folder, batch_size=4, **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(folder, batch_size=4)))


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    from PIL import Image, UnidentifiedImageError

    (tmp_path / "cat").mkdir()
    for number in range(6):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "cat" / f"{number}.png")
    (tmp_path / "cat" / "4.png").write_bytes(b"not an image")
    folder = datasets.ImageFolder(str(tmp_path), transforms.ToTensor())
    with pytest.raises(UnidentifiedImageError, match="sample 4") as info:
        collect(DataLoader(folder, batch_size=2, num_workers=2))
    assert info.value.sample_index == 4  # type: ignore[attr-defined]
