"""Requests to object storage, with retries and a bound on each.

Used by the downloader and by commands that copy sets, never in a training process.

obstore finds credentials as the provider's own tools do: in environment variables, or from the
machine or container. For S3, the profiles of ``~/.aws`` are used where boto3 is installed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from penstock.sources.remote.address import uses_fsspec, without_secrets

_T = TypeVar("_T")
CONNECT_S, STALL_S, REQUEST_S = 10, 20, 120
"""Limits for connecting, for silence within an answer, and for a whole request."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_REFUSED = (
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestExpired",
    "AccessDenied",
)
_WITHOUT_RANGES = ("non-partial response", "Operation not supported")


class FetchFailed(Exception):
    """An object could not be read.

    Args:
        kind: ``"network"``, ``"access"`` or ``"damaged"``.
    """

    def __init__(self, kind: str, what: str, likely: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.facts = {"kind": kind, "what": what, "likely": likely, "remedy": remedy}


class ObjectStore:
    """The objects under one URL.

    Args:
        retry_s: How long a request is repeated after faults that can pass.
        note_retry: Called before each repetition.
    """

    def __init__(self, url: str, retry_s: float, note_retry: Callable[[], None]) -> None:
        self.url = url
        self._retry_s = retry_s
        self._note_retry = note_retry
        self._obstore: Any
        self._store: Any = None
        if uses_fsspec(url):
            from penstock.sources.remote.fsspec_store import FsspecStore

            self._obstore = FsspecStore(url)
        else:
            import obstore

            self._obstore, self._store = obstore, _open_store(url)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of an object, or of a range of it. Blocks for a bounded time.

        Raises:
            FetchFailed: The storage refuses, or faults last longer than ``retry_s``.
        """
        part = "" if end is None else f", bytes {start} to {end}"
        return self._repeat(
            lambda: self._read_once(name, start, end), name, f"{part} could not be read"
        )

    def write(self, name: str, content: bytes) -> None:
        """Write an object as a whole."""
        self._repeat(
            lambda: self._obstore.put(self._store, name, content), name, " could not be written"
        )

    def size_of(self, name: str) -> int | None:
        """Return the number of bytes of an object, or None if it does not exist."""

        def look() -> int | None:
            try:
                return int(self._obstore.head(self._store, name)["size"])
            except FileNotFoundError:
                return None

        return self._repeat(look, name, " could not be looked up")

    def list_some(self) -> dict[str, int]:
        """Return the names and sizes of some objects."""
        try:
            found: Any = next(iter(self._obstore.list(self._store)), [])
        except Exception as error:  # not repeated, because web servers have no lists
            raise self._explain(error, "", " could not be listed") from None
        return {str(one["path"]): int(one["size"]) for one in found}

    def delete(self, name: str) -> None:
        self._repeat(lambda: self._obstore.delete(self._store, name), name, " could not be deleted")

    def _repeat(self, call: Callable[[], _T], name: str, what: str) -> _T:
        """Call a function again after faults that can pass, for a bounded time."""
        deadline_s, pause_s = time.monotonic() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Exception as error:
                failed = self._explain(error, name, what)
                is_final = failed.facts["kind"] == "access" or isinstance(error, FileNotFoundError)
                if is_final or time.monotonic() + pause_s > deadline_s:
                    raise failed from None
            self._note_retry()
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read_once(self, name: str, start: int, end: int | None) -> bytes:
        if end is None:
            return bytes(self._obstore.get(self._store, name).bytes())
        found = bytes(self._obstore.get_range(self._store, name, start=start, end=end))
        if len(found) != end - start:
            raise OSError(f"the answer has {len(found)} bytes instead of {end - start}")
        return found

    def _explain(self, error: Exception, name: str, what: str) -> FetchFailed:
        what = f"{self.url}/{name}{what}: {_shorten(without_secrets(error))}"
        refused = (
            self._obstore.exceptions.PermissionDeniedError,
            self._obstore.exceptions.UnauthenticatedError,
        )
        if isinstance(error, refused) or any(word in str(error) for word in _REFUSED):
            return FetchFailed(
                "access",
                what,
                "the credentials are missing or expired, or do not allow this.",
                "renew the credentials in the environment or the provider's files, and run again",
            )
        if isinstance(error, FileNotFoundError):
            return FetchFailed(
                "network",
                f"{self.url}/{name} does not exist",
                "the set was deleted or is not complete, or the address is wrong.",
                f"penstock pack SOURCE FOLDER, and copy the folder to {self.url}",
            )
        if any(words in str(error) for words in _WITHOUT_RANGES):
            return FetchFailed(
                "network",
                what,
                "the server ignores ranges and sends whole objects, as rclone serve s3 does.",
                f"penstock pack {self.url} FOLDER, which reads whole objects, and Packed('FOLDER')",
            )
        return FetchFailed(
            "network",
            what,
            "the network or the storage is down or overloaded.",
            "run again later; a larger network_timeout_s= waits longer",
        )


def _open_store(url: str) -> Any:
    from obstore.store import from_url

    if url.startswith("file://"):
        return from_url(url)
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=STALL_S),
            "timeout": timedelta(seconds=REQUEST_S),
            "allow_http": url.startswith("http://") or _is_plain_endpoint(),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    }
    if url.startswith("s3://") and _needs_boto3():
        from obstore.auth.boto3 import Boto3CredentialProvider

        options["credential_provider"] = Boto3CredentialProvider()
    return from_url(url, **options)


def _is_plain_endpoint() -> bool:
    """Return True if the user's own S3 endpoint has no TLS. It was requested by name."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _needs_boto3() -> bool:
    """Return True if credentials can only come from the files that boto3 reads."""
    has_key = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE")
    files = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_PROFILE")
    has_files = any(os.environ.get(name) for name in files)
    has_files = has_files or os.path.exists(os.path.expanduser("~/.aws/credentials"))
    return bool(not has_key and has_files and importlib.util.find_spec("boto3"))


def _shorten(text: str) -> str:
    """Return the first part of obstore's messages, which repeat themselves as debug output."""
    text = text.partition(" Debug source:")[0]
    return text if len(text) <= 400 else text[:400] + " ..."
