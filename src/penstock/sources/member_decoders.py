"""Decoders of single fields by the ending of their name, with WebDataset's endings.

    jpg jpeg png ppm pgm pbm pnm bmp tif tiff webp    uint8 tensor (channels, height, width)
    npy npz                         NumPy array, dict of arrays
    json jsn                        JSON
    txt text transcript             str
    cls cls2 index inx id           int
    pth                             torch.load of tensors
    pkl pickle pyd                  any object, only with allow_pickle=True
    anything else                   bytes

``.gz`` behind an ending is decompressed first.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from penstock.errors import BadArgument
from penstock.images.crops import Crop, open_image

MemberDecoder = Callable[[memoryview], Any]
_Layout = Literal["C", "F"]
IMAGES = frozenset(
    [
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "ppm",
        "pgm",
        "pbm",
        "pnm",
        "bmp",
        "tif",
        "tiff",
        "webp",
        "gif",
    ]
)
PICKLES = frozenset(["pkl", "pickle", "pyd"])


def make_decoder(
    name: str, transform: Callable[[Any], Any] | None = None, *, allow_pickle: bool = False
) -> MemberDecoder:
    """Return the decoder of a field, and apply Penstock's transforms to images.

    Args:
        name: The field's name, such as ``seg.png``.
        transform: Applied during decoding if it is one of Penstock's crops and the field is an
            image. Others are left to the caller.

    Example:
        >>> make_decoder("json")(memoryview(b'{"a": [1, 2]}'))
        {'a': [1, 2]}
        >>> make_decoder("txt.gz")(memoryview(gzip.compress(b"text")))
        'text'
    """
    if name.endswith(".gz"):
        inner = make_decoder(name[:-3], transform, allow_pickle=allow_pickle)
        return lambda data: inner(memoryview(gzip.decompress(data)))
    ending = name.rpartition(".")[2]
    if ending in IMAGES:
        crop = transform if isinstance(transform, Crop) else None
        return lambda data: open_image(data, crop)
    kinds: dict[str, Callable[[bool], MemberDecoder]] = {
        "npy": _NpyDecoder,
        "npz": _NpzDecoder,
        "pth": _TorchDecoder,
    }
    if ending in kinds:
        return kinds[ending](allow_pickle)
    return _PICKLED[ending] if ending in _PICKLED and allow_pickle else _PLAIN.get(ending, bytes)


def refuse_pickles(names: list[str], store: str) -> None:
    """Raise if a field is a pickle."""
    for name in names:
        if name.removesuffix(".gz").rpartition(".")[2] in PICKLES:
            others = [one for one in names if one != name]
            raise BadArgument(
                f"field {name!r} of {store} is pickled. Unpickling runs any code that the file "
                "contains",
                remedy=f"open_dataset(..., columns={others}) to leave it out, or allow_pickle=True "
                "if you trust the file",
                field=name,
            )


def is_cropped_inside(name: str, transform: Any) -> bool:
    """Return True if the decoder applies the transform."""
    ending = name.removesuffix(".gz").rpartition(".")[2]
    return isinstance(transform, Crop) and ending in IMAGES


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _integer(data: memoryview) -> int:
    return int(bytes(data))


def _json(data: memoryview) -> Any:
    return json.loads(bytes(data))


_PLAIN: dict[str, MemberDecoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
}
_PICKLED: dict[str, MemberDecoder] = dict.fromkeys(PICKLES, pickle.loads)


class _NpyDecoder:
    """Decodes ``.npy`` content. The header of most samples is that of the sample before."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._last: tuple[bytes, int, tuple[int, ...], np.dtype[Any], _Layout] | None = None

    def __call__(self, data: memoryview) -> np.ndarray:
        if self._last is not None:
            header, num_bytes, shape, dtype, layout = self._last
            length = len(header)
            if len(data) == num_bytes and bytes(data[:length]) == header:
                return np.array(np.ndarray(shape, dtype, data, length, order=layout), order="K")
        found: np.ndarray = _load_numpy(data, self._allow_pickle)
        self._remember(found, data)
        return found

    def _remember(self, found: np.ndarray, data: memoryview) -> None:
        length = len(data) - found.nbytes
        if not found.dtype.hasobject and length > 0:
            layout: _Layout = "C" if found.flags.c_contiguous else "F"
            header = bytes(data[:length])
            self._last = header, len(data), found.shape, found.dtype, layout


class _NpzDecoder:
    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle

    def __call__(self, data: memoryview) -> dict[str, np.ndarray]:
        with _load_numpy(data, self._allow_pickle) as found:
            return dict(found)


def _load_numpy(data: memoryview, allow_pickle: bool) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=allow_pickle)


class _TorchDecoder:
    def __init__(self, allow_pickle: bool) -> None:
        self._weights_only = not allow_pickle

    def __call__(self, data: memoryview) -> Any:
        import torch

        stream = io.BytesIO(data)
        return torch.load(stream, map_location="cpu", weights_only=self._weights_only)


_CONFIGURED: dict[str, Callable[[bool], MemberDecoder]] = {
    "npy": _NpyDecoder,
    "npz": _NpzDecoder,
    "pth": _TorchDecoder,
}
