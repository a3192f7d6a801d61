"""Crops, flips and resizes with torchvision's names, arguments and distributions.

Each transform computes its steps from the size of an image before any pixel is decoded. They draw
from :func:`penstock.rng`, so a sample gets the same crop in any worker.

Example:
    >>> import numpy as np
    >>> crop = Compose([Resize(4), CenterCrop(2)])
    >>> crop.steps(6, 9)
    [ImageStep(kind='resize', box=(0, 0, 4, 6)), ImageStep(kind='crop', box=(1, 2, 2, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import BadArgument
from penstock.images.decode import decode_bytes
from penstock.images.pixels import (
    ImageStep,
    apply_steps,
    as_pixels,
    to_channels_last,
    to_tensor,
)
from penstock.order.rng import rng

_NUM_TRIES = 10


class Crop:
    """Base class of the transforms. Call it with an image, or get its steps."""

    antialias: bool = True
    fast: bool = False

    def steps(self, height: int, width: int) -> list[ImageStep]:
        """Return the steps for an image of this size. Draws new random numbers on each call."""
        raise NotImplementedError

    def __call__(self, image: Any) -> Any:
        """Return an image (HWC pixels or encoded bytes) as a uint8 CHW tensor."""
        return open_image(image, self, is_encoded=isinstance(image, (bytes, bytearray, memoryview)))


def open_image(
    content: Any,
    transform: Any,
    *,
    is_encoded: bool = True,
    path: str | None = None,
    out: np.ndarray | None = None,
    out_tensor: Any = None,
    decoder: str | None = None,
    is_channels_last: bool = False,
) -> Any:
    """Return an encoded image, or pixels, as a tensor, after the transform.

    A transform that is not Penstock's is called with the whole decoded image.

    Args:
        path: The name of the file, for error messages.
        out, out_tensor: See :func:`~penstock.images.pixels.to_tensor`. Used only with Penstock's
            transforms.
        decoder: See :func:`penstock.decode`.
        is_channels_last: Keep the pixels in the order height, width, channels in memory. Used only
            with Penstock's transforms.
    """
    is_own = transform is None or isinstance(transform, Crop)
    own = transform if is_own else None
    place = None
    if is_own and is_channels_last and out is not None and out.ndim == 3:
        place = out.transpose(1, 2, 0)
        place = place if place.flags.c_contiguous else None
    if is_encoded:
        data = content if isinstance(content, bytes) else bytes(content)
        pixels = decode_bytes(data, own, path=path, decoder=decoder, out=place)
    else:
        pixels = as_pixels(content)
        if own is not None:
            steps = own.steps(*pixels.shape[:2])
            pixels = apply_steps(pixels, steps, antialias=own.antialias, out=place)
    if not is_own:
        return transform(to_tensor(pixels))
    if is_channels_last:
        return to_channels_last(pixels, place, out_tensor)
    return to_tensor(pixels, out, out_tensor)


def _pair(size: Any) -> tuple[int, int]:
    found = tuple(size) if hasattr(size, "__len__") else (size, size)
    if len(found) == 1:
        found = found * 2
    are_numbers = all(isinstance(one, (int, float, np.number)) for one in found)
    if len(found) != 2 or not are_numbers or any(int(one) != one or one < 1 for one in found):
        raise BadArgument(
            f"size={size!r} must be one or two positive numbers of pixels", remedy="size=224"
        )
    return int(found[0]), int(found[1])


class RandomResizedCrop(Crop):
    """Crop a random part of the image, with random area and aspect ratio, and resize it.

    Args:
        size: Height and width of the result, or one number for both.
        scale: Range of the crop's share of the image area.
        ratio: Range of the aspect ratio (width / height).
        antialias: True gives the result of torchvision and Pillow. False is faster, but shrunk
            images show aliasing.
        fast: Decode JPEGs at 1/2, 1/4 or 1/8 scale if the crop is that much larger than ``size``,
            with the fast DCT. The pixels differ slightly: see docs/packed-sets.md.

    Example:
        >>> import numpy as np, penstock
        >>> crop = penstock.RandomResizedCrop(8)
        >>> crop(np.zeros((20, 30, 3), np.uint8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(
        self,
        size: Any,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3.0 / 4.0, 4.0 / 3.0),
        *,
        antialias: bool = True,
        fast: bool = False,
    ) -> None:
        self.size = _pair(size)
        for name, (low, high) in (("scale", scale), ("ratio", ratio)):
            if not 0 < low <= high:
                raise BadArgument(f"{name}={(low, high)} must be a range of positive numbers")
        self.scale, self.ratio = tuple(scale), tuple(ratio)
        self.antialias, self.fast = antialias, fast

    def draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw the top, left, height and width of a crop."""
        generator, area = rng(), height * width
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        small, large = self.scale
        for _ in range(_NUM_TRIES):
            # the same as uniform(a, b), in a third of the time
            target = area * (small + (large - small) * generator.random())
            ratio = math.exp(low + (high - low) * generator.random())
            wide = round(math.sqrt(target * ratio))
            tall = round(math.sqrt(target / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top = int(generator.integers(0, height - tall + 1))
                left = int(generator.integers(0, width - wide + 1))
                return top, left, tall, wide
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the largest centered crop with an allowed ratio, used when no drawn crop fits."""
        tall, wide = height, width
        if width / height < self.ratio[0]:
            tall = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            wide = round(height * self.ratio[1])
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def steps(self, height: int, width: int) -> list[ImageStep]:
        box = self.draw(height, width)
        return [ImageStep("crop", box), ImageStep("resize", (0, 0, *self.size))]


class RandomHorizontalFlip(Crop):
    """Mirror the image horizontally with probability ``p``."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise BadArgument(f"p={p} must be a probability between 0 and 1")
        self.p = p

    def steps(self, height: int, width: int) -> list[ImageStep]:
        return [ImageStep("flip")] if rng().random() < self.p else []


class Resize(Crop):
    """Resize to (height, width), or to a given length of the shorter side."""

    def __init__(self, size: Any, *, antialias: bool = True, fast: bool = False) -> None:
        is_shorter = isinstance(size, (int, np.integer)) or len(size) == 1
        self.size: tuple[int, int] | int = _pair(size)[0] if is_shorter else _pair(size)
        self.antialias, self.fast = antialias, fast

    def steps(self, height: int, width: int) -> list[ImageStep]:
        size = self.size
        if isinstance(size, int):
            if height <= width:
                size = (size, int(size * width / height))
            else:
                size = (int(size * height / width), size)
        return [] if size == (height, width) else [ImageStep("resize", (0, 0, *size))]


class CenterCrop(Crop):
    """Crop the center of the image. Smaller images are padded with black."""

    def __init__(self, size: Any) -> None:
        self.size = _pair(size)

    def steps(self, height: int, width: int) -> list[ImageStep]:
        tall, wide = self.size
        found = []
        if tall > height or wide > width:
            box = (
                max(0, (tall - height) // 2),
                max(0, (wide - width) // 2),
                max(tall, height),
                max(wide, width),
            )
            found.append(ImageStep("pad", box))
            height, width = box[2:]
        top, left = round((height - tall) / 2.0), round((width - wide) / 2.0)
        return [*found, ImageStep("crop", (top, left, tall, wide))]


class Compose(Crop):
    """Apply several transforms in order.

    Example:
        >>> import numpy as np, penstock
        >>> test_time = penstock.Compose([penstock.Resize(32), penstock.CenterCrop(28)])
        >>> test_time(np.zeros((40, 50, 3), np.uint8)).shape
        torch.Size([3, 28, 28])
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        odd = [one for one in transforms if not isinstance(one, Crop)]
        if odd:
            raise BadArgument(
                f"{type(odd[0]).__name__} is not a Penstock transform",
                remedy="torchvision.transforms.Compose, which accepts any transform",
            )
        self.transforms: list[Crop] = list(transforms)
        self.antialias = all(one.antialias for one in transforms)
        self.fast = any(one.fast for one in transforms)

    def steps(self, height: int, width: int) -> list[ImageStep]:
        found: list[ImageStep] = []
        for one in self.transforms:
            for step in one.steps(height, width):
                found.append(step)
                if step.kind != "flip":
                    height, width = step.box[2:]
        return found
