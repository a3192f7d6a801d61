"""Headers of tar archives: the name, place and size of each regular file.

Reads ustar, GNU and PAX archives, and skips over the files' content. Everything that has no content
of its own at one place (compressed archives, links, sparse files) is refused with the reason.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import numpy as np

from penstock.errors import BadStore, Damaged, warn_user

BLOCK = 512
_ZEROS = bytes(BLOCK)
_WINDOW_BYTES = 256 << 10
_SHORT_BYTES = 4 * BLOCK
_FAR = 8 << 10
"""Headers farther apart than this are read one by one, without the content between them."""
_NUM_CHECKED = 1024
_MAX_EXTENDED = 16 << 20
"""Limit of PAX headers and long names. A longer one is damaged."""
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
}
_OTHERS = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_SPARSE = re.compile(rb"GNU\.sparse")
_REGULAR = frozenset(b"0\x007")
_LINKS = {ord("1"): "a hard link", ord("2"): "a symbolic link", ord("S"): "a sparse file"}


class Member(NamedTuple):
    """A regular file in an archive.

    Attributes:
        offset: Where its content begins. The header is the block before it.
        check: CRC-32 of the header.
    """

    name: bytes
    offset: int
    size: int
    check: int


def scan_members(
    source: int | Callable[[int, int], bytes], path: str, num_bytes: int | None = None
) -> Iterator[Member]:
    """Yield the regular files of an open archive, in order.

    Directories and devices are skipped.

    Args:
        source: A descriptor, or a function that reads, given an offset and a number of bytes.
        num_bytes: The size of the archive, if it is read by a function.

    Raises:
        BadStore: The file is not a tar archive, is compressed, truncated or damaged, or contains
            links or sparse files.
    """
    return _Scan(source, path, num_bytes).members()


class _Scan:
    """One pass over the headers of an archive."""

    def __init__(
        self, source: int | Callable[[int, int], bytes], path: str, num_bytes: int | None
    ) -> None:
        self._source = source
        self._path = path
        self._num_bytes = os.fstat(source).st_size if isinstance(source, int) else num_bytes or 0
        self._window, self._start = b"", 0
        self._unchecked: list[bytes] = []
        self._places: list[int] = []
        self._defaults: dict[bytes, bytes] = {}

    def members(self) -> Iterator[Member]:
        place = before = 0
        extended: dict[bytes, bytes] = {}
        self._refuse_compressed()
        while True:
            header = self._read(place, BLOCK, is_far=place - before > _FAR)
            if header == _ZEROS:
                self._check_headers()
                self._check_rest(place)
                return
            if len(header) < BLOCK:
                self._check_headers()
                self._truncated(f"it ends at byte {self._num_bytes} without an end mark")
            kind, size = header[156], self._number(header, place)
            self._check_later(header, place)
            content, before = place + BLOCK, place
            if kind in b"xXgLK":
                fields = self._extended(kind, content, size)
                if kind == ord("g"):
                    self._defaults.update(fields)
                else:
                    extended.update(fields)
                place = content + _padded(size)
                continue
            if extended or self._defaults:
                extended = {**self._defaults, **extended}
                size = int(extended.get(b"size", size))
            name = extended.get(b"path") or _name(header)
            if kind in _LINKS or (extended and any(map(_SPARSE.match, extended))):
                self._refuse(name, place, _LINKS.get(kind, _LINKS[ord("S")]))
            extended = {}
            # Links, devices and folders (types 1 to 6) have no content, whatever the size says.
            place = content + (0 if kind in b"3456" else _padded(size))
            if place > self._num_bytes:
                self._check_headers()
                self._truncated(
                    f"{_shown(name)} at byte {content} has {size} bytes, and the archive ends at "
                    f"byte {self._num_bytes}"
                )
            if kind in _REGULAR and not (kind == 0 and name.endswith(b"/")):
                yield Member(name, content, size, zlib.crc32(header))

    # -- reading ---------------------------------------------------------------------------------

    def _read(self, place: int, num_bytes: int, *, is_far: bool = False) -> bytes:
        """Return bytes of the archive, fewer at its end. Reads ahead unless ``is_far``."""
        first = place - self._start
        if not 0 <= first <= len(self._window) - num_bytes:
            wanted = max(num_bytes, _SHORT_BYTES if is_far else _WINDOW_BYTES)
            self._window, self._start, first = self._pread(wanted, place), place, 0
        return self._window[first : first + num_bytes]

    def _pread(self, num_bytes: int, place: int) -> bytes:
        if not isinstance(self._source, int):
            return self._source(place, num_bytes)
        try:
            if hasattr(os, "pread"):
                return os.pread(self._source, num_bytes, place)
            os.lseek(self._source, place, os.SEEK_SET)
            return os.read(self._source, num_bytes)
        except OSError as error:
            raise Damaged(
                f"{self._path} cannot be read at byte {place}: {error.strerror or error}",
                path=self._path,
            ) from None

    def _extended(self, kind: int, content: int, size: int) -> dict[bytes, bytes]:
        """Return the fields of a PAX header, or a GNU long name as the field ``path``."""
        if size > _MAX_EXTENDED or content + size > self._num_bytes:
            self._check_headers()
            self._truncated(f"the extended header at byte {content - BLOCK} has {size} bytes")
        data = self._read(content, size)
        if kind == ord("L"):
            return {b"path": data.partition(b"\0")[0]}
        if kind == ord("K"):
            return {}
        fields = {}
        while data:
            length, _, _ = data.partition(b" ")
            if not length.isdigit() or not 0 < int(length) <= len(data):
                self._damaged(content - BLOCK, "its PAX header is invalid")
            name, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
            fields[name] = value
            data = data[int(length) :].lstrip(b"\0")
        if not fields.get(b"size", b"0").isdigit():
            self._damaged(content - BLOCK, "its PAX header is invalid")
        return fields

    # -- checks ----------------------------------------------------------------------------------

    def _number(self, header: bytes, place: int) -> int:
        """Return the size in a header: octal, or binary if it does not fit."""
        if header[124] == 0x80:
            return int.from_bytes(header[125:136], "big")
        size = _octal(header[124:136])
        if size < 0:
            self._check_headers()
            self._damaged(place, "its size is not a number")
        return size

    def _check_later(self, header: bytes, place: int) -> None:
        """Verify the header's checksum together with many others."""
        self._unchecked.append(header)
        self._places.append(place)
        if len(self._unchecked) >= _NUM_CHECKED or place == 0:
            self._check_headers()

    def _check_headers(self) -> None:
        headers = np.frombuffer(b"".join(self._unchecked), np.uint8).reshape(-1, BLOCK).copy()
        stated = _octal_columns(headers[:, 148:156])
        headers[:, 148:156] = ord(" ")
        unsigned = headers.sum(axis=1, dtype=np.int64)
        signed = headers.view(np.int8).sum(axis=1, dtype=np.int64)  # as some old programs do
        (wrong,) = np.nonzero((unsigned != stated) & (signed != stated))
        if wrong.size:
            self._damaged(self._places[wrong[0]], "its checksum does not match")
        self._unchecked, self._places = [], []

    def _check_rest(self, end: int) -> None:
        """Warn of content behind the end mark, which tar programs ignore."""
        rest = self._read(end, 2 * _WINDOW_BYTES)
        if rest.strip(b"\0"):
            warn_user(
                f"{self._path} has content after its end mark at byte {end}, which is ignored. "
                "Archives that were joined with cat end at the first end mark; join them with "
                "`tar --concatenate` instead."
            )

    def _refuse_compressed(self) -> None:
        start = self._read(0, BLOCK)
        if not start:
            raise BadStore(
                f"{self._path} is empty (0 bytes). An archive without files has an end mark",
                likely="the program that wrote it was stopped, or the disk was full.",
                path=self._path,
            )
        for magic, (name, program) in _COMPRESSED.items():
            if start.startswith(magic):
                raise BadStore(
                    f"{self._path} is compressed with {name}. Its samples have no fixed place, so "
                    "they cannot be read by index",
                    remedy=f"{program} {self._path}",
                    path=self._path,
                )
        if len(start) < BLOCK:
            self._damaged(0, f"it has {len(start)} bytes, so it has another format or is truncated")

    def _refuse(self, name: bytes, place: int, kind: str) -> NoReturn:
        raise BadStore(
            f"{_shown(name)} in {self._path} is {kind}, so its content is not in one place of the "
            "archive",
            where=f"byte {place}",
            remedy="write the archive again with `tar --hard-dereference --dereference`, without "
            "--sparse",
            path=self._path,
        )

    def _truncated(self, detail: str) -> NoReturn:
        raise BadStore(
            f"{self._path} is truncated: {detail}",
            likely="a copy or the program that wrote it was interrupted, or the disk was full.",
            remedy="copy or write the archive again. If it ends after a complete file, "
            f"`truncate -s +1024 {self._path}` adds the end mark",
            path=self._path,
        )

    def _damaged(self, place: int, detail: str) -> NoReturn:
        if not place:
            start = self._read(0, 8)
            kind = next((name for magic, name in _OTHERS.items() if start.startswith(magic)), None)
            raise BadStore(
                f"{self._path} is not a tar archive: {detail}",
                likely=f"its first bytes are those of {kind!r}."
                if kind
                else "it has another format, or its first bytes are damaged.",
                remedy=f"open_dataset({self._path!r}, format={kind!r})" if kind else None,
                path=self._path,
            )
        raise BadStore(
            f"{self._path} has an invalid header at byte {place}: {detail}",
            likely="its bytes have changed since it was written.",
            remedy="copy the archive again from its source",
            path=self._path,
        )


def _octal(field: bytes) -> int:
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return -1


def _octal_columns(fields: np.ndarray) -> np.ndarray:
    """Return the numbers in rows of 8 bytes: 6 octal digits and a zero byte, or another form."""
    digits = fields[:, :6].astype(np.int64) - ord("0")
    found = digits @ (8 ** np.arange(5, -1, -1))
    is_usual = ((digits >= 0) & (digits < 8)).all(axis=1) & (fields[:, 6] == 0)
    for row in np.flatnonzero(~is_usual).tolist():
        found[row] = _octal(fields[row].tobytes())
    return np.asarray(found)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[345] and header[257:263] == b"ustar\0":
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace"))


# Samples

_META = re.compile(rb"__[^/]*__(/|$)")


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Split the name of a file into the sample's key and the field, as WebDataset does.

    The key is the path up to the first dot after the last slash. The rest is the field's name.
    Returns None for files that are not part of a sample: without a dot, or ``__metadata__``.

    Example:
        >>> split_name(b"train/0001.seg.png")
        (b'train/0001', b'seg.png')
        >>> split_name(b"README") is split_name(b"__meta__/a.txt") is None
        True
    """
    if name.startswith(b"__") and (_META.match(name) or (b"/" not in name and name[-2:] == b"__")):
        return None
    dot = name.find(b".", name.rfind(b"/") + 1)
    # Behind a slash, the dot of a hidden file separates too, if its folder's name has no dot.
    folder = name.rfind(b"/", 0, max(0, dot - 1)) + 1
    if dot <= folder or b"." in name[folder:dot]:
        return None
    return name[:dot], name[dot + 1 :]
