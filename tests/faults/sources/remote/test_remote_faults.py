"""Faults of the network, the storage, the disk and the processes of a set in object storage.

Each test compares all samples that it reads with those of the local set. An error must name the
object, the range and the cause.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import Damaged, StorageFailed
from support.packed_sets import flip
from support.range_server import Fault, RangeServer
from support.remote_sets import (
    NUM_SAMPLES,
    RemoteSet,
    ended_downloaders,
    is_same,
    kill_downloader,
    needs_obstore,
    table_of,
)

pytestmark = [pytest.mark.remote, pytest.mark.fault, needs_obstore]
EVERY = range(0, NUM_SAMPLES, 29)


def assert_same(remote: RemoteSet, ours: Any, indices: Any = EVERY) -> None:
    local = remote.open_local()
    for index in indices:
        assert is_same(ours[index], local[index]), index


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
    ours = remote.open(network_timeout_s=16)
    with pytest.raises(error, match="pixels-00001") as caught:
        ours[NUM_SAMPLES // 2]
    assert words in str(caught.value)
    assert remote.server.url in str(caught.value)
    assert_same(remote, ours, [0])  # other objects can be read
    fault.times = 0
    assert_same(remote, ours, [NUM_SAMPLES // 2])  # and this one, once the fault is gone


@pytest.mark.slow
def test_a_body_that_stalls_is_given_up_and_asked_for_again(remote: RemoteSet) -> None:
    remote.server.faults.append(Fault("stall", "pixels-00000", 2, pause_s=100))
    assert_same(remote, remote.open(), [0, 1])


def test_a_server_that_is_killed_and_comes_back_costs_only_time(remote: RemoteSet) -> None:
    ours = remote.open()
    for index in list(EVERY)[::8]:
        remote.server.stop()
        timer = threading.Timer(0.3, remote.server.start)
        timer.start()
        shutil.rmtree(remote.cache() / "blocks", ignore_errors=True)
        table_of(ours).state[:] = 0
        os.makedirs(remote.cache() / "blocks", exist_ok=True)
        assert_same(remote, ours, [index])
        timer.join()


NUM_KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killing_the_downloader_at_any_time_changes_no_sample(remote: RemoteSet) -> None:
    remote.server.latency_s = 0.01
    ours, local = remote.open(cache_bytes=20 << 20), remote.open_local()
    done = threading.Event()

    def kill() -> None:
        chance = random.Random(0)
        for _ in range(NUM_KILLS):  # a busy machine takes seconds to start another one
            if done.wait(chance.uniform(0.5, 4.0)):
                return
            kill_downloader(ours)

    ours[0]
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        indices = np.random.default_rng(0).integers(0, NUM_SAMPLES, 100).tolist()
        for index in indices:
            assert is_same(ours[index], local[index])
            time.sleep(0.02)
    finally:
        done.set()
        killer.join()


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


def test_two_programs_with_different_orders_share_one_cache(remote: RemoteSet) -> None:
    """Both read all samples with room for half the set, and one of them is killed."""
    program = """
import sys, penstock, numpy as np
sys.path.insert(0, sys.argv[5])
from support.remote_sets import is_same
ours = penstock.Packed(sys.argv[1], cache_folder=sys.argv[2], cache_bytes=20 << 20)
local = penstock.Packed(sys.argv[3])
for index in np.random.default_rng(int(sys.argv[4])).permutation(len(ours))[:400].tolist():
    assert is_same(ours[index], local[index]), index
print("same", flush=True)
"""
    tests = Path(__file__).parents[3]

    def start(seed: int) -> subprocess.Popen[str]:
        values = [remote.server.url, remote.folder, remote.source, seed, tests]
        command = [sys.executable, "-c", program, *map(str, values)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    programs = [start(seed) for seed in range(3)]
    while not list(remote.folder.glob("*/*/blocks/*")):
        time.sleep(0.05)
    programs[0].kill()
    printed = [one.communicate(timeout=280)[0] for one in programs]
    assert printed[1:] == ["same\n", "same\n"]
    assert [one.returncode for one in programs[1:]] == [0, 0]


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
