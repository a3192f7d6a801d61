"""From the bytes of an image to pixels: decoded, upright, cropped and of the right size.

    bytes -> header (size, orientation) -> steps of the crop -> decode, maybe at reduced scale
          -> turn upright -> crop, resize, flip -> uint8

Pixels are uint8, RGB. Normalising them to floats is done on the device, where it costs nothing.
"""

from __future__ import annotations

import importlib
import io
import os
from typing import Any

import numpy as np

from penstock.errors import BadImage, CannotPack, MissingExtra
from penstock.images.crops import Crop, Step
from penstock.images.decoders import (
    SCALING,
    check_decoder,
    decode_other,
    fastest,
    jpeg_decoder,
    no_decoder,
    pixels_of,
    words_of,
)
from penstock.images.headers import read_header, read_orientation
from penstock.images.partial import PARTIAL, decode_top
from penstock.machine.image_libraries import find_decoders, opencv
from penstock.sources.fields import EncodedImage, Field

MAX_PIXELS = 178_956_970
"""Twice Pillow's limit, where it raises, too: half a gigabyte of pixels."""
_NUM_CHANNELS = (1, 2, 3, 4)


def decode(
    source: bytes | bytearray | memoryview | str | os.PathLike[str],
    transform: Crop | None = None,
    *,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    decoder: str | None = None,
) -> np.ndarray:
    """Pixels of an image file, as uint8 of shape (height, width, 3).

    Args:
        source: The bytes of a file, or its path.
        transform: A crop of ours, done on the way.
        upright: Turn the picture as its Exif orientation says.
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
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decode_named(bytes(source), None, transform, upright, max_pixels, decoder)
    with open(source, "rb") as file:
        data = file.read()
    return _decode_named(data, os.fspath(source), transform, upright, max_pixels, decoder)


def _decode_named(data: bytes, where: str | None, *arguments: Any) -> np.ndarray:
    """Decode; an error names the file."""
    try:
        return _decode(data, *arguments)
    except MissingExtra:
        raise
    except BadImage as error:
        if where is None:
            raise
        raise BadImage(
            error.what, where=where, likely=error.likely, remedy=error.remedy, path=where
        ) from None
    except Exception as error:
        likely = "the file is cut off, or no image." if data else "the file is empty."
        if type(error).__name__ == "DecompressionBombError":
            likely = "a decompression bomb."
        raise BadImage(
            f"the image cannot be decoded: {words_of(error)}",
            where=where,
            likely=likely,
            path=where,
        ) from error


def _decode(
    data: bytes,
    transform: Crop | None,
    upright: bool,
    max_pixels: int,
    decoder: str | None,
    is_checked: bool = False,
) -> np.ndarray:
    header = read_header(memoryview(data))
    _refuse_bomb(header.height, header.width, max_pixels)
    orientation = header.orientation if upright else 1
    is_plain = header.kind == "jpeg" and header.channels in (1, 3) and header.height > 0
    if not is_plain:
        pixels, orientation = _decode_slowly(data, upright, max_pixels)
        return _apply(_turn(pixels, orientation), transform, None)
    height, width = header.height, header.width
    if orientation >= 5:
        height, width = width, height
    steps = None if transform is None else transform.steps(height, width)
    name = decoder or fastest(data)
    scale = 1
    if transform is not None and steps is not None and transform.fast and name in SCALING:
        scale = find_scale(steps, height, width)
    can_stop = is_checked and name in PARTIAL and scale == orientation == 1
    if can_stop and steps and steps[0].kind == "crop":
        top, _, tall, _ = steps[0].box
        return _apply(decode_top(data, header, top + tall), transform, steps)
    pixels = _turn(jpeg_decoder(name)(data, scale), orientation)
    if scale > 1 and steps is not None:
        steps = shrink_steps(steps, (height, width), pixels.shape[:2])
    return _apply(pixels, transform, steps)


def _refuse_bomb(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImage(
            f"the image has {width} x {height} pixels, more than the {max_pixels} allowed: refused",
            likely="a decompression bomb, or a scan.",
            remedy=f"decode(..., max_pixels={height * width}), if it is meant",
        )


def _decode_slowly(data: bytes, upright: bool, max_pixels: int) -> tuple[np.ndarray, int]:
    """Anything but plain JPEG, whose size and orientation Pillow knows."""
    if not find_decoders(("PIL",)):
        return decode_other(data), 1
    image: Any = importlib.import_module("PIL.Image")
    with image.open(io.BytesIO(data)) as opened:
        _refuse_bomb(opened.height, opened.width, max_pixels)
        raw = opened.info.get("exif", b"")
        raw = raw[6:] if raw[:6] == b"Exif\0\0" else raw
        return pixels_of(opened), read_orientation(memoryview(raw)) if upright else 1


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Upright, whatever way the camera was held; a view."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def find_scale(steps: list[Step], height: int, width: int) -> int:
    """By how much a JPEG may be shrunk while decoding so that no step has to enlarge it."""
    for step in steps:
        if step.kind == "crop":
            height, width = step.box[2:]
        elif step.kind == "resize":
            least = min(height / step.box[2], width / step.box[3])
            return next((scale for scale in (8, 4, 2) if least >= scale), 1)
    return 1


def shrink_steps(steps: list[Step], before: tuple[int, int], after: tuple[int, ...]) -> list[Step]:
    """The same steps for a picture that was decoded smaller: crops before the resize shrink."""
    tall, wide = after[0] / before[0], after[1] / before[1]
    found, is_done = [], False
    for step in steps:
        if step.kind == "resize":
            is_done = True
        if step.kind == "crop" and not is_done:
            top, left, height, width = step.box
            top, left = round(top * tall), round(left * wide)
            height = max(1, min(round(height * tall), after[0] - top))
            width = max(1, min(round(width * wide), after[1] - left))
            step = Step("crop", (top, left, height, width))
        found.append(step)
    return found


def _apply(pixels: np.ndarray, transform: Crop | None, steps: list[Step] | None) -> np.ndarray:
    if transform is None:
        return pixels
    if steps is None:
        steps = transform.steps(*pixels.shape[:2])
    for step in steps:
        if step.kind == "crop":
            top, left, height, width = step.box
            pixels = pixels[top : top + height, left : left + width]
        elif step.kind == "resize":
            pixels = resize(pixels, step.box[2:], antialias=transform.antialias)
        elif step.kind == "pad":
            padded = np.zeros((*step.box[2:], pixels.shape[2]), np.uint8)
            height, width = pixels.shape[:2]
            padded[step.box[0] :][:height, step.box[1] :][:, :width] = pixels
            pixels = padded
        else:
            pixels = _flip(pixels)
    return pixels


def _flip(pixels: np.ndarray) -> np.ndarray:
    """Left and right exchanged. OpenCV's copy lies in order, and takes less than undoing a view."""
    cv2 = opencv() if pixels.shape[2] == 3 else None
    if cv2 is None:
        return pixels[:, ::-1]
    if pixels.flags.c_contiguous:
        made: np.ndarray = cv2.flip(pixels, 1)
        return made
    planes: np.ndarray = pixels.transpose(2, 0, 1)
    if not planes.flags.c_contiguous:
        return pixels[:, ::-1]
    turned: np.ndarray = np.empty(planes.shape, np.uint8)
    for plane, place in zip(planes, turned, strict=True):
        cv2.flip(plane, 1, place)
    return np.transpose(turned, (1, 2, 0))


def resize(pixels: np.ndarray, size: tuple[int, ...], *, antialias: bool = True) -> np.ndarray:
    """Bilinear, to (height, width); see ``antialias`` of :class:`penstock.RandomResizedCrop`."""
    if pixels.shape[:2] == tuple(size):
        return pixels
    # What is only enlarged needs no antialiasing: OpenCV's values are within 1, in a third of the
    # time (229 and 79 microseconds for 170 x 150 to 224, 2 x86-64 cores).
    is_enlarged = pixels.shape[0] <= size[0] and pixels.shape[1] <= size[1]
    if (is_enlarged or not antialias) and opencv() is not None:
        made: np.ndarray = opencv().resize(_in_rows(pixels), (size[1], size[0]))
        return made.reshape(*size, pixels.shape[2])  # a single channel's axis is dropped
    import torch

    if any(stride < 0 for stride in pixels.strides):
        pixels = np.ascontiguousarray(pixels)
    if not pixels.flags.writeable:
        pixels = pixels.copy()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if _resizes_bytes():
        shrunk = _interpolate(tensor, size, antialias)
    else:  # before torch 2.1: through floats, to the same values within one
        shrunk = _interpolate(tensor.float(), size, antialias).round().clamp(0, 255).byte()
    return shrunk[0].permute(1, 2, 0).numpy()  # type: ignore[no-any-return]


def _in_rows(pixels: np.ndarray) -> np.ndarray:
    """As OpenCV takes it: pixels side by side in each row. A crop is a view, and stays one."""
    num_channels = pixels.shape[2]
    is_fit = pixels.strides[1:] == (num_channels, 1) and pixels.strides[0] > 0
    return pixels if is_fit else np.ascontiguousarray(pixels)


def _interpolate(tensor: Any, size: tuple[int, ...], antialias: bool) -> Any:
    from torch.nn.functional import interpolate

    return interpolate(
        tensor, list(size), mode="bilinear", align_corners=False, antialias=antialias
    )


def _resizes_bytes() -> bool:
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 1)


def to_tensor(pixels: np.ndarray, out: np.ndarray | None = None) -> Any:
    """A uint8 tensor of shape (channels, height, width), which lies in memory that way, too.

    Args:
        out: Where to put it, if that has the right form.
    """
    import torch

    planes = pixels.transpose(2, 0, 1)
    if out is None or out.shape != planes.shape or out.dtype != np.uint8:
        if len(planes) > 1 and planes.flags.c_contiguous and planes.flags.writeable:
            return torch.from_numpy(planes)  # resized by torch: it lies that way already
        out = np.empty(planes.shape, np.uint8)
    cv2 = opencv() if len(planes) == 3 and pixels.flags.c_contiguous else None
    if cv2 is not None:
        # 14 microseconds for 224 x 224; a copy of the transposed view takes 66.
        cv2.split(pixels, [out[0], out[1], out[2]])
    else:
        np.copyto(out, planes)
    return torch.from_numpy(out)


def open_image(
    content: Any,
    encoding: str,
    transform: Any,
    where: str | None = None,
    out: np.ndarray | None = None,
    decoder: str | None = None,
    is_checked: bool = False,
) -> Any:
    """A stored image as a tensor. A transform that is not ours gets the whole picture.

    Args:
        where: The file's name, for errors.
        out: See :func:`to_tensor`; not for what a transform of somebody else gets.
        decoder: See :func:`decode`.
        is_checked: The bytes are what was once written; see :mod:`penstock.images.partial`.
    """
    own = transform if isinstance(transform, Crop) else None
    if encoding == "file":
        data = content if isinstance(content, bytes) else bytes(content)
        pixels = _decode_named(data, where, own, True, MAX_PIXELS, decoder, is_checked)
    else:
        pixels = _apply(_as_pixels(content), own, None)
    if transform is not None and own is None:
        return transform(to_tensor(pixels))
    return to_tensor(pixels, out)


def _as_pixels(picture: Any) -> np.ndarray:
    """Height, width, channels. Tensors have their channels first, as torchvision's do.

    Raises:
        BadImage: It is no picture, or not of bytes.
    """
    if hasattr(picture, "getbands"):
        return pixels_of(picture)
    pixels: np.ndarray = np.asarray(picture)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.ndim == 3 and hasattr(picture, "detach"):
        pixels = pixels.transpose(1, 2, 0)
    is_picture = pixels.ndim == 3 and pixels.size > 0 and pixels.shape[2] in _NUM_CHANNELS
    if pixels.dtype != np.uint8 or not is_picture:
        raise BadImage(
            f"a {type(picture).__name__} of {pixels.dtype}, shape {np.shape(picture)}, is no "
            "picture of bytes",
            likely="pictures are uint8: arrays of height, width, channels; tensors of channels, "
            "height, width.",
            remedy="crop before the picture is made floats, and array.transpose(1, 2, 0) for "
            "arrays with the channels first",
        )
    return pixels


# -- for the writer ------------------------------------------------------------------------------


def encode_image(value: Any, request: Field) -> Any:
    """Pixels, or the bytes of a JPEG, as a field wants them.

    Called from: the writer of a packed set.
    """
    if isinstance(value, (bytes, bytearray)):
        pixels = decode(bytes(value))
    elif hasattr(value, "getbands"):
        pixels = pixels_of(value)
    else:
        pixels = np.asarray(value)
    longest = max(pixels.shape[:2])
    if request.longer_side is not None and longest > request.longer_side:
        height, width = (
            max(1, round(side * request.longer_side / longest)) for side in pixels.shape[:2]
        )
        pixels = resize(pixels, (height, width))
    is_jpeg = request.encoding == "jpeg" or request.quality is not None
    is_jpeg = is_jpeg or (request.encoding is None and isinstance(value, EncodedImage))
    return _encode_jpeg(pixels, request.quality or 90) if is_jpeg else np.ascontiguousarray(pixels)


def _encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    pixels = np.ascontiguousarray(pixels)
    if find_decoders(("PIL",)):
        file = io.BytesIO()
        image: Any = importlib.import_module("PIL.Image")
        image.fromarray(pixels).save(file, "JPEG", quality=quality)
        return file.getvalue()
    if find_decoders(("simplejpeg",)):
        encode = importlib.import_module("simplejpeg").encode_jpeg
        return bytes(encode(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))
    if opencv() is not None:
        cv2 = opencv()
        swapped = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
        is_done, content = cv2.imencode(".jpg", swapped, [cv2.IMWRITE_JPEG_QUALITY, quality])
        if is_done:
            return bytes(content)
        raise CannotPack("OpenCV could not encode an image")
    raise no_decoder()
