"""``finish`` converts bytes to floats with exactly torch's arithmetic."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import pytest
import torch

from penstock import finish
from penstock.device import image_finisher
from penstock.errors import BadArgument

pytestmark = pytest.mark.legacy

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def images(num: int = 5, channels: int = 3, height: int = 7, width: int = 9) -> torch.Tensor:
    made = torch.randint(0, 256, (num, channels, height, width), dtype=torch.uint8)
    made.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: made.numel()]
    return made


def by_hand(
    batch: torch.Tensor, mean: list[float], std: list[float], *, divides: bool = False
) -> torch.Tensor:
    scaled = batch.to(torch.float32)
    scaled = scaled.div(255) if divides else scaled.mul(1.0 / 255)
    places = (1, -1, 1, 1)
    return scaled.sub(torch.tensor(mean).view(places)).div(torch.tensor(std).view(places))


@pytest.mark.parametrize("scaling", ["multiply", "divide"])
def test_the_result_is_that_of_plain_arithmetic_bit_for_bit(scaling: str) -> None:
    batch = images()
    expected = by_hand(batch, MEAN, STD, divides=scaling == "divide")
    assert torch.equal(finish(mean=MEAN, std=STD, scaling=scaling)(batch), expected)


def test_the_two_scalings_differ_in_some_last_bits_only() -> None:
    batch = images()
    one, other = finish()(batch), finish(scaling="divide")(batch)
    assert not torch.equal(one, other)
    assert torch.allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_type_is_what_a_cast_of_the_float32_result_gives(dtype: torch.dtype) -> None:
    batch = images()
    done = finish(mean=MEAN, std=STD, dtype=dtype)(batch)
    assert done.dtype is dtype
    assert torch.equal(done, by_hand(batch, MEAN, STD).to(dtype))


@pytest.mark.parametrize("is_last", [True, False])
def test_the_memory_format_is_as_asked_or_as_it_was(is_last: bool) -> None:
    here = torch.channels_last if is_last else torch.contiguous_format
    batch = images().contiguous(memory_format=here)
    expected = by_hand(batch, MEAN, STD)
    for asked in (torch.channels_last, torch.contiguous_format, torch.preserve_format):
        done = finish(mean=MEAN, std=STD, memory_format=asked)(batch)
        wanted = here if asked is torch.preserve_format else asked
        assert done.is_contiguous(memory_format=wanted)
        assert torch.equal(done, expected)


def test_images_that_are_a_slice_of_something_are_read_right() -> None:
    batch = images(8, 5, 11, 13)[::2, 1:4, 2:9, 3:]
    assert torch.equal(finish(mean=MEAN, std=STD)(batch), by_hand(batch, MEAN, STD))


@pytest.mark.parametrize(
    "kind", [torch.tensor, list, lambda flags: torch.tensor(flags).view(-1, 1).to(torch.uint8)]
)
def test_images_whose_flag_is_set_are_mirrored(kind: Any) -> None:
    batch, flags = images(), [True, False, True, False, False]
    done, _ = finish(mean=MEAN, std=STD, flip=1)((batch, kind(flags)))
    expected = by_hand(batch, MEAN, STD)
    expected[0], expected[2] = expected[0].flip(2), expected[2].flip(2)
    assert torch.equal(done, expected)


def test_the_flag_may_have_a_name_and_the_input_is_left_alone() -> None:
    batch = {"x": images(), "flip": torch.ones(5, dtype=torch.bool), "y": torch.arange(5)}
    before = batch["x"].clone()
    done = finish(flip="flip")(batch)
    assert torch.equal(done["x"], finish()(before.flip(3)))
    assert torch.equal(batch["x"], before)
    assert done["y"] is batch["y"]


def test_only_batches_of_images_are_touched() -> None:
    others = [
        torch.zeros(2, 3, 4, 4),
        torch.zeros(3, 4, 4, dtype=torch.uint8),
        torch.zeros(5, dtype=torch.int64),
        "a name",
        None,
    ]
    assert all(after is before for after, before in zip(finish()(others), others, strict=True))


def test_one_number_serves_any_number_of_channels() -> None:
    normalise = finish(mean=[0.5], std=[0.25])
    for channels in (1, 2, 3, 7):
        batch = images(channels=channels)
        assert torch.equal(normalise(batch), by_hand(batch, [0.5] * channels, [0.25] * channels))
    assert torch.equal(finish(mean=[0.5])(batch), by_hand(batch, [0.5] * 7, [1.0] * 7))
    assert torch.equal(finish(std=[0.5])(batch), by_hand(batch, [0.0] * 7, [0.5] * 7))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_channels_last_images_are_looked_up_and_mirrored_right(channels: int) -> None:
    mean, std = [0.1 * n for n in range(channels)], [0.2 + 0.1 * n for n in range(channels)]
    batch = images(channels=channels).contiguous(memory_format=torch.channels_last)
    flags = torch.tensor([True, False, True, False, False])
    done, _ = finish(mean=mean, std=std, flip=1)((batch, flags))
    expected = by_hand(batch, mean, std)
    expected[flags] = expected[flags].flip(3)
    assert torch.equal(done, expected)
    assert done.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        finish(mean=[0.5])(batch), by_hand(batch, [0.5] * channels, [1.0] * channels)
    )


def test_no_images_are_no_trouble() -> None:
    assert finish(mean=MEAN, std=STD)(images(0)).shape == (0, 3, 7, 9)
    empty = torch.zeros(0, dtype=torch.bool)
    assert finish(flip=1)((images(0), empty))[0].shape == (0, 3, 7, 9)


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    is_cuda = True


def test_where_triton_does_not_work_torch_does_it_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up(*arguments: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(image_finisher, "_can_use_triton", True)
    monkeypatch.setitem(
        sys.modules, "penstock.device.triton_lookup", types.SimpleNamespace(look_up=look_up)
    )
    batch, normalise = images(), finish(mean=MEAN, std=STD)
    with pytest.warns(
        UserWarning, match=r"Triton cannot be used on this machine \(Failed to find C compiler"
    ):
        done = normalise(batch.as_subclass(OnGpu))
    assert torch.equal(torch.Tensor(done), by_hand(batch, MEAN, STD))
    assert not image_finisher._can_use_triton
    assert torch.equal(torch.Tensor(normalise(batch.as_subclass(OnGpu))), torch.Tensor(done))


def test_it_can_be_sent_to_another_process() -> None:
    made = finish(mean=MEAN, std=STD, flip=1, memory_format=torch.channels_last)
    batch = (images(), torch.tensor([1, 0, 0, 1, 0]))
    assert torch.equal(pickle.loads(pickle.dumps(made))(batch)[0], made(batch)[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mean": 0.5}, "mean=0.5 must be a list of numbers"),
        ({"mean": []}, "must be a list of numbers"),
        ({"mean": ["a"]}, "must be a list of numbers"),
        ({"mean": "12"}, "must be a list of numbers"),
        ({"std": [float("nan")]}, "must be a list of numbers"),
        ({"mean": [0.5], "std": [0.0]}, "would divide by 0"),
        ({"mean": [0.1, 0.2], "std": [0.1] * 3}, "mean has 2 channels, but std has 3"),
        ({"dtype": torch.uint8}, "must be a floating-point dtype"),
        ({"scaling": "guess"}, "scaling='guess' must be one of"),
        ({"memory_format": torch.channels_last_3d}, "memory_format=.* is not supported"),
    ],
)
def test_bad_arguments_are_said_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        finish(**arguments)


def test_what_does_not_fit_the_batch_is_said_with_its_shape() -> None:
    words = r"3 channels, but the images have 1 \(a tensor of shape \(5, 1, 7, 9"
    with pytest.raises(BadArgument, match=words):
        finish(mean=MEAN, std=STD)(images(channels=1))
    with pytest.raises(BadArgument, match="flip=2: the batch does not have this field"):
        finish(flip=2)((images(), 0))
    with pytest.raises(BadArgument, match="flip=1 has 3 values for 5 images"):
        finish(flip=1)((images(), [1, 0, 1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_no_bit_of_the_result(dtype: torch.dtype) -> None:
    mean, std = [0.4851, 0.4562, 0.4063], [0.2291, 0.2242, 0.2253]  # not in any cache
    batch = images()
    expected = by_hand(batch, mean, std)
    image_finisher.Normalization.make_table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert not torch.equal(by_hand(batch, mean, std), expected), "the control: it could"
        done = finish(mean=mean, std=std)(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(done, expected)


@pytest.mark.skipif(not hasattr(torch, "set_default_device"), reason="torch 2.0 and newer")
def test_torchs_default_device_is_not_where_the_table_is_made() -> None:
    batch = images()
    image_finisher.Normalization.make_table.cache_clear()
    with torch.device("meta"):
        done = finish(mean=MEAN, std=STD)(batch)
    assert torch.equal(done, by_hand(batch, MEAN, STD))


def test_what_an_uninstalled_opencv_leaves_behind_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image_finisher.opencv.cache_clear()
    monkeypatch.setitem(sys.modules, "cv2", types.ModuleType("cv2"))  # an empty folder without LUT
    try:
        batch = images()
        assert torch.equal(finish(mean=MEAN, std=STD)(batch), by_hand(batch, MEAN, STD))
    finally:
        image_finisher.opencv.cache_clear()
