"""JPEG decoders and encoders of the installed libraries, and the choice of a decoder.

The choice is the first of simplejpeg, OpenCV, torchvision and Pillow that decodes one of the user's
files. It is not measured: decoders differ in single pixel values, so it must not depend on chance,
and measuring would import all of them.

Tested by ``tests/compat/test_images.py``.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import BadArgument, CannotPack, MissingExtra
from penstock.machine.image_libraries import find_decoders, opencv

JpegDecoder = Callable[[Any, int], np.ndarray]
"""Takes the bytes of a JPEG and a scale (1, 2, 4 or 8: 1/scale per side). Returns RGB pixels."""
_PACKAGES = {"cv2": "opencv-python-headless", "PIL": "pillow"}


def _by_simplejpeg(data: Any, scale: int) -> np.ndarray:
    simplejpeg: Any = importlib.import_module("simplejpeg")
    data = data if isinstance(data, bytes) else bytes(data)
    options: dict[str, Any] = {}
    if scale > 1:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        options = {"min_height": -(-height // scale), "min_width": -(-width // scale)}
        options |= {"fastdct": True, "fastupsample": True, "min_factor": 1}
    pixels: np.ndarray = simplejpeg.decode_jpeg(data, "RGB", **options)
    return pixels


def _by_cv2(data: Any, scale: int) -> np.ndarray:
    cv2: Any = importlib.import_module("cv2")
    is_rgb = scale == 1 and hasattr(cv2, "IMREAD_COLOR_RGB")  # newer: saves a second pass and copy
    name = "IMREAD_COLOR" if scale == 1 else f"IMREAD_REDUCED_COLOR_{scale}"
    mode = getattr(cv2, f"{name}_RGB" if is_rgb else name) | cv2.IMREAD_IGNORE_ORIENTATION
    found = cv2.imdecode(np.frombuffer(data, np.uint8), mode)
    if found is None:
        raise ValueError("OpenCV cannot decode it")
    pixels: np.ndarray = found if is_rgb else cv2.cvtColor(found, cv2.COLOR_BGR2RGB)
    return pixels


def _by_torchvision(data: Any, scale: int) -> np.ndarray:
    import torch

    tv: Any = importlib.import_module("torchvision.io")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pixels: np.ndarray = tv.decode_jpeg(raw, mode=tv.ImageReadMode.RGB).permute(1, 2, 0).numpy()
    return pixels


def _by_pillow(data: Any, scale: int) -> np.ndarray:
    image: Any = importlib.import_module("PIL.Image")
    with image.open(io.BytesIO(data)) as opened:
        if scale > 1:
            opened.draft("RGB", (opened.width // scale, opened.height // scale))
        return np.asarray(opened.convert("RGB"))


_DECODERS: dict[str, JpegDecoder] = {
    "simplejpeg": _by_simplejpeg,
    "cv2": _by_cv2,
    "torchvision": _by_torchvision,
    "PIL": _by_pillow,
}
PREFERRED = tuple(_DECODERS)
"""In the usual order of speed, fastest first."""
SCALING = frozenset({"simplejpeg", "cv2", "PIL"})
"""Decoders that support a reduced scale."""


def jpeg_decoder(name: str) -> JpegDecoder:
    """Return the decoder with this name. It imports its library when called."""
    return _DECODERS[name]


def available_decoders() -> tuple[str, ...]:
    """Return the decoders that can be used here, without importing them.

    torchvision takes a second to import, so it is included only if it is already imported or if
    there is no other decoder.
    """
    found = find_decoders(PREFERRED)
    is_cheap = [name for name in found if name != "torchvision" or name in sys.modules]
    return tuple(is_cheap) or found


def no_decoder() -> MissingExtra:
    return MissingExtra.named("images", "no library that decodes images is installed")


@functools.cache  # the lookup takes 96 microseconds, a tenth of decoding an image
def check_decoder(name: str | None, call: str) -> None:
    """Raise BadArgument for an unknown decoder, and MissingExtra if it is not installed."""
    if name is None:
        return
    BadArgument.unless_one_of("decoder", name, PREFERRED, call)
    if not find_decoders((name,)):
        raise MissingExtra(
            f"{name} is not installed", remedy=f"pip install {_PACKAGES.get(name, name)}"
        )


_chosen: list[str] = []


def choose_decoder(data: bytes) -> str:
    """Return the first decoder that decodes this JPEG. Later calls return the same.

    Raises:
        MissingExtra: No decoder is installed.
    """
    if _chosen:
        return _chosen[0]
    names = available_decoders()
    if not names:
        raise no_decoder()
    for name in names:
        try:
            jpeg_decoder(name)(data, 1)
        except Exception:  # a broken build, or a file that only other decoders can read
            continue
        _chosen.append(name)
        return name
    return names[0]  # the file is broken


def set_decoder(name: str) -> None:
    """Use the decoder that another process chose. Called in a worker."""
    if name and not _chosen:
        _chosen.append(name)


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return the bytes of a JPEG file. Called by the writer of packed datasets."""
    pixels = np.ascontiguousarray(pixels)
    if find_decoders(("PIL",)):
        file = io.BytesIO()
        image: Any = importlib.import_module("PIL.Image")
        image.fromarray(pixels).save(file, "JPEG", quality=quality)
        return file.getvalue()
    if find_decoders(("simplejpeg",)):
        encode = importlib.import_module("simplejpeg").encode_jpeg
        return bytes(encode(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))
    cv2 = opencv()
    if cv2 is None:
        raise no_decoder()
    swapped = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    is_done, content = cv2.imencode(".jpg", swapped, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not is_done:
        raise CannotPack("OpenCV could not encode an image")
    return bytes(content)
