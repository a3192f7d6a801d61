"""Reads size, channels and orientation from the first bytes of an image file.

No pixels are decoded, so an image that is too large can be refused first.

Tested by ``tests/compat/test_images.py``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_NO_SIZE = frozenset({0x01, *range(0xD0, 0xDA)})
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_ORIENTATION = 0x0112


class Header(NamedTuple):
    """The header of an image. ``kind`` is jpeg, png, webp or other. A size of 0 means unknown."""

    kind: str
    height: int = 0
    width: int = 0
    channels: int = 3
    orientation: int = 1


def read_header(data: memoryview) -> Header:
    """Read the header of an encoded image. Never raises, because the decoder reports errors.

    Example:
        >>> read_header(memoryview(b"GIF89a"))
        Header(kind='other', height=0, width=0, channels=3, orientation=1)
    """
    try:
        start = bytes(data[:16])
        if start[:2] == b"\xff\xd8":
            return _read_jpeg(data)
        if start[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack(">II", data[16:24])
            return Header("png", height, width)
        if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            return Header("webp", *_webp_size(data))
    except (struct.error, IndexError):
        pass
    return Header("other")


def _read_jpeg(data: memoryview) -> Header:
    """Walk the segments up to the frame. The first Exif segment before it has the orientation."""
    place, orientation, end = 2, 1, len(data)
    while place + 9 < end:
        if data[place] != 0xFF:
            break
        marker = data[place + 1]
        if marker == 0xFF or marker in _NO_SIZE:
            place += 1 if marker == 0xFF else 2
            continue
        length = (data[place + 2] << 8) | data[place + 3]
        if marker in _FRAMES:
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            return Header("jpeg", height, width, data[place + 9], orientation)
        if marker == 0xE1 and bytes(data[place + 4 : place + 10]) == b"Exif\0\0":
            orientation = read_orientation(data[place + 10 : place + 2 + length])
        place += 2 + length
    return Header("jpeg")


def read_orientation(exif: memoryview) -> int:
    """Return the orientation in a block of Exif data (1 to 8), or 1 if it has none."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(exif[:2]))
    if order is None:
        return 1
    try:
        (start,) = struct.unpack(order + "I", exif[4:8])
        (count,) = struct.unpack(order + "H", exif[start : start + 2])
        for entry in range(start + 2, start + 2 + 12 * min(count, 200), 12):
            tag, kind = struct.unpack(order + "HH", exif[entry : entry + 4])
            if tag == _ORIENTATION and kind == 3:
                (found,) = struct.unpack(order + "H", exif[entry + 8 : entry + 10])
                return found if 1 <= found <= 8 else 1
    except struct.error:
        pass
    return 1


def _webp_size(data: memoryview) -> tuple[int, int]:
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        return 1 + int.from_bytes(data[27:30], "little"), width
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + ((bits >> 14) & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", data[26:30])
        return height & 0x3FFF, width & 0x3FFF
    return 0, 0
