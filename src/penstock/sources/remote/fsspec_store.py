"""Places that obstore does not know, such as ``hf://``, through fsspec.

Has the functions of the module ``obstore`` that :class:`ObjectStore` calls. Used by the downloader
and by commands that copy sets. fsspec has no limit for the time of a request, so only the limits of
readers hold.

Tested by ``tests/integration/sources/remote/test_object_store.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class FsspecStore:
    """The objects under one URL.

    Raises:
        ImportError: The package for these URLs is not installed. The message names it.
    """

    exceptions = SimpleNamespace(
        PermissionDeniedError=PermissionError, UnauthenticatedError=PermissionError
    )

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped,unused-ignore]

        self._files, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)

    def get(self, store: Any, name: str) -> Any:
        content = bytes(self._files.cat_file(self._path(name)))
        return SimpleNamespace(bytes=lambda: content)

    def get_range(self, store: Any, name: str, *, start: int, end: int) -> bytes:
        return bytes(self._files.cat_file(self._path(name), start=start, end=end))

    def put(self, store: Any, name: str, content: bytes) -> None:
        self._files.pipe_file(self._path(name), content)

    def head(self, store: Any, name: str) -> dict[str, Any]:
        return {"size": self._files.info(self._path(name))["size"]}

    def delete(self, store: Any, name: str) -> None:
        self._files.rm_file(self._path(name))

    def list(self, store: Any) -> Iterator[Any]:
        found = self._files.ls(self._root, detail=True)
        yield [
            {"path": one["name"].rpartition("/")[2], "size": one["size"]}
            for one in found
            if one["type"] == "file"
        ]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
