"""Decoding of image files, with orientation, crop and resize.

    bytes -> header (size, orientation) -> steps of the crop -> decode, possibly at reduced scale
          -> turn upright -> crop, resize, flip -> uint8

Pixels are uint8 RGB. Normalization to floats happens on the device, where it costs little.

Tested by ``tests/compat/test_images.py``.
"""

from __future__ import annotations

import importlib
import io
import os
from typing import Any, Protocol

import numpy as np

from penstock.errors import BadImage, MissingExtra
from penstock.images.headers import read_header, read_orientation
from penstock.images.jpeg_codecs import (
    SCALING,
    check_decoder,
    choose_decoder,
    jpeg_decoder,
    no_decoder,
)
from penstock.images.pixels import ImageStep, apply_steps, from_pillow, turn_upright
from penstock.machine.image_libraries import find_decoders

MAX_PIXELS = 178_956_970
"""Twice Pillow's limit, at which Pillow raises too. It is half a gigabyte of pixels."""


class Transform(Protocol):
    """A transform that derives its steps from the image size. See :mod:`penstock.images.crops`."""

    antialias: bool
    fast: bool

    def steps(self, height: int, width: int) -> list[ImageStep]: ...


def decode(
    source: bytes | bytearray | memoryview | str | os.PathLike[str],
    transform: Transform | None = None,
    *,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    decoder: str | None = None,
) -> np.ndarray:
    """Decode an image file to uint8 pixels of shape (height, width, 3).

    Args:
        source: The bytes of a file, or its path.
        transform: A Penstock transform to apply.
        upright: Turn the image upright according to its Exif orientation.
        max_pixels: Larger images are refused before they are decoded.
        decoder: For JPEG: "simplejpeg", "cv2", "torchvision" or "PIL". None: the first of these
            that is installed and decodes the first JPEG, which is usually the fastest.

    Raises:
        BadImage: The image cannot be decoded, or is too large.
        MissingExtra: No library that decodes images is installed.

    Example:
        >>> import penstock
        >>> pixels = penstock.decode("cat.jpg", penstock.Resize(224))  # doctest: +SKIP
    """
    check_decoder(decoder, "decode")
    options: dict[str, Any] = {"upright": upright, "max_pixels": max_pixels, "decoder": decoder}
    if isinstance(source, (bytes, bytearray, memoryview)):
        return decode_bytes(bytes(source), transform, **options)
    with open(source, "rb") as file:
        data = file.read()
    return decode_bytes(data, transform, path=os.fspath(source), **options)


def decode_bytes(
    data: bytes, transform: Transform | None, *, path: str | None = None, **options: Any
) -> np.ndarray:
    """Like :func:`decode`, for bytes that were read from ``path``. Errors name the path.

    Args:
        options: Keywords of :func:`decode`, and ``out``: see :mod:`penstock.images.pixels`.
    """
    try:
        return _decode(data, transform, **options)
    except MissingExtra:
        raise
    except BadImage as error:
        if path is None:
            raise
        raise BadImage(
            error.what, where=path, likely=error.likely, remedy=error.remedy, path=path
        ) from None
    except Exception as error:
        likely = "the file is truncated or not an image." if data else "the file is empty."
        if type(error).__name__ == "DecompressionBombError":
            likely = "a decompression bomb."
        what = f"the image cannot be decoded: {_describe(error)}"
        raise BadImage(what, where=path, likely=likely, path=path) from error


def _describe(error: BaseException) -> str:
    """Describe a decoder's error in words that do not change from run to run.

    Pillow's message contains the memory address of its input. Some libraries (Ultralytics) replace
    Pillow's function that opens files, and raise a different error after it finds no image.
    """
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ == "UnidentifiedImageError":
            return "UnidentifiedImageError"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _decode(
    data: bytes,
    transform: Transform | None,
    *,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    decoder: str | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    header = read_header(memoryview(data))
    _refuse_bomb(header.height, header.width, max_pixels)
    is_plain = header.kind == "jpeg" and header.channels in (1, 3) and header.height > 0
    if not is_plain:
        pixels = _decode_other(data, upright, max_pixels)
        if transform is None:
            return pixels
        steps = transform.steps(*pixels.shape[:2])
        return apply_steps(pixels, steps, antialias=transform.antialias, out=out)
    orientation = header.orientation if upright else 1
    height, width = header.height, header.width
    if orientation >= 5:
        height, width = width, height
    steps = [] if transform is None else transform.steps(height, width)
    name = decoder or choose_decoder(data)
    scale = 1
    if transform is not None and transform.fast and name in SCALING:
        scale = find_scale(steps, height, width)
    pixels = turn_upright(jpeg_decoder(name)(data, scale), orientation)
    if scale > 1:
        steps = _shrink_steps(steps, (height, width), pixels.shape[:2])
    antialias = transform is None or transform.antialias
    return apply_steps(pixels, steps, antialias=antialias, out=out)


def _refuse_bomb(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImage(
            f"the image has {width} x {height} pixels, more than the limit of {max_pixels}",
            likely="a decompression bomb, or a scan.",
            remedy=f"decode(..., max_pixels={height * width}), if this is intended",
        )


def _decode_other(data: bytes, upright: bool, max_pixels: int) -> np.ndarray:
    """Decode anything but plain JPEG with Pillow, or with OpenCV if Pillow is missing."""
    names = find_decoders(("PIL", "cv2"))
    if not names:
        raise no_decoder()
    if names[0] == "cv2":
        return jpeg_decoder("cv2")(data, 1)
    image: Any = importlib.import_module("PIL.Image")
    with image.open(io.BytesIO(data)) as opened:
        _refuse_bomb(opened.height, opened.width, max_pixels)
        exif = opened.info.get("exif", b"").removeprefix(b"Exif\0\0")
        orientation = read_orientation(memoryview(exif)) if upright else 1
        return turn_upright(from_pillow(opened), orientation)


def find_scale(steps: list[ImageStep], height: int, width: int) -> int:
    """Return the largest scale of a JPEG at which no later step must enlarge it."""
    for step in steps:
        if step.kind == "crop":
            height, width = step.box[2:]
        elif step.kind == "resize":
            least = min(height / step.box[2], width / step.box[3])
            return next((scale for scale in (8, 4, 2) if least >= scale), 1)
    return 1


def _shrink_steps(
    steps: list[ImageStep], before: tuple[int, int], after: tuple[int, ...]
) -> list[ImageStep]:
    """Adapt steps to an image that was decoded smaller. Crops before the resize shrink."""
    tall, wide = after[0] / before[0], after[1] / before[1]
    found, is_resized = [], False
    for step in steps:
        is_resized = is_resized or step.kind == "resize"
        if step.kind == "crop" and not is_resized:
            top, left, height, width = step.box
            top, left = round(top * tall), round(left * wide)
            height = max(1, min(round(height * tall), after[0] - top))
            width = max(1, min(round(width * wide), after[1] - left))
            step = ImageStep("crop", (top, left, height, width))
        found.append(step)
    return found
