"""Places that obstore does not know, such as ``hf://``, through fsspec.

Has the functions of the module ``obstore`` that :class:`ObjectStore` calls. Used by the downloader
and by commands that copy sets. fsspec has no limit for the time of a request, so only the limits of
readers hold.

Tested by ``tests/integration/sources/remote/test_object_store.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

_VERSIONS = ("ETag", "etag", "blob_id", "mtime", "last_modified")
"""What file systems call the version of a file."""


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

    def get(self, store: Any, name: str, options: Any = None) -> Any:
        start, end = (options or {}).get("range", (None, None))
        content = bytes(self._files.cat_file(self._path(name), start=start, end=end))
        return SimpleNamespace(bytes=lambda: content, meta=self.head(store, name))

    def put(self, store: Any, name: str, content: bytes) -> None:
        self._files.pipe_file(self._path(name), content)

    def head(self, store: Any, name: str) -> dict[str, Any]:
        return self._describe(self._files.info(self._path(name)), name)

    def _describe(self, found: Mapping[str, Any], name: str) -> dict[str, Any]:
        etag = next((found[key] for key in _VERSIONS if found.get(key)), "")
        return {"path": name, "size": found["size"], "e_tag": str(etag)}

    def delete(self, store: Any, name: str) -> None:
        self._files.rm_file(self._path(name))

    def list(self, store: Any) -> Iterator[Any]:
        yield self.list_with_delimiter(store)["objects"]

    def list_with_delimiter(self, store: Any, prefix: str | None = None) -> dict[str, Any]:
        found = self._files.ls(self._path(prefix) if prefix else self._root, detail=True)
        start = f"{prefix}/" if prefix else ""
        return {
            "objects": [
                self._describe(one, start + one["name"].rpartition("/")[2])
                for one in found
                if one["type"] == "file"
            ]
        }

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
