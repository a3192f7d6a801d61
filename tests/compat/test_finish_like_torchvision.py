"""penstock.finish gives the same bits as torchvision for every image."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.device import image_finisher

pytest.importorskip("torchvision")

pytestmark = pytest.mark.vision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    made = torch.randint(0, 256, (6, 3, 37, 41), dtype=torch.uint8)
    made[0].view(3, -1)[:, :256] = torch.arange(256, dtype=torch.uint8)
    return made


def test_multiplying_is_what_v2_does(images: torch.Tensor) -> None:
    from torchvision.transforms import v2

    theirs = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    assert torch.equal(penstock.finish(mean=MEAN, std=STD)(images), theirs(images))
    assert torch.equal(
        penstock.finish()(images), v2.functional.to_dtype(images, torch.float32, scale=True)
    )


def test_dividing_is_what_to_tensor_does(images: torch.Tensor) -> None:
    from torchvision import transforms

    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    arrays = images.permute(0, 2, 3, 1).numpy()
    expected = torch.stack([theirs(array) for array in arrays])
    ours = penstock.finish(mean=MEAN, std=STD, scaling="divide")(images)
    assert torch.equal(ours, expected)
    assert not torch.equal(penstock.finish(mean=MEAN, std=STD)(images), expected), (
        "the control: the other way of scaling differs"
    )


def test_a_flip_is_what_v2_does_to_those_that_are_flagged(images: torch.Tensor) -> None:
    from torchvision.transforms import v2

    flags = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.bool)
    ours, _ = penstock.finish(mean=MEAN, std=STD, flip=1)((images, flags))
    theirs = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    for image, flag, done in zip(images, flags, ours, strict=True):
        turned = v2.functional.horizontal_flip(image) if flag else image
        assert torch.equal(done, theirs(turned))


def test_images_of_torchvisions_own_class_are_taken(images: torch.Tensor) -> None:
    from torchvision import tv_tensors

    done = penstock.finish(mean=MEAN, std=STD)(tv_tensors.Image(images))
    assert torch.equal(torch.Tensor(done), penstock.finish(mean=MEAN, std=STD)(images))


def test_a_loader_gives_what_a_transform_in_the_dataset_gives(images: torch.Tensor) -> None:
    from torchvision.transforms import v2

    theirs = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    data = torch.utils.data.TensorDataset(images)
    loader = penstock.DataLoader(
        data, batch_size=4, device="cpu", finish=penstock.finish(mean=MEAN, std=STD)
    )
    assert torch.equal(torch.cat([batch for (batch,) in loader]), theirs(images))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_opencv_s_look_up_and_torch_s_operations_give_the_same_bits(
    images: torch.Tensor,
    dtype: torch.dtype,
    form: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = penstock.finish(mean=MEAN, std=STD, dtype=dtype, memory_format=form, flip=1)
    batch = images, torch.arange(len(images)) % 2
    assert image_finisher.opencv() is not None
    looked_up = change(batch)[0].clone(memory_format=torch.preserve_format)
    monkeypatch.setattr(image_finisher, "opencv", lambda: None)
    computed = change(batch)[0]
    assert torch.equal(looked_up, computed)
    assert looked_up.stride() == computed.stride()
