"""Archives in WebDataset's layout, written with Python's own tarfile."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from penstock.sources.tar_headers import Member, scan_members

Files = Iterable[tuple[str, bytes]]


def npy(values: np.ndarray) -> bytes:
    """Return an array as the content of a ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def write_tar(path: Path, files: Files, format: int = tarfile.GNU_FORMAT) -> Path:
    """Write files to an archive."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def sample_files(first: int, last: int, width: int = 12) -> list[tuple[str, bytes]]:
    """Return the files of numbered samples: an array, a class, and JSON."""
    files = []
    for number in range(first, last):
        array = np.full(width, number, np.int32)
        files += [
            (f"{number:06d}.x.npy", npy(array)),
            (f"{number:06d}.cls", str(number).encode()),
            (f"{number:06d}.json", json.dumps({"number": number}).encode()),
        ]
    return files


def write_shards(folder: Path, counts: Iterable[int], width: int = 12) -> list[str]:
    """Write one archive for each count, with that many samples. Returns their paths."""
    paths, first = [], 0
    for number, count in enumerate(counts):
        path = folder / f"shard-{number:03d}.tar"
        write_tar(path, sample_files(first, first + count, width))
        paths.append(str(path))
        first += count
    return paths


def scan(path: Path) -> list[Member]:
    """Return the files of an archive, as the reader finds them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(scan_members(descriptor, str(path)))
    finally:
        os.close(descriptor)
