"""A crop accepts channels-last arrays and channels-first tensors, and rejects other values.

Covers crops and pixels. Decoding is in tests/compat/test_images.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize
from penstock.errors import BadArgument, BadImage
from penstock.images.crops import open_image
from penstock.images.pixels import check_memory_format

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)


@pytest.mark.legacy
def test_a_tensor_has_its_channels_first() -> None:
    crop = Compose([Resize(10), CenterCrop(8)])
    wanted = crop(PIXELS)
    assert wanted.shape == (3, 8, 8)
    assert torch.equal(crop(torch.from_numpy(PIXELS).permute(2, 0, 1)), wanted)
    assert RandomResizedCrop(6)(torch.zeros(3, 40, 50, dtype=torch.uint8)).shape == (3, 6, 6)


@pytest.mark.legacy
@pytest.mark.parametrize("size", [5, 30])
def test_a_grey_image_stays_grey(size: int) -> None:
    grey = Resize((size, size))(PIXELS[..., 0])
    assert grey.shape == (1, size, size)
    whole = Resize((size, size))(PIXELS)
    assert (grey[0].int() - whole[0].int()).abs().max() <= 1


@pytest.mark.parametrize(
    "image",
    [
        PIXELS.transpose(2, 0, 1),
        PIXELS.astype(np.float32) / 255,
        np.zeros((0, 5, 3), np.uint8),
        torch.zeros(12, 20, 3, dtype=torch.uint8),
        np.zeros((2, 3, 4, 5), np.uint8),
        "cat.jpg",
    ],
    ids=["channels first", "floats", "empty", "a tensor with channels last", "a batch", "a path"],
)
def test_what_is_no_image_is_refused_rather_than_cropped(image: Any) -> None:
    with pytest.raises(BadImage, match="is not a uint8 image"):
        RandomResizedCrop(4)(image)


@pytest.mark.parametrize("size", [0, -5, 22.4, None, "a", (1, 2, 3), [8, 0]])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(BadArgument, match="must be one or two positive numbers of pixels"):
        RandomResizedCrop(size)
    assert RandomResizedCrop(np.array([4, 5])).size == (4, 5)


# -- memory formats --------------------------------------------------------------------------------

STEPS = {
    "enlarged": Resize((40, 50)),
    "shrunk": Resize((6, 7)),
    "enlarged, then cut": Compose([Resize((40, 50)), CenterCrop(30)]),
    "resized twice": Compose([Resize((40, 50)), CenterCrop(20), Resize((40, 50))]),
    "mirrored": Compose([Resize((40, 50)), RandomHorizontalFlip(1.0)]),
    "mirrored only": RandomHorizontalFlip(1.0),
    "mirrored twice": Compose([RandomHorizontalFlip(1.0), Resize(30), RandomHorizontalFlip(1.0)]),
    "padded": CenterCrop(30),
    "nothing": None,
}


@pytest.mark.legacy
@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_channels_last_image_has_the_same_values(name: str, num_channels: int) -> None:
    pixels, transform = PIXELS[..., :num_channels].copy(), STEPS[name]
    expected = open_image(pixels, transform, is_encoded=False)
    row = np.full((*expected.shape[1:], num_channels), 0xA5, np.uint8)
    for out in (None, row.transpose(2, 0, 1)):
        found = open_image(pixels, transform, is_encoded=False, out=out, is_channels_last=True)
        assert torch.equal(found, expected)
        assert found.permute(1, 2, 0).is_contiguous()
    assert found.data_ptr() == row.ctypes.data, "written to its row"
    assert np.array_equal(pixels, PIXELS[..., :num_channels]), "the source is not changed"
    assert expected.is_contiguous(), "control: not asked for"


@pytest.mark.legacy
def test_a_row_of_another_shape_or_order_is_not_used() -> None:
    transform = Compose([Resize((40, 50)), CenterCrop(20)])
    expected = open_image(PIXELS, transform, is_encoded=False)
    wrong = np.zeros((40, 50, 3), np.uint8)  # the shape before the last step
    rows = (wrong.transpose(2, 0, 1), np.zeros((3, 20, 20), np.uint8), np.zeros(5, np.uint8))
    for row in rows:
        found = open_image(PIXELS, transform, is_encoded=False, out=row, is_channels_last=True)
        assert torch.equal(found, expected)
        assert not np.may_share_memory(found.numpy(), row)


def test_memory_mapped_pixels_are_copied() -> None:
    pixels = PIXELS.copy()
    pixels.flags.writeable = False
    found = open_image(pixels, None, is_encoded=False, is_channels_last=True)
    found.zero_()
    assert pixels.any()


def test_what_is_no_memory_format_is_refused() -> None:
    assert check_memory_format(torch.channels_last, "Packed")
    assert not check_memory_format(torch.contiguous_format, "Packed")
    assert check_memory_format(None, "Packed"), "the default"
    for wrong in ("channels_last", torch.channels_last_3d, torch.preserve_format, 1):
        with pytest.raises(BadArgument, match="is not a memory format of images"):
            check_memory_format(wrong, "Packed")
