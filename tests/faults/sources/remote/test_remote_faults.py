"""Faults of the network, the storage, the disk and the processes of a set in object storage.

Each test compares all samples that it reads with those of the local set. An error must name the
object, the range and the cause.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.errors import Damaged, StorageFailed
from support.packed_sets import flip
from support.range_server import Fault, RangeServer
from support.remote_readers import RemoteReaders, digests_of
from support.remote_sets import (
    EVERY,
    HALF_BYTES,
    NUM_SAMPLES,
    RemoteSet,
    assert_same,
    cached_bytes,
    ended_downloaders,
    is_same,
    kill_downloader,
    kill_often,
    needs_obstore,
    read_during,
    restart_often,
    table_of,
)
from support.s3_servers import needs_rclone, rclone_server

pytestmark = [pytest.mark.remote, pytest.mark.fault, needs_obstore]


@pytest.mark.parametrize("kind", ["status", "reset", "short", "refuse", "flip", "whole", "etag"])
def test_faults_that_pass_cost_a_retry(remote: RemoteSet, kind: str) -> None:
    # Changed bytes are fetched again once, so each object may arrive changed only once.
    faults = [Fault(kind, pattern=f"pixels-0000{at}.npy") for at in range(3)]
    remote.server.faults += faults
    if kind not in ("flip", "whole"):
        remote.server.faults.append(Fault(kind, times=5))
    ours = remote.open()
    assert_same(remote, ours)
    assert all(fault.times == 0 for fault in faults)
    if kind != "etag":
        counters = table_of(ours).counters()
        assert counters["num_retries"] + counters["num_corrupt"] >= 3


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault("status", "pixels-00001", 9999, status=503), StorageFailed, "503"),
        (Fault("flip", "pixels-00001.npy", 9999), Damaged, "differs from what was packed"),
        (Fault("status", "pixels-00001", 9999, status=404), StorageFailed, "does not exist"),
        (Fault("status", "pixels-00001", 9999, status=403), StorageFailed, "credentials"),
        (Fault("whole", "pixels-00001.npy", 9999), StorageFailed, "ignores ranges"),
    ],
    ids=["503", "flip", "404", "403", "whole"],
)
def test_faults_that_stay_are_errors_that_name_the_object_and_the_cause(
    remote: RemoteSet, fault: Fault, error: type[Exception], words: str
) -> None:
    remote.server.faults.append(fault)
    is_repeated = words in ("503", "ignores ranges")  # for half of the time
    ours = remote.open(network_timeout_s=10 if is_repeated else 240)
    with pytest.raises(error, match="pixels-00001") as caught:
        ours[NUM_SAMPLES // 2]
    assert words in str(caught.value)
    assert remote.server.url in str(caught.value)
    assert_same(remote, ours, [0])  # other objects can be read
    fault.times = 0
    assert_same(remote, ours, [NUM_SAMPLES // 2])  # and this one, once the fault is gone


@needs_rclone
@pytest.mark.slow
def test_a_server_without_ranges_is_named_and_the_remedy_works(
    remote: RemoteSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(remote.source, tmp_path / "buckets" / "photos" / "set")
    with rclone_server(tmp_path / "buckets") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ours = penstock.Packed("s3://photos/set", cache_folder=remote.folder, network_timeout_s=10)
        with pytest.raises(StorageFailed, match=r"s3://photos/set/\S+, bytes 0 to") as caught:
            ours[0]
        assert "ignores ranges" in str(caught.value)
        assert "penstock pack s3://photos/set FOLDER" in str(caught.value)
        copy = tmp_path / "copy"
        command = [sys.executable, "-m", "penstock", "pack", "s3://photos/set", str(copy)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert_same(remote, penstock.Packed(copy))


@pytest.mark.slow
def test_a_body_that_stalls_is_given_up_and_asked_for_again(remote: RemoteSet) -> None:
    remote.server.faults.append(Fault("stall", "pixels-00000", 2, pause_s=100))
    assert_same(remote, remote.open(), [0, 1])


def test_a_server_that_is_killed_in_mid_range_and_comes_back_costs_only_time(
    slow_remote: RemoteSet,
) -> None:
    ours = slow_remote.open(cache_bytes=HALF_BYTES)
    assert read_during(lambda: restart_often(slow_remote, ours, 5, 0), slow_remote, ours)
    assert ours.count_network()["num_retries"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killing_the_downloader_at_any_time_changes_no_sample(slow_remote: RemoteSet) -> None:
    ours = slow_remote.open(cache_bytes=HALF_BYTES)
    ours[0]
    assert read_during(lambda: kill_often(ours, 3, seed=0), slow_remote, ours)


def test_a_downloader_that_was_killed_is_replaced(remote: RemoteSet) -> None:
    ours = remote.open()
    assert_same(remote, ours, [0])
    first = int(table_of(ours).header["pid"][0])
    kill_downloader(ours)
    assert_same(remote, ours, [NUM_SAMPLES - 1, 0])
    assert int(table_of(ours).header["pid"][0]) != first


def test_credentials_that_expire_in_mid_epoch_are_read_again(remote: RemoteSet) -> None:
    ours = remote.open()
    assert_same(remote, ours, [0])
    first = int(table_of(ours).header["pid"][0])
    expired = Fault("status", "pixels-00002", 1, status=403)
    remote.server.faults.append(expired)
    assert_same(remote, ours)
    assert expired.times == 0
    assert int(table_of(ours).header["pid"][0]) != first  # it has found the new ones


KEYS = ("AKIAFIRSTKEYOFTESTS1", "AKIANEXTKEYOFTESTS12")


@pytest.mark.skipif(importlib.util.find_spec("boto3") is None, reason="boto3 is not installed")
def test_keys_that_expire_are_read_again_from_the_users_files_or_named_without_the_key(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server like S3 refuses the first key in mid-epoch with ExpiredToken, then the second."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    (tmp_path / "root" / "bucket" / "photos").symlink_to(photos)
    credentials, config = tmp_path / "credentials", tmp_path / "config"

    def write_key(key: str) -> None:
        secret = f"secret-of-{key}"
        credentials.write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        )

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with ended_downloaders(), RangeServer(tmp_path / "root") as server:
        # The endpoint is found in the file too.
        config.write_text(f"[default]\nregion = us-east-1\nendpoint_url = {server.url}\n")
        write_key(KEYS[0])
        ours = penstock.Packed("s3://bucket/photos", cache_folder=tmp_path / "cache")
        local = penstock.Packed(photos)
        assert is_same(ours[0], local[0])
        write_key(KEYS[1])
        server.expired_keys.add(KEYS[0])
        for index in EVERY:
            assert is_same(ours[index], local[index])
        assert server.seen_keys == set(KEYS)
        server.expired_keys.add(KEYS[1])
        for path in (tmp_path / "cache").rglob("blocks/*"):
            path.unlink()
        ours = pickle.loads(pickle.dumps(ours))  # without mapped blocks, which stay readable
        with pytest.raises(StorageFailed, match="expired") as caught:
            ours[0]
        assert "bucket/photos" in str(caught.value)
        assert not any(key in str(caught.value) for key in KEYS)


def test_a_cache_folder_that_is_removed_is_made_again(remote: RemoteSet) -> None:
    ours = remote.open()
    assert_same(remote, ours, [0, 600])
    shutil.rmtree(remote.folder)
    assert_same(remote, ours)
    assert (remote.cache() / "blocks").is_dir()


def test_a_block_that_is_damaged_on_the_disk_is_fetched_again(remote: RemoteSet) -> None:
    assert_same(remote, remote.open())
    ours = remote.open()
    table = table_of(ours)
    kill_downloader(ours)  # the next one has not seen the blocks arrive
    while table.is_served():
        time.sleep(0.1)
    blocks = sorted((remote.cache() / "blocks").iterdir())
    for path in blocks:
        flip(path, at=path.stat().st_size // 2)
    num_before = len(remote.server.requests)
    ours = remote.open()
    assert_same(remote, ours)
    again = {one for one in remote.server.requests[num_before:] if one[0].endswith(".npy")}
    assert len(again) == len(blocks)


def test_a_block_file_that_is_deleted_is_fetched_again(remote: RemoteSet) -> None:
    assert_same(remote, remote.open())
    for path in (remote.cache() / "blocks").iterdir():
        path.unlink()
    assert_same(remote, remote.open())


@pytest.mark.timeout(600)
def test_two_programs_and_two_ranks_with_different_orders_share_one_cache(
    remote: RemoteSet,
) -> None:
    """All read at the same time, with room for half the set. One that began first is killed."""
    ranks = [{"seed": 1, "rank": rank, "world_size": 2} for rank in range(2)]
    orders = [{"seed": 2}, *ranks]
    local = remote.open_local()
    expected = [list(digests_of(local, order)) for order in orders]
    assert not set(expected[0]) & set(expected[1])
    assert not set(expected[1]) & set(expected[2])
    with RemoteReaders(remote) as readers:
        killed = readers.start(seed=3, stay_s=600.0)  # its downloader serves the others too
        readers.wait_for(killed, 3)
        others = [readers.start(**order) for order in orders]
        readers.wait_for(others[0], 1)
        os.kill(killed, signal.SIGKILL)
        assert readers.end(killed) == -signal.SIGKILL
        assert [readers.end(one) for one in others] == [0, 0, 0]
        assert [readers.digests[one] for one in others] == expected
    (folder,) = remote.folder.glob("*/*/blocks")  # one cache
    assert cached_bytes(folder, HALF_BYTES) <= HALF_BYTES


def test_a_downloader_ends_with_its_program(remote: RemoteSet) -> None:
    program = """
import sys, os, penstock
ours = penstock.Packed(sys.argv[1], cache_folder=sys.argv[2])
ours[0]
print(int(ours._files[0].files.table().header["pid"][0]), flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program, remote.server.url, str(remote.folder)]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=240).stdout)
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, "the downloader outlived its program"
        time.sleep(0.05)


def fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_lived_with_or_named(remote: RemoteSet, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        remote.folder = small / "cache"
        ours = remote.open(cache_bytes=1 << 30)  # more than there is
        assert_same(remote, ours)
        ours._files[0].files._reopen()  # unmaps its blocks, whose bytes would stay on the disk
        for path in (remote.cache() / "blocks").iterdir():
            path.unlink()
        fill(small / "other")
        with pytest.raises(StorageFailed, match="No space left") as caught:
            assert_same(remote, ours)
        assert str(small) in str(caught.value)
    finally:
        del ours
        with ended_downloaders():
            pass
        subprocess.run(["umount", "-l", str(small)], check=True)
