"""Operations on decoded pixels: crop, resize, flip, turn upright, and conversion to tensors.

Pixels are uint8 arrays of shape (height, width, channels). Runs in the process that loads the
sample. Called by :mod:`penstock.images.decode` and :mod:`penstock.images.crops`.

The functions that take ``out`` write their result there if its shape fits, and then return ``out``
itself. So the last step of a channels_last image writes directly to the batch.

Tested by ``tests/compat/test_images.py``.
"""

from __future__ import annotations

import functools
import importlib
import platform
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import BadArgument, BadImage
from penstock.machine.image_libraries import opencv

_NUM_CHANNELS = (1, 2, 3, 4)


class ImageStep(NamedTuple):
    """One operation: crop to ``box`` (top, left, height, width), resize or pad to it, or flip."""

    kind: str
    box: tuple[int, int, int, int] = (0, 0, 0, 0)


def apply_steps(
    pixels: np.ndarray,
    steps: list[ImageStep],
    *,
    antialias: bool,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the image after all steps, as a view if possible.

    Args:
        out: C-contiguous memory that can be used for the result.
    """
    free = out  # until a step wrote there: a later resize cannot read and write the same memory
    for step in steps:
        top, left, height, width = step.box
        if step.kind == "crop":
            pixels = pixels[top : top + height, left : left + width]
        elif step.kind == "resize":
            pixels = resize(pixels, (height, width), antialias=antialias, out=free)
        elif step.kind == "pad":
            padded = np.zeros((height, width, pixels.shape[2]), np.uint8)
            padded[top:, left:][: pixels.shape[0], : pixels.shape[1]] = pixels
            pixels = padded
        else:
            pixels = _flip(pixels, out)
        if pixels is out:
            free = None
    return pixels


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an Exif orientation (1 to 8). Returns a view."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def _flip(pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Mirror horizontally. OpenCV's contiguous copy is cheaper than a view that is copied later.

    ``pixels`` can be ``out`` itself, because OpenCV mirrors in place.
    """
    cv2 = opencv() if pixels.shape[2] == 3 else None
    planes: np.ndarray = pixels.transpose(2, 0, 1)
    if cv2 is not None and pixels.flags.c_contiguous:
        fits = out is not None and out.shape == pixels.shape
        made: np.ndarray = cv2.flip(pixels, 1, out if fits else None)
        return made
    if cv2 is None or not planes.flags.c_contiguous:
        return pixels[:, ::-1]
    turned: np.ndarray = np.empty(planes.shape, np.uint8)
    for plane, target in zip(planes, turned, strict=True):
        cv2.flip(plane, 1, target)
    return np.transpose(turned, (1, 2, 0))


def resize(
    pixels: np.ndarray,
    size: tuple[int, int],
    *,
    antialias: bool = True,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Resize bilinearly to (height, width). See :class:`penstock.RandomResizedCrop`.

    Args:
        out: Memory that does not overlap ``pixels``.
    """
    if pixels.shape[:2] == tuple(size):
        return pixels
    # Enlarging needs no antialiasing. OpenCV's values differ by at most 1, and it takes a third of
    # the time (79 instead of 229 microseconds for 170 x 150 to 224, 2 x86-64 cores).
    is_enlarged = pixels.shape[0] <= size[0] and pixels.shape[1] <= size[1]
    cv2 = opencv() if is_enlarged or not antialias else None
    if cv2 is not None:
        num_channels = pixels.shape[2]
        fits = num_channels > 1 and out is not None and out.shape == (*size, num_channels)
        target = out if fits else None
        made: np.ndarray = cv2.resize(_in_rows(pixels), (size[1], size[0]), target)
        # OpenCV drops the axis of a single channel.
        return made if num_channels > 1 else made.reshape(*size, 1)
    pillow = _pillow() if antialias and pixels.shape[2] == 3 else None
    if pillow is not None:
        shrunk_image = pillow.fromarray(pixels).resize((size[1], size[0]), pillow.BILINEAR)
        return np.array(shrunk_image)  # a copy, because Pillow's memory is read-only
    import torch
    from torch.nn.functional import interpolate

    if any(stride < 0 for stride in pixels.strides):
        pixels = np.ascontiguousarray(pixels)
    if not pixels.flags.writeable:
        pixels = pixels.copy()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    takes_bytes = (major, minor) >= (2, 1)  # older versions need floats; values differ by at most 1
    shrunk = interpolate(
        tensor if takes_bytes else tensor.float(),
        list(size),
        mode="bilinear",
        align_corners=False,
        antialias=antialias,
    )
    if not takes_bytes:
        shrunk = shrunk.round().clamp(0, 255).byte()
    return shrunk[0].permute(1, 2, 0).numpy()


@functools.cache
def _pillow() -> Any:
    """Return Pillow's module where it shrinks faster than torch, or None.

    Without AVX2, torch takes 2.2 times as long as Pillow (4.1 instead of 1.8 ms for 500 x 375 to
    224, Neoverse N1, torch 2.8 and 2.13). Values differ by at most 1.
    """
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return None
    try:
        return importlib.import_module("PIL.Image")
    except Exception:  # missing, or its build does not load here
        return None


def _in_rows(pixels: np.ndarray) -> np.ndarray:
    """Return pixels that are contiguous within each row, as OpenCV needs. A crop stays a view."""
    num_channels = pixels.shape[2]
    is_fit = pixels.strides[1:] == (num_channels, 1) and pixels.strides[0] > 0
    return pixels if is_fit else np.ascontiguousarray(pixels)


def check_memory_format(memory_format: Any, call: str) -> bool:
    """Return True for ``torch.channels_last`` or None, and False for the contiguous format.

    channels_last is the default. On an H200, a training step of a ResNet-50 whose weights have
    torch's default format takes 0.56 (bfloat16) or 0.71 (float32) of the time with it. If the
    weights are channels_last, the format of the images makes no difference.

    Raises:
        BadArgument: It is something else.
    """
    if memory_format is None:
        return True
    import torch

    if memory_format not in (torch.contiguous_format, torch.channels_last):
        raise BadArgument(
            f"memory_format={memory_format!r} is not a memory format of images",
            remedy=f"{call}(..., memory_format=torch.contiguous_format)",
        )
    return bool(memory_format == torch.channels_last)


def to_tensor(pixels: np.ndarray, out: np.ndarray | None = None, out_tensor: Any = None) -> Any:
    """Return a contiguous uint8 tensor of shape (channels, height, width).

    Args:
        out: Memory for the result. Ignored unless its shape and dtype match.
        out_tensor: A tensor over ``out``, returned if the result is there. None: made here.
    """
    import torch

    planes = pixels.transpose(2, 0, 1)
    if out is None or out.shape != planes.shape or out.dtype != np.uint8:
        if len(planes) > 1 and planes.flags.c_contiguous and planes.flags.writeable:
            return torch.from_numpy(planes)  # resized by torch: already in this layout
        out, out_tensor = np.empty(planes.shape, np.uint8), None
    cv2 = opencv() if len(planes) == 3 and pixels.flags.c_contiguous else None
    if cv2 is not None:
        # 14 microseconds for 224 x 224. A copy of the transposed view takes 66.
        cv2.split(pixels, [out[0], out[1], out[2]])
    else:
        np.copyto(out, planes)
    return torch.from_numpy(out) if out_tensor is None else out_tensor


def to_channels_last(
    pixels: np.ndarray, out: np.ndarray | None = None, out_tensor: Any = None
) -> Any:
    """Return a uint8 tensor of shape (channels, height, width) in the memory order of ``pixels``.

    Args:
        out: Memory for the result, of shape (height, width, channels). Ignored unless it fits.
        out_tensor: A tensor of shape (channels, height, width) over ``out``, returned if the result
            is there. None: made here.
    """
    import torch

    if pixels is out:
        pass  # the last step wrote there
    elif out is not None and out.shape == pixels.shape and out.dtype == np.uint8:
        _interleave(pixels, out)
        pixels = out
    elif out is not None or not (pixels.flags.c_contiguous and pixels.flags.writeable):
        made: np.ndarray = np.empty(pixels.shape, np.uint8)  # an earlier step may have used ``out``
        _interleave(pixels, made)
        pixels = made
    if pixels is out and out_tensor is not None:
        return out_tensor
    return torch.from_numpy(pixels.transpose(2, 0, 1))


def _interleave(pixels: np.ndarray, out: np.ndarray) -> None:
    """Copy pixels to C-contiguous memory.

    torch returns separate planes where it has no vector code to shrink images (Arm).
    """
    planes = pixels.transpose(2, 0, 1)
    cv2 = opencv() if len(planes) == 3 and planes.flags.c_contiguous else None
    if cv2 is None or cv2.merge([planes[0], planes[1], planes[2]], out) is not out:
        np.copyto(out, pixels)


def from_pillow(image: Any) -> np.ndarray:
    """Return the RGB pixels of a Pillow image. Scales 16 bits to 8, where Pillow would clip."""
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.int64) + 128) // 257
    elif image.mode == "F":
        grey = np.rint(np.asarray(image))
    else:
        return np.asarray(image.convert("RGB"))
    return np.repeat(np.clip(grey, 0, 255).astype(np.uint8)[:, :, None], 3, axis=2)


def as_pixels(image: Any) -> np.ndarray:
    """Return the pixels of a Pillow image, an array, or a tensor with its channels first.

    Raises:
        BadImage: It is not a uint8 image.
    """
    if hasattr(image, "getbands"):
        return from_pillow(image)
    pixels: np.ndarray = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.ndim == 3 and hasattr(image, "detach"):
        pixels = pixels.transpose(1, 2, 0)
    is_image = pixels.ndim == 3 and pixels.size > 0 and pixels.shape[2] in _NUM_CHANNELS
    if pixels.dtype != np.uint8 or not is_image:
        raise BadImage(
            f"a {type(image).__name__} of {pixels.dtype}, shape {np.shape(image)}, is not a "
            "uint8 image",
            likely="images must be uint8: arrays of (height, width, channels) or tensors of "
            "(channels, height, width).",
            remedy="crop before converting the image to floats, and use array.transpose(1, 2, 0) "
            "for arrays with the channels first",
        )
    return pixels
