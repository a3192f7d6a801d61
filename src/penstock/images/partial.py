"""A JPEG, decoded only down to the lower edge of the crop that is read of it.

    bytes ... frame: height 375 ... scan: rows of blocks, top to bottom ... end
              frame: height 208     the decoder stops here, and says what it left over

No decoder that Python has takes a part of a picture. But a JPEG's blocks lie in the order of its
rows, so one that claims to be less high is decoded to the same pixels, and no further. A tenth of
the rows of 500 x 375 is below random crops.

Only for packed sets, whose bytes have checksums: damage that makes the decoder lose its place is
often noticed at the end of the picture only. Of what decoding in full names above the crop, two
thirds (30 random bytes in the file) to all of it (30 zeros) is not noticed here. A file that was
cut off is noticed either way. Whatever else the decoder has to say makes it be decoded in full, and
judged as always.
"""

from __future__ import annotations

import importlib

import numpy as np

from penstock.images.decoders import jpeg_decoder
from penstock.images.headers import Header

PARTIAL = frozenset({"simplejpeg"})
"""Decoders that can say what was left over; others write it to the terminal."""
_LEFT_OVER = "extraneous bytes before marker 0xd9"
_SEQUENTIAL = (0xC0, 0xC1)
_SCAN, _RESTARTS = 0xDA, 0xDD
_MARGIN = 8
"""Rows below the last one that count: its colours lie between those of two rows of blocks."""
_LEAST_SAVED = 16
"""Rows; a copy of the bytes is made for them."""


def decode_top(data: bytes, header: Header, num_rows: int) -> np.ndarray:
    """RGB pixels of at least ``num_rows`` rows of a plain JPEG, maybe of all.

    Raises:
        ValueError: What simplejpeg says of a broken file.
    """
    tall = num_rows + _MARGIN
    if header.height - tall < _LEAST_SAVED or not _is_one_scan(data, header):
        return jpeg_decoder("simplejpeg")(data, 1)
    claimed = b"".join(
        (data[: header.frame + 5], tall.to_bytes(2, "big"), data[header.frame + 7 :])
    )
    pixels: np.ndarray = np.empty((tall, header.width, 3), np.uint8)
    try:
        importlib.import_module("simplejpeg").decode_jpeg(claimed, "RGB", buffer=pixels)
    except ValueError as error:
        # libjpeg keeps the first complaint: this one means that nothing was wrong before.
        if _LEFT_OVER not in str(error):
            return jpeg_decoder("simplejpeg")(data, 1)
    return pixels


def _is_one_scan(data: bytes, header: Header) -> bool:
    """Whether all colours of a row lie together: not progressive, nor one scan for each.

    With restart markers, what is left over would read as an error in the rows above.
    """
    if data[header.frame + 1] not in _SEQUENTIAL:
        return False
    place = header.frame
    while place + 4 < len(data) and data[place] == 0xFF:
        if data[place + 1] == _SCAN:
            return data[place + 4] == header.channels
        if data[place + 1] == _RESTARTS:
            return False
        place += 2 + ((data[place + 2] << 8) | data[place + 3])
    return False
