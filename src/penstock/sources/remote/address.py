"""URLs of sets in object storage.

Tested by ``tests/unit/sources/remote/test_block_layout.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import BadArgument, MissingExtra

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
FSSPEC_SCHEMES = ("hf", "sftp", "hdfs", "smb", "local")
"""Read through fsspec, which is installed with torch. It names the package that a scheme needs."""
_SECRET_NAMES = re.compile("SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY|SAS", re.I)
_MIN_SECRET = 8
_SECRETS = re.compile(
    r"(?<=<AWSAccessKeyId>)[^<]+|(?<=<SignatureProvided>)[^<]+|(?<=<StringToSign>)[^<]+"
    r"|(?<=<CanonicalRequest>)[^<]+|(?<=Credential=)[^/,&\s]+|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|(?<=X-Amz-Signature=)\w+|(?<=X-Amz-Security-Token=)[^&\s]+"
)
"""What answers of S3 repeat of a request."""


def check_url(url: str) -> str:
    """Return the URL of a set without a slash at the end, or raise BadArgument.

    Example:
        >>> check_url("S3://bucket/set/")
        's3://bucket/set'
    """
    try:
        if not url.isprintable():  # urlsplit drops line breaks
            raise ValueError
        found = urlsplit(url)
        _ = found.port
    except ValueError:  # not shown, because it repeats parts of the URL, as a password
        raise BadArgument(
            f"the {url.partition(':')[0]}:// address of the set is not a valid URL",
            likely="its host, its port or a character in it is wrong.",
            remedy="Packed('s3://bucket/set')",
        ) from None
    known = (*SCHEMES, *FSSPEC_SCHEMES)
    if found.scheme not in known:
        raise BadArgument(
            f"{found.scheme}:// is not supported; a set can be at {', '.join(known)}://",
            remedy="Packed('s3://bucket/set')",
        )
    if "@" in found.netloc or found.query or found.fragment:
        # Such a URL often holds a password or a signature, and URLs are shown and stored.
        raise BadArgument(
            f"the URL of a set at {found.scheme}://{found.netloc.rpartition('@')[2]} must not "
            "contain a user name, a password or a query",
            likely="credentials were put in the URL.",
            remedy="set the provider's environment variables, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY",
        )
    if not found.netloc and found.scheme not in ("file", "local"):
        raise BadArgument(f"{url!r} has no bucket or host", remedy="Packed('s3://bucket/set')")
    return f"{found.scheme}:{url.partition(':')[2].rstrip('/')}"


def refuse_single_slash(path: str) -> None:
    """Raise BadArgument for ``s3:/bucket/set``, which is what ``pathlib`` makes of an address."""
    scheme, _, rest = path.partition(":")
    scheme = scheme.lower()
    if scheme not in (*SCHEMES, *FSSPEC_SCHEMES) or not rest or os.path.exists(path):
        return
    slashes = "///" if scheme in ("file", "local") else "//"
    raise BadArgument(
        f"{path!r} is neither a folder nor an address: an address has two slashes after {scheme}:",
        likely="pathlib.Path makes one slash of two.",
        remedy=f"the text {scheme + ':' + slashes + rest.lstrip('/')!r}",
    )


def uses_fsspec(url: str) -> bool:
    return url.partition("://")[0] in FSSPEC_SCHEMES


def require_obstore(url: str) -> None:
    """Raise MissingExtra if the library for object storage is not installed."""
    if not uses_fsspec(url) and importlib.util.find_spec("obstore") is None:
        raise MissingExtra.named(
            "remote", f"obstore, which reads {url.partition('://')[0]}:// sets, is not installed"
        )


def without_secrets(text: Any) -> str:
    """Return the text of an error without the user's secrets.

    Those are the values of secret environment variables, and keys and signatures that a server
    repeats in its answer.

    Example:
        >>> os.environ["SOME_TOKEN"] = "hidden-value"
        >>> without_secrets("refused: hidden-value")
        'refused: ***'
        >>> without_secrets("<Code>InvalidKey</Code><AWSAccessKeyId>mine</AWSAccessKeyId>")
        '<Code>InvalidKey</Code><AWSAccessKeyId>***</AWSAccessKeyId>'
    """
    found = _SECRETS.sub("***", " ".join(str(text).split()))
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET and _SECRET_NAMES.search(name):
            found = found.replace(value, "***")
    return found
