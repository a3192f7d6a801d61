"""The objects of a dataset in object storage: names, sizes and ETags.

The list is kept in the cache as ``objects.json``. Its digest is the name of the set's folder there,
so a dataset whose objects were replaced never reads blocks of the old ones.

Tested by ``tests/integration/sources/remote/test_remote_objects.py``.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

OBJECTS = "objects.json"
_AT_ONCE = 32
_MAGIC = "*?["


class ObjectEntry(NamedTuple):
    """An object. ``etag`` is its time of change where the storage has no ETags."""

    name: str
    bytes: int
    etag: str


class ObjectList(NamedTuple):
    """The objects of a dataset, in the order of its samples."""

    entries: tuple[ObjectEntry, ...]

    def to_json(self) -> str:
        return json.dumps({"objects": self.entries})

    @classmethod
    def from_json(cls, text: str, path: str = OBJECTS) -> ObjectList:
        return cls(tuple(ObjectEntry(*one) for one in json.loads(text)["objects"]))

    def store(self, root: str, url: str) -> str:
        """Write the list into the cache, unless it is there. Returns the set's folder."""
        text = self.to_json()
        digest = hashlib.sha256(f"{url}\n{text}".encode()).hexdigest()
        folder = os.path.join(root, digest[:32])
        path = os.path.join(folder, OBJECTS)
        if not os.path.exists(path):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            part = f"{path}.{os.getpid()}"
            with open(part, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        return folder


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in _MAGIC)


def split_addresses(addresses: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the folder that addresses have in common, and their names in it.

    None if they are not in one bucket or on one host.

    Example:
        >>> split_addresses(["s3://bucket/train/a.tar", "s3://bucket/test/b.tar"])
        ('s3://bucket', ['train/a.tar', 'test/b.tar'])
        >>> split_addresses(["s3://bucket/train/"])
        ('s3://bucket/train', [''])
    """
    parts = [one.split("/") for one in addresses]
    depth = 0
    for level in zip(*(one[:-1] for one in parts), strict=False):
        if len(set(level)) > 1:
            break
        depth += 1
    if depth < 3:  # scheme, nothing, bucket
        return None
    return "/".join(parts[0][:depth]), ["/".join(one[depth:]) for one in parts]


def find_objects(store: Any, names: Iterable[str]) -> list[list[ObjectEntry] | None]:
    """Return the objects that each name stands for. None: there is no such object.

    Called in a process that talks to the network.

    Args:
        names: Objects, patterns such as ``train-*.tar``, or folders, which end with a slash.
    """

    def find(name: str) -> list[ObjectEntry] | None:
        folder, _, last = name.rpartition("/")
        if last and not is_pattern(last):
            found = store.look_up(name)
            return None if found is None else [found]
        pattern = last or "*"
        return [
            one
            for one in sorted(store.list_folder(folder))
            if fnmatch.fnmatchcase(one.name.rpartition("/")[2], pattern)
        ]

    from concurrent.futures import ThreadPoolExecutor  # on first use: opening a set needs none

    with ThreadPoolExecutor(_AT_ONCE, "penstock-list") as pool:
        return list(pool.map(find, names))
