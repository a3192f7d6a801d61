"""Packed sets in real S3 servers, SeaweedFS and moto, and copies between places."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import AlreadyThere, BadStore, Damaged, StorageFailed
from penstock.sources.remote.object_store import FetchFailed, ObjectStore
from penstock.sources.remote.set_copy import copy_set
from support.packed_sets import digest, flip
from support.range_server import RangeServer
from support.remote_sets import ended_downloaders, is_same, needs_obstore
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
    with pytest.raises(StorageFailed, match=r"manifest\.json does not exist"):
        penstock.Packed(s3.url, cache_folder=tmp_path)


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
        store = ObjectStore("s3://some-bucket/one", 600.0, lambda: None)
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
