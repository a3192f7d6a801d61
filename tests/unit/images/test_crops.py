"""A crop accepts channels-last arrays and channels-first tensors, and rejects other values.

Covers crops and pixels. Decoding is in tests/compat/test_images.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import CenterCrop, Compose, RandomResizedCrop, Resize
from penstock.errors import BadArgument, BadImage

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
