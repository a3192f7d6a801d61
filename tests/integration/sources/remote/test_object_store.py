"""Packed sets in real S3 servers, SeaweedFS and moto, and copies between places."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import penstock
from penstock import DataLoader
from penstock.errors import AlreadyThere, BadStore, Damaged, PenstockError, StorageFailed
from penstock.sources.remote import downloader_start
from penstock.sources.remote.object_store import FetchFailed, ObjectStore
from penstock.sources.remote.set_copy import copy_set
from support.packed_sets import digest, flip
from support.ports import free_port
from support.range_server import RangeServer
from support.remote_sets import ended_downloaders, is_same, needs_obstore, table_of
from support.s3_servers import S3Place, upload

pytestmark = [pytest.mark.remote, needs_obstore]


@pytest.fixture(scope="module")
def packed(photos: Path, obstore_threads: None) -> Path:
    return photos


def test_a_set_copied_to_s3_reads_as_from_the_disk_and_shows_no_credentials(
    s3: S3Place, packed: Path, tmp_path: Path
) -> None:
    url = f"{s3.url}/one"
    copy_set(str(packed), url)
    with ended_downloaders():
        ours, local = penstock.Packed(url, cache_folder=tmp_path / "cache"), penstock.Packed(packed)
        for index in range(0, len(local), 41):
            assert is_same(ours[index], local[index])
        kept = pickle.dumps(ours) + "".join(ours.plan_notes).encode() + repr(ours).encode()
        with pytest.raises(StorageFailed) as caught:
            penstock.Packed(url + "-missing", cache_folder=tmp_path / "cache")
        kept += str(caught.value).encode()
        for path in (tmp_path / "cache").rglob("*"):
            kept += path.read_bytes() if path.is_file() else b""
        assert url.encode() in kept
        assert s3.environment["AWS_SECRET_ACCESS_KEY"].encode() not in kept
        assert s3.environment["AWS_ACCESS_KEY_ID"].encode() not in kept
    with pytest.raises(AlreadyThere):
        copy_set(str(packed), url)
    copy_set(url, str(tmp_path / "back"))
    assert digest(tmp_path / "back") == digest(packed)


@pytest.mark.slow
def test_eight_workers_read_the_same_bits_from_s3_cold_and_warm(
    s3: S3Place, packed: Path, tmp_path: Path
) -> None:
    url = f"{s3.url}/one".replace("s3://", "S3://")  # the case of the scheme does not matter
    copy_set(str(packed), url)
    local = penstock.Packed(packed).select("pixels", "label")

    def read(dataset: Any, num_workers: int, seed: int = 7) -> list[str]:
        loader = DataLoader(
            dataset, batch_size=32, shuffle=True, seed=seed, num_workers=num_workers
        )
        found = [
            hashlib.sha256(batch["pixels"].numpy().tobytes() + batch["label"].numpy().tobytes())
            for batch in loader
        ]
        loader.close()
        return [one.hexdigest() for one in found]

    expected = read(local, 0)
    with ended_downloaders():
        ours = penstock.Packed(url, cache_folder=tmp_path / "cache").select("pixels", "label")
        assert read(ours, 8) == expected
        num_requests = table_of(ours).counters()["num_requests"]
        assert read(ours, 8) == expected
        assert table_of(ours).counters()["num_requests"] == num_requests
        assert read(ours, 8, seed=8) != expected
        assert is_same(penstock.open_dataset(url, cache_folder=tmp_path / "cache")[7]["label"], 7)


@pytest.mark.slow
def test_traces_timelines_logs_and_errors_have_no_credentials(
    s3: S3Place,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import boto3
    from botocore.config import Config

    secrets = [s3.environment["AWS_ACCESS_KEY_ID"], s3.environment["AWS_SECRET_ACCESS_KEY"]]
    if not s3.checks_keys:  # the other server knows no tokens
        secrets.append("token-of-the-tests")
        monkeypatch.setenv("AWS_SESSION_TOKEN", secrets[-1])
    monkeypatch.setattr(downloader_start, "_QUIET_S", 0.0)
    caplog.set_level(logging.DEBUG, "penstock")
    url, cache = f"{s3.url}/one", tmp_path / "cache"
    bucket, _, key = url.removeprefix("s3://").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=s3.environment["AWS_ENDPOINT_URL"],
        region_name=s3.environment["AWS_REGION"],
        config=Config(signature_version="s3v4"),
    )
    name = {"Bucket": bucket, "Key": f"{key}/manifest.json"}
    signed = client.generate_presigned_url("get_object", Params=name)
    client.close()
    assert secrets[0] in signed
    secrets.append(parse_qs(urlsplit(signed).query)["X-Amz-Signature"][0])
    copy_set(str(packed), url)
    kept: dict[str, str] = {}
    with ended_downloaders():
        ours = penstock.Packed(url, cache_folder=cache).select("pixels", "label")
        loader = DataLoader(
            ours, batch_size=64, seed=0, num_workers=2, trace=tmp_path / "trace.json"
        )
        for _ in loader:
            pass
        timeline = loader.timeline()
        timeline.save(tmp_path / "saved.html")
        kept["timeline"] = f"{timeline!r} {timeline} {timeline.say()} {timeline.facts}"
        kept["perfetto"] = json.dumps(timeline.to_perfetto())
        kept["loader"] = f"{loader.plan} {loader.metrics()} {loader.state_dict()} {loader!r}"
        loader.close()
        dead = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
        failing: dict[str, tuple[dict[str, str], Callable[[], Any]]] = {
            "missing": ({}, lambda: penstock.Packed(url + "-not", cache_folder=cache)),
            "missing tar": ({}, lambda: penstock.open_dataset(url + "/x.tar", cache_folder=cache)),
            "signed": ({}, lambda: penstock.Packed(signed, cache_folder=cache)),
            "signed tar": ({}, lambda: penstock.open_dataset(signed, cache_folder=cache)),
            "signed target": ({}, lambda: penstock.pack([1], signed)),
            "dead": (dead, lambda: penstock.Packed(url, cache_folder=cache, network_timeout_s=6)),
        }
        for what, (environment, read) in failing.items():
            with monkeypatch.context() as patched:
                for variable, value in environment.items():
                    patched.setenv(variable, value)
                with pytest.raises(PenstockError) as caught:
                    read()
            shown = traceback.format_exception(caught.type, caught.value, caught.tb)
            kept[what] = "".join(shown) + repr(vars(caught.value))
    kept["log"] = caplog.text
    kept["output"] = "".join(capfd.readouterr())
    for path in tmp_path.rglob("*"):
        if path.is_file():
            kept[path.name] = path.read_bytes().decode("latin-1")
    assert "trying again" in kept["log"]
    for shows_address in ("trace.json", "saved.html", "perfetto", "loader", "dead", "log"):
        assert url in kept[shows_address], shows_address
    found = [what for what, text in kept.items() for one in secrets if one in text]
    assert found == []


def test_a_wrong_key_is_named_without_the_key(
    s3: S3Place, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not s3.checks_keys:
        pytest.skip("this server takes any key")
    upload(packed, s3.url)
    keys = {"AWS_ACCESS_KEY_ID": "key-of-others", "AWS_SECRET_ACCESS_KEY": "secret-of-others"}
    for name, value in keys.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(StorageFailed, match=r"(?s)manifest\.json.*credentials") as caught:
                penstock.Packed(s3.url, cache_folder=tmp_path)
        assert not any(one in str(caught.value) for one in (*keys.values(), "key-of-the-tests"))
    with ended_downloaders():
        assert penstock.Packed(s3.url, cache_folder=tmp_path)[3]["label"] == 3


def test_a_bucket_that_does_not_exist_is_named(s3: S3Place, packed: Path, tmp_path: Path) -> None:
    for read in (
        lambda: penstock.Packed("s3://no-such-bucket/one", cache_folder=tmp_path),
        lambda: penstock.open_dataset("s3://no-such-bucket/tars/", cache_folder=tmp_path),
    ):
        with pytest.raises(StorageFailed, match=r"bucket of s3://no-such-bucket.* does not exist"):
            read()
    with pytest.raises(StorageFailed, match=r"manifest\.json does not exist") as caught:
        penstock.Packed(s3.url, cache_folder=tmp_path)
    assert f"penstock pack SOURCE {s3.url}" in str(caught.value)


def test_missing_credentials_are_named_without_long_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstore_threads: None
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    # The search for the role of the machine is answered by a server without one.
    with RangeServer(tmp_path) as server:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
        start_s = time.monotonic()
        store = ObjectStore("s3://some-bucket/one", 600.0)
        with pytest.raises(FetchFailed, match="no credentials were found"):
            store.read("manifest.json")
        assert time.monotonic() - start_s < 300  # half of the time for other faults


def test_a_set_is_copied_and_read_through_fsspec(packed: Path, tmp_path: Path) -> None:
    url = f"local://{tmp_path}/target"  # the same way as hf://
    (tmp_path / "target").mkdir()
    copy_set(str(packed), url)
    with ended_downloaders():
        ours, local = penstock.Packed(url, cache_folder=tmp_path / "cache"), penstock.Packed(packed)
        for index in range(0, len(local), 41):
            assert is_same(ours[index], local[index])
        with pytest.raises(StorageFailed, match="does not exist"):
            penstock.Packed(url + "-missing", cache_folder=tmp_path / "cache")
        if importlib.util.find_spec("huggingface_hub") is None:
            with pytest.raises(StorageFailed, match="huggingface_hub"):
                penstock.Packed("hf://datasets/no/such-set", cache_folder=tmp_path / "cache")


def test_packing_to_an_address_uploads_the_set_and_leaves_nothing_here(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    data = [{"x": np.full(3, at), "name": "n" * at} for at in range(20)]
    target = tmp_path / "target"
    target.mkdir()
    with ended_downloaders():
        assert is_same(penstock.pack(data, target.as_uri(), workers=0)[7], data[7])
        penstock.pack(data, tmp_path / "local", workers=0)
        assert digest(target) == digest(tmp_path / "local")
        with pytest.raises(AlreadyThere):
            penstock.pack(data, target.as_uri(), workers=0)
    assert list((tmp_path / "cache" / "packing").iterdir()) == []


class Watched:
    """Samples of four shards. Calls a function before each is loaded."""

    def __init__(self, on_load: Callable[[int], None]) -> None:
        self.on_load = on_load

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        self.on_load(index)
        return np.full((256, 256), index, np.uint8)


def test_shards_are_uploaded_while_others_are_packed_and_a_stopped_packing_continues(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    target, loaded = tmp_path / "target", []
    target.mkdir()
    options = {"workers": 0, "shard_bytes": 10 << 16}

    def stop(index: int) -> None:
        if index == 35 and len(loaded) > 5:  # the first ones are also loaded for their form
            deadline_s = time.monotonic() + 60
            while len(list(target.glob("*-0000[0-2].npy"))) < 3:  # uploaded by now
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            raise KeyboardInterrupt
        loaded.append(index)

    data = Watched(stop)
    with ended_downloaders():
        with pytest.raises(KeyboardInterrupt):
            penstock.pack(data, target.as_uri(), **options)
        assert not (target / "manifest.json").exists()
        left = [path.name for path in (tmp_path / "cache").rglob("*.npy")]
        assert not any("-00000" in name for name in left)  # deleted here
        loaded.clear()
        data.on_load = loaded.append
        found = penstock.pack(data, target.as_uri(), **options)
        assert sum(10 <= index < 30 for index in loaded) < 10  # a few for their form, not packed
        assert all(found[index][0, 0] == index for index in range(0, 40, 7))
    penstock.pack(data, tmp_path / "local", **options)
    assert digest(target) == digest(tmp_path / "local")
    assert list((tmp_path / "cache" / "packing").iterdir()) == []


def test_a_packing_to_an_address_that_a_bad_sample_stopped_goes_on_without_it(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    target = tmp_path / "target"
    target.mkdir()
    options = {"workers": 0, "shard_bytes": 10 << 16}

    def fail(index: int) -> None:
        if index == 35:
            raise ValueError("torn")

    data = Watched(fail)
    with ended_downloaders():
        with pytest.raises(ValueError, match="torn"):
            penstock.pack(data, target.as_uri(), **options)
        found = penstock.pack(data, target.as_uri(), on_error="skip", **options)
        assert [index for index, _ in found.bad_samples] == [35]
        assert len(found) == 39
    penstock.pack(data, tmp_path / "local", on_error="skip", **options)
    assert digest(target) == digest(tmp_path / "local")
    assert list((tmp_path / "cache" / "packing").iterdir()) == []


def test_a_copy_that_is_stopped_continues_and_the_manifest_comes_last(
    packed: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"

    def stop(done: int, total: int) -> None:
        assert not (target / "manifest.json").exists()
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_set(str(packed), str(target), stop)
    before = {path.name: path.stat().st_mtime_ns for path in target.glob("*.npy")}
    assert len(before) >= 3
    with pytest.raises(BadStore, match="unfinished"):
        penstock.Packed(target)
    copy_set(str(packed), str(target))
    assert digest(target) == digest(packed)
    assert (
        before.items()
        <= {path.name: path.stat().st_mtime_ns for path in target.glob("*.npy")}.items()
    )


def test_a_copy_of_another_set_is_not_mixed_with_an_unfinished_one(
    packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "packing.json").write_text("{}")
    with pytest.raises(AlreadyThere, match="different set"):
        copy_set(str(packed), str(tmp_path))


def test_a_damaged_file_is_not_copied(packed: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(packed, damaged)
    flip(damaged / "pixels-00001.npy", at=5 << 20)
    with pytest.raises(Damaged, match=r"pixels-00001\.npy"):
        copy_set(str(damaged), str(tmp_path / "target"))
    assert not (tmp_path / "target" / "manifest.json").exists()
    assert not (tmp_path / "target" / "pixels-00001.npy").exists()
