"""Decoding of image files: upright, cropped and resized on the way.

    bytes -> header (size, orientation) -> steps of the crop -> decode, maybe at reduced scale
          -> turn upright -> crop, resize, flip -> uint8

Pixels are uint8, RGB. Normalising them to floats is done on the device, where it costs nothing.
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
    fastest_decoder,
    jpeg_decoder,
    no_decoder,
)
from penstock.images.pixels import ImageStep, apply_steps, from_pillow, turn_upright
from penstock.machine.image_libraries import find_decoders

MAX_PIXELS = 178_956_970
"""Twice Pillow's limit, where it raises, too: half a gigabyte of pixels."""


class Transform(Protocol):
    """A crop that knows its steps from the size of the image; see :mod:`penstock.images.crops`."""

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
    """Pixels of an image file, as uint8 of shape (height, width, 3).

    Args:
        source: The bytes of a file, or its path.
        transform: A crop of ours, done on the way.
        upright: Turn the image as its Exif orientation says.
        max_pixels: More than this is refused before anything is decoded.
        decoder: For JPEG: "simplejpeg", "cv2", "torchvision" or "PIL". None: the fastest.

    Raises:
        BadImage: It cannot be decoded, or is too large.
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
    """As :func:`decode`, for bytes that were read from ``path``, which errors name."""
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
        likely = "the file is cut off, or no image." if data else "the file is empty."
        if type(error).__name__ == "DecompressionBombError":
            likely = "a decompression bomb."
        what = f"the image cannot be decoded: {_describe(error)}"
        raise BadImage(what, where=path, likely=likely, path=path) from error


def _describe(error: BaseException) -> str:
    """An error of a decoder in words that do not change from run to run.

    Pillow names the object that it read from by its address. Others replace its function that opens
    files (Ultralytics), and then fail at something else once it has found no image.
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
) -> np.ndarray:
    header = read_header(memoryview(data))
    _refuse_bomb(header.height, header.width, max_pixels)
    is_plain = header.kind == "jpeg" and header.channels in (1, 3) and header.height > 0
    if not is_plain:
        pixels = _decode_other(data, upright, max_pixels)
        if transform is None:
            return pixels
        steps = transform.steps(*pixels.shape[:2])
        return apply_steps(pixels, steps, antialias=transform.antialias)
    orientation = header.orientation if upright else 1
    height, width = header.height, header.width
    if orientation >= 5:
        height, width = width, height
    steps = [] if transform is None else transform.steps(height, width)
    name = decoder or fastest_decoder(data)
    scale = 1
    if transform is not None and transform.fast and name in SCALING:
        scale = find_scale(steps, height, width)
    pixels = turn_upright(jpeg_decoder(name)(data, scale), orientation)
    if scale > 1:
        steps = _shrink_steps(steps, (height, width), pixels.shape[:2])
    return apply_steps(pixels, steps, antialias=transform is None or transform.antialias)


def _refuse_bomb(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImage(
            f"the image has {width} x {height} pixels, more than the {max_pixels} allowed: refused",
            likely="a decompression bomb, or a scan.",
            remedy=f"decode(..., max_pixels={height * width}), if it is meant",
        )


def _decode_other(data: bytes, upright: bool, max_pixels: int) -> np.ndarray:
    """Anything but plain JPEG: by Pillow, which knows size and orientation, else by OpenCV."""
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
    """The largest scale at which a JPEG can be decoded without enlarging it in a later step."""
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
    """The same steps for an image that was decoded smaller: crops before the resize shrink."""
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
