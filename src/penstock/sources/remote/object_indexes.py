"""Indexes of tars and footers of Parquet files in object storage, kept in the cache.

They are named by address, size and ETag, so those of an object that has changed are made again. A
dataset whose indexes are there opens without reading its objects.

Tested by ``tests/integration/sources/remote/test_remote_objects.py``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from penstock.errors import PenstockError
from penstock.sources.remote.object_files import ObjectFiles, ObjectReader
from penstock.sources.source_files import open_error
from penstock.sources.tar_headers import scan_members
from penstock.sources.tar_index import (
    TarIndex,
    index_members,
    indexing_progress,
    load_index,
    write_index,
)


def open_tar_indexes(files: ObjectFiles) -> list[tuple[TarIndex, str | None]]:
    """Return the index of each archive and its path. Reads the archives without one."""
    found = {
        file: load_index(files.index_path(file), files.stamps[file]) for file in range(len(files))
    }
    missing = [file for file, index in found.items() if index is None]
    read = files.read_in_order(missing)
    with indexing_progress(
        {files.paths[file]: files.stamps[file].size for file in missing}
    ) as tell:
        for file in missing:
            path, stamp = files.paths[file], files.stamps[file]
            members = scan_members(functools.partial(read, file), path, stamp.size)
            index = index_members(members, path, stamp, tell(path))
            place = files.index_path(file)
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            found[file] = load_index(place, stamp) if write_index(index, place) else index
    places = [files.index_path(file) for file in found]
    return [
        (index, place if os.path.exists(place) else None)
        for index, place in zip(found.values(), places, strict=True)
        if index is not None
    ]


def open_parquet_object(files: ObjectFiles, file: int) -> Any:
    """Return pyarrow's reader of an object. Its footer is kept in the cache."""
    import pyarrow.parquet

    place = files.index_path(file)
    metadata = None
    with contextlib.suppress(Exception):  # missing, or damaged: it is read again
        metadata = pyarrow.parquet.read_metadata(place)
    try:
        opened = pyarrow.parquet.ParquetFile(
            ObjectReader(files, file), metadata=metadata, page_checksum_verification=True
        )
    except PenstockError:
        raise
    except Exception as error:
        raise open_error(files.paths[file], error) from None
    if metadata is None:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            part = f"{place}.{os.getpid()}"
            opened.metadata.write_metadata_file(part)
            os.replace(part, place)
    return opened
