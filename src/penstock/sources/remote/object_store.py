"""Requests to object storage, with retries and a bound on each.

Used by the downloader and by commands that copy sets, never in a training process.

obstore finds credentials as the provider's own tools do: in environment variables, or from the
machine or container. For S3, the endpoint and the region of the profile in ``~/.aws/config`` are
used, and its credentials where boto3 is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from penstock.sources.remote.address import uses_fsspec, without_secrets
from penstock.sources.remote.object_list import ObjectEntry

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
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "status code: 403",  # for lists, obstore has no exception of its own
    "403 Forbidden",
)
_ROLES = ("169.254.", "metadata.google.internal", "/latest/api/token", "/latest/meta-data/")
"""Parts of the addresses where cloud machines look for credentials if none are configured."""
_CREDENTIALS_S = 5.0
"""How long the search for credentials is repeated."""
_CREDENTIALS = {
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or, for a public bucket, "
    "AWS_SKIP_SIGNATURE=true",
    "gs": "export GOOGLE_APPLICATION_CREDENTIALS=/path/to/key.json",
    "az": "export AZURE_STORAGE_ACCOUNT_NAME=... AZURE_STORAGE_ACCOUNT_KEY=...",
}
_MANIFEST = "manifest.json"
"""That of :mod:`penstock.sources.manifest`, which imports NumPy."""
_WITHOUT_RANGES = ("non-partial response", "Operation not supported")


class FetchFailed(Exception):
    """An object could not be read.

    Args:
        kind: ``"network"``, ``"access"``, ``"credentials"``, ``"damaged"`` or ``"changed"``.
    """

    def __init__(self, kind: str, what: str, likely: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.facts = {"kind": kind, "what": what, "likely": likely, "remedy": remedy}


class _Changed(Exception):
    """An object has another ETag than when the dataset was opened."""


class ObjectStore:
    """The objects under one URL.

    Args:
        retry_s: How long a request is repeated after faults that can pass.
        note_retry: Called before each repetition, with the fault.
    """

    def __init__(
        self, url: str, retry_s: float, note_retry: Callable[[str], None] = lambda why: None
    ) -> None:
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

    def read(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> bytes:
        """Return the bytes of an object, or of a range of it. Blocks for a bounded time.

        Args:
            etag: The ETag that the object must have.

        Raises:
            FetchFailed: The storage refuses, the object has changed, or faults last longer than
                ``retry_s``.
        """
        part = "" if end is None else f", bytes {start} to {end}"
        return self._repeat(
            lambda: self._read_once(name, start, end, etag), name, f"{part} could not be read"
        )

    def write(self, name: str, content: bytes) -> None:
        """Write an object as a whole."""
        self._repeat(
            lambda: self._obstore.put(self._store, name, content), name, " could not be written"
        )

    def look_up(self, name: str) -> ObjectEntry | None:
        """Return the size and ETag of an object, or None if it does not exist."""

        def look() -> ObjectEntry | None:
            try:
                return _entry_of({**self._obstore.head(self._store, name), "path": name})
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise
                return None

        return self._repeat(look, name, " could not be looked up")

    def size_of(self, name: str) -> int | None:
        """Return the number of bytes of an object, or None if it does not exist."""
        found = self.look_up(name)
        return None if found is None else found.bytes

    def list_some(self) -> dict[str, int]:
        """Return the names and sizes of some objects."""
        with self._listing(""):
            found: Any = next(iter(self._obstore.list(self._store)), [])
        return {str(one["path"]): int(one["size"]) for one in found}

    def list_folder(self, folder: str) -> list[ObjectEntry]:
        """Return the objects in a folder, without those in its folders."""
        with self._listing(folder):
            found = self._obstore.list_with_delimiter(self._store, folder or None)["objects"]
        return [_entry_of(one) for one in found]

    @contextmanager
    def _listing(self, folder: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # not repeated, because web servers have no lists
            failed = self._explain(error, folder, " could not be listed")
            if self.url.startswith("http") and failed.facts["kind"] == "network":
                failed.facts["likely"] = "web servers have no list of their files."
                failed.facts["remedy"] = (
                    f"name the files: open_dataset('{self.url}/train-{{000..099}}.tar')"
                )
            raise failed from None

    def delete(self, name: str) -> None:
        self._repeat(lambda: self._obstore.delete(self._store, name), name, " could not be deleted")

    def _repeat(self, call: Callable[[], _T], name: str, what: str) -> _T:
        """Call a function again after faults that can pass, for a bounded time."""
        start_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        deadline_s = start_s + self._retry_s
        while True:
            try:
                return call()
            except Exception as error:
                failed = self._explain(error, name, what)
                kind, now_s = failed.facts["kind"], time.monotonic()
                is_final = kind in ("access", "changed") or isinstance(error, FileNotFoundError)
                if kind == "credentials":
                    deadline_s = min(deadline_s, start_s + _CREDENTIALS_S)
                if is_final or now_s + pause_s > deadline_s:
                    raise failed from None
            import random  # on first use, after a fault

            self._note_retry(failed.facts["what"])
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read_once(self, name: str, start: int, end: int | None, etag: str | None) -> bytes:
        part = {} if end is None else {"options": {"range": (start, end)}}
        answer = self._obstore.get(self._store, name, **part)
        now = _entry_of(answer.meta).etag if etag is not None else None
        if now != etag:
            raise _Changed(f"its ETag was {etag} and is {now} now")
        found = bytes(answer.bytes())
        if end is not None and len(found) != end - start:
            raise OSError(f"the answer has {len(found)} bytes instead of {end - start}")
        return found

    def _explain(self, error: Exception, name: str, what: str) -> FetchFailed:
        what = f"{self.url}/{name}{what}: {_shorten(without_secrets(error))}"
        if isinstance(error, _Changed):
            return FetchFailed(
                "changed",
                f"{self.url}/{name} has changed since the dataset was opened: {error}",
                "another program has replaced it.",
                "open the dataset again when the objects are complete",
            )
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
        if any(words in str(error) for words in _ROLES):
            return FetchFailed(
                "credentials",
                f"{self.url} cannot be read: no credentials were found in the environment or in "
                "the provider's files, and this machine has no role",
                "the variables are not set in the environment of this program.",
                _CREDENTIALS.get(self.url[:2], "set the provider's environment variables"),
            )
        if _lacks_bucket(error):
            return FetchFailed(
                "network",
                f"the bucket of {self.url} does not exist at {find_endpoint() or 'Amazon'}",
                "its name is misspelt, or it is at another provider.",
                "export AWS_ENDPOINT_URL=..., for storage that is not Amazon's",
            )
        if isinstance(error, FileNotFoundError):
            return FetchFailed(
                "network",
                f"{self.url}/{name} does not exist",
                "the set was deleted or is not complete, or the address is wrong.",
                f"penstock pack SOURCE {self.url}"
                if not self.url.startswith("http")
                else f"penstock pack SOURCE FOLDER, and copy the folder to {self.url}",
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


def store_manifest(
    options: dict[str, Any],
    note_retry: Callable[[str], None] = lambda why: None,
    before_request: Callable[[], None] = lambda: None,
) -> str:
    """Fetch the manifest of a set into the cache. Returns the set's folder there."""
    store = ObjectStore(options["url"], options["timeout_s"] / 2, note_retry)
    before_request()
    content = store.read(_MANIFEST)
    folder = os.path.join(options["root"], hashlib.sha256(content).hexdigest()[:32])
    part = os.path.join(folder, f"{_MANIFEST}.{os.getpid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, os.path.join(folder, _MANIFEST))
    except OSError as error:
        raise FetchFailed(
            "network",
            f"{options['url']}/{_MANIFEST} could not be stored in {folder}: "
            f"{error.strerror or error}",
            "the disk of the cache is full or read-only.",
            "Packed(..., cache_folder='/another/disk')",
        ) from None
    return folder


def _entry_of(meta: Mapping[str, Any]) -> ObjectEntry:
    etag = str(meta.get("e_tag") or "").removeprefix("W/").strip('"')
    if not etag and meta.get("last_modified"):  # lists have it in ms, answers in s
        etag = f"{meta['last_modified']:%Y-%m-%dT%H:%M:%S}"
    return ObjectEntry(str(meta["path"]), int(meta["size"]), etag)


def _lacks_bucket(error: Exception) -> bool:
    return "NoSuchBucket" in str(error)


def _open_store(url: str) -> Any:
    from obstore.store import from_url

    if url.startswith("file://"):
        return from_url(url)
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=STALL_S),
            "timeout": timedelta(seconds=REQUEST_S),
            "allow_http": url.startswith("http://"),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    }
    if url.startswith("s3://"):
        endpoint, region = find_endpoint(), _read_profile().get("region")
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        if endpoint:
            options["endpoint"] = endpoint
        if region and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
            options["region"] = region
        if _needs_boto3():
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider()
    return from_url(url, **options)


def find_endpoint() -> str:
    """Return the address of the S3 service, as the user has set it, or nothing for Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    found = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return found or _read_profile().get("endpoint_url", "")


def _read_profile() -> Mapping[str, str]:
    """Return the settings of the user's profile in ``~/.aws/config``."""
    import configparser  # on first use: it takes as long as obstore

    config = configparser.RawConfigParser()
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        config.read(_aws_file("AWS_CONFIG_FILE", "config"), encoding="utf-8")
    name = os.environ.get("AWS_PROFILE") or "default"
    names = (f"profile {name}", name)
    return next((dict(config[one]) for one in names if config.has_section(one)), {})


def _aws_file(variable: str, name: str) -> str:
    return os.environ.get(variable) or os.path.expanduser(f"~/.aws/{name}")


def _needs_boto3() -> bool:
    """Return True if credentials can only come from the files that boto3 reads."""
    has_key = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE")
    files = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))
    has_files = any(os.path.exists(_aws_file(*one)) for one in files)
    return bool(not has_key and has_files and importlib.util.find_spec("boto3"))


def _shorten(text: str) -> str:
    """Return the first part of obstore's messages, which repeat themselves as debug output."""
    text = text.partition(" Debug source:")[0]
    return text if len(text) <= 400 else text[:400] + " ..."
