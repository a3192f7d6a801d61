"""Packed sets behind a real HTTP server: the same samples, batches and states as from the disk."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import DataLoader
from penstock.errors import BadArgument, BadStore, CannotWrite, Damaged, StorageFailed
from penstock.sources.checksums import BLOCK_BYTES as UNIT_BYTES
from penstock.sources.remote import downloader_start, epoch_follower
from penstock.sources.remote.block_layout import BLOCK_BYTES
from penstock.sources.remote.remote_rows import RemoteRows
from support.packed_sets import flip
from support.ports import free_port
from support.range_server import Fault, RangeServer
from support.remote_sets import (
    NUM_SAMPLES,
    RemoteSet,
    cached_bytes,
    ended_downloaders,
    is_same,
    needs_obstore,
    table_of,
)

pytestmark = [pytest.mark.remote, needs_obstore]
BATCH = 32


def batches_of(dataset: Any, **options: Any) -> list[list[torch.Tensor]]:
    loader = DataLoader(dataset, batch_size=BATCH, **options)
    found = [[batch["pixels"].clone(), batch["label"].clone()] for batch in loader]
    loader.close()
    return found


def are_equal(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one, other)
        for both in zip(some, others, strict=True)
        for one, other in zip(*both, strict=True)
    )


def test_samples_of_every_kind_are_those_of_the_local_set(remote: RemoteSet) -> None:
    ours, local = remote.open(), remote.open_local()
    assert len(ours) == len(local) == NUM_SAMPLES
    assert (ours.fields, ours.schema) == (local.fields, local.schema)
    for index in (0, 7, -1, 300, 777, NUM_SAMPLES - 2):
        assert is_same(ours[index], local[index])
    assert not is_same(ours[3], local[4])
    some = [5, 900, 5, 401]
    assert all(
        is_same(*both)
        for both in zip(ours.__getitems__(some), local.__getitems__(some), strict=True)
    )
    assert is_same(ours.subset(range(10, 20))[3], local[13])
    assert is_same(pickle.loads(pickle.dumps(ours))[8], local[8])
    assert ours.path == remote.server.url


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_local_set_and_workers_make_no_more_requests(
    remote: RemoteSet, num_workers: int
) -> None:
    ours = remote.open().select("pixels", "label")
    local = remote.open_local().select("pixels", "label")
    order = ours.block_order(seed=3, num_mixed=4)
    assert list(order)[:50] == list(local.block_order(seed=3, num_mixed=4))[:50]
    expected = batches_of(local, sampler=order, num_workers=num_workers)
    assert are_equal(batches_of(ours, sampler=order, num_workers=num_workers), expected)
    # The manifest, and each range of the two fields at most once.
    assert len(set(remote.server.requests)) == len(remote.server.requests)
    assert table_of(ours).counters()["num_bytes"] < 1.3 * ours._files[0].num_bytes
    warm = len(remote.server.requests)
    expected = batches_of(local, shuffle=True, seed=5, num_workers=num_workers)
    assert are_equal(batches_of(ours, shuffle=True, seed=5, num_workers=num_workers), expected)
    assert len(remote.server.requests) == warm
    assert not are_equal(expected, batches_of(local, shuffle=True, seed=6))


def test_a_run_resumed_in_mid_epoch_continues_with_the_same_bits(remote: RemoteSet) -> None:
    local = remote.open_local().select("pixels", "label")
    ours = remote.open().select("pixels", "label")
    first = DataLoader(local, batch_size=BATCH, shuffle=True, seed=1)
    batches = iter(first)
    for _ in range(9):
        next(batches)
    second = DataLoader(ours, batch_size=BATCH, shuffle=True, seed=1, num_workers=2)
    second.load_state_dict(first.state_dict())
    rest = [[batch["pixels"].clone(), batch["label"].clone()] for batch in second]
    assert are_equal(rest, [[batch["pixels"], batch["label"]] for batch in batches])
    assert second.state_dict() == {**first.state_dict()}


def test_ranks_share_one_cache_and_one_download(remote: RemoteSet) -> None:
    local = remote.open_local().select("pixels", "label")
    options = [{"rank": rank, "world_size": 3, "seed": 2, "shuffle": True} for rank in range(3)]
    for one in options:
        ours = remote.open().select("pixels", "label")
        assert are_equal(batches_of(ours, **one), batches_of(local, **one))
    blocks = [one for one in remote.server.requests if one[0].endswith(".npy")]
    assert len(set(blocks)) == len(blocks)


def test_a_cache_of_half_the_set_keeps_its_limit_and_gives_the_same_bits(
    remote: RemoteSet,
) -> None:
    limit = 20 << 20
    ours = remote.open(cache_bytes=limit, read_ahead_bytes=8 << 20).select("pixels", "label")
    local = remote.open_local().select("pixels", "label")
    assert ours._files[0].num_bytes > 1.5 * limit
    loader = DataLoader(ours, batch_size=BATCH, sampler=ours.block_order(seed=1, num_mixed=2))
    plain = DataLoader(local, batch_size=BATCH, sampler=local.block_order(seed=1, num_mixed=2))
    most = 0
    for _ in range(2):
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch["pixels"], expected["pixels"])
            blocks = remote.cache() / "blocks"
            most = max(most, cached_bytes(blocks, limit))
    assert most <= limit
    counters = table_of(ours).counters()
    assert counters["num_evicted"] > 0
    assert "kept in" in loader.plan.notes[-1]


def test_a_cache_smaller_than_a_batch_is_refused_at_once(remote: RemoteSet) -> None:
    ours = remote.open(cache_bytes=17 << 20).select("pixels", "label")
    with pytest.raises(BadArgument, match=r"The samples of one batch need \d+ bytes"):
        next(iter(DataLoader(ours, batch_size=256, shuffle=True, seed=0)))
    with pytest.raises(BadArgument, match="cache_bytes"):
        remote.open(cache_bytes=1 << 20)
    next(iter(DataLoader(ours, batch_size=BATCH, sampler=ours.block_order(num_mixed=1))))


def test_an_order_that_is_not_ours_is_read_too_and_the_plan_says_so(remote: RemoteSet) -> None:
    ours = remote.open().select("pixels", "label")
    loader = DataLoader(ours, batch_size=BATCH, sampler=[5, 1000, 6, 7])
    (batch,) = loader
    assert batch["label"].tolist() == [5, 1000, 6, 7]
    assert "not Penstock's" in loader.plan.notes[-1]
    seeded = DataLoader(ours, batch_size=BATCH, shuffle=True, seed=0)
    next(iter(seeded))
    assert "not Penstock's" not in seeded.plan.notes[-1]


def _as_it_is(value: Any) -> Any:
    return value


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_blocks_of_a_batch_in_an_order_that_is_not_ours_are_fetched_at_once(
    photos: Path, tmp_path: Path, num_workers: int
) -> None:
    """Samples with a transform are loaded one by one, so each would wait for its own block."""
    indices = list(range(5, NUM_SAMPLES, 200))
    most = {}

    def gather(name: str) -> None:
        """Answer no request before there are five, unless that takes long."""
        limit_s = time.monotonic() + 15  # the downloader gives up after 20 s without an answer
        while server.most_at_once < 5 and time.monotonic() < limit_s:
            time.sleep(0.01)

    with ended_downloaders(), RangeServer(photos, latency_s=0.2) as server:
        for cache_bytes in (1 << 30, 20 << 20):  # with the small one, a batch is not requested
            remote = RemoteSet(photos, tmp_path / str(cache_bytes), server)
            ours = remote.open(cache_bytes=cache_bytes).select("pixels")
            ours = ours.with_transforms(pixels=_as_it_is)
            ours[0]
            server.most_at_once = 0
            server.on_request = gather if cache_bytes == 1 << 30 else None
            loader = DataLoader(ours, batch_size=6, sampler=indices, num_workers=num_workers)
            (batch,) = loader
            expected = np.stack([ours[at]["pixels"] for at in indices])
            assert np.array_equal(batch["pixels"].numpy(), expected)
            most[cache_bytes] = server.most_at_once
            loader.close()
    assert most[1 << 30] >= 5
    assert most[20 << 20] < 5


def test_the_plan_names_the_cost_of_a_full_shuffle_with_a_small_cache(remote: RemoteSet) -> None:
    ours = remote.open(cache_bytes=20 << 20).select("pixels", "label")
    shuffled = DataLoader(ours, batch_size=4, shuffle=True, seed=0)
    next(iter(shuffled))
    assert "an epoch downloads about" in shuffled.plan.notes[-1]
    blocks = DataLoader(ours, batch_size=4, sampler=ours.block_order(num_mixed=2))
    next(iter(blocks))
    assert "an epoch downloads about" not in blocks.plan.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_waits_for_the_network_are_spans_counters_and_the_verdict(
    photos: Path, tmp_path: Path, num_workers: int
) -> None:
    with ended_downloaders(), RangeServer(photos, 0.02, 8e6) as server:
        ours = RemoteSet(photos, tmp_path / "cache", server).open(read_ahead_bytes=1)
        ours = ours.select("pixels", "label")
        options = {"batch_size": BATCH, "num_workers": num_workers, "trace": True}
        loader = DataLoader(ours, sampler=ours.block_order(num_mixed=1), **options)
        for _ in loader:
            pass
        timeline, metrics = loader.timeline(), loader.metrics()
        assert timeline.verdict.cause == metrics.verdict.cause == "network"
        assert "MB/s" in "".join(timeline.verdict.evidence)
        spans = [span for lane in timeline.lanes for span in lane.spans if span.kind == "network"]
        assert spans
        (lane,) = (lane for lane in timeline.lanes if lane.role == "download")
        assert len(lane.spans) >= 9
        assert all("bytes 0 to" in span.name or "-0000" in span.name for span in lane.spans)
        assert timeline.facts["network"]["num_waits"] > 0
        assert "downloads" not in timeline.facts["network"]
        cold = metrics.network
        assert cold is not None
        assert cold["num_bytes"] > 30e6
        assert 0 < cold["bytes_per_s"] < 16e6
        assert cold["num_waits"] > 0
        warm = DataLoader(ours, sampler=ours.block_order(num_mixed=1), **options)
        for _ in warm:
            pass
        after = warm.metrics()
        assert after.network is not None
        assert (after.network["num_bytes"], after.network["num_waits"]) == (
            cold["num_bytes"],
            cold["num_waits"],
        )
        assert after.network["num_hits"] > cold["num_hits"]
        assert after.verdict.cause != "network"
        assert not [lane for lane in warm.timeline().lanes if lane.role == "download"]
        loader.close()
        warm.close()
    local = DataLoader(penstock.Packed(photos).select("label"), batch_size=BATCH)
    for _ in local:
        pass
    assert local.metrics().network is None


def test_blocks_arrive_ahead_of_use_and_many_at_once(photos: Path, tmp_path: Path) -> None:
    with ended_downloaders(), RangeServer(photos, latency_s=1.0) as server:
        remote = RemoteSet(photos, tmp_path / "cache", server)
        ours = remote.open().select("pixels", "label")
        loader = DataLoader(ours, batch_size=4)  # kept: blocks are fetched ahead while it lives
        next(iter(loader))  # needs one block of each field
        table, deadline_s = table_of(ours), time.monotonic() + 240
        while table.counters()["used_bytes"] < 0.9 * 33e6:
            assert time.monotonic() < deadline_s, "the blocks do not arrive"
            time.sleep(0.01)
        assert server.most_at_once > 4


@pytest.mark.parametrize("cache_bytes", [1 << 30, 20 << 20])
def test_orders_are_published_until_the_whole_set_is_in_the_cache(
    remote: RemoteSet, cache_bytes: int
) -> None:
    fits = cache_bytes == 1 << 30
    ours, local = remote.open(cache_bytes=cache_bytes), remote.open_local()
    loaders = [
        DataLoader(
            one.with_transforms(boxes=len, text=len),
            batch_size=BATCH,
            sampler=one.block_order(seed=3, num_mixed=2),
        )
        for one in (ours, local)
    ]
    seen = []
    for _ in range(3):
        for batch, expected in zip(*loaders, strict=True):
            assert torch.equal(batch["pixels"], expected["pixels"])
            assert torch.equal(batch["boxes"], expected["boxes"])
        (follower,) = (
            one for one in epoch_follower._followers.values() if one._dataset is loaders[0].dataset
        )
        seen.append(follower._job[0])
    assert seen == ([1, 1, 1] if fits else [1, 2, 3])
    assert len(set(loaders[0].plan.notes)) == len(loaders[0].plan.notes)


def test_of_many_processes_that_miss_the_downloader_one_starts_it(remote: RemoteSet) -> None:
    program = """
import sys, penstock, multiprocessing

def read(arguments):
    return penstock.Packed(arguments[0], cache_folder=arguments[1])[0]["label"]

if __name__ == "__main__":
    with multiprocessing.Pool(6) as pool:
        print(pool.map(read, [sys.argv[1:]] * 6))
"""
    script = remote.folder.parent / "program.py"
    script.write_text(program)
    command = [sys.executable, str(script), remote.server.url, str(remote.folder)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    assert ended.stdout == f"{[0] * 6}\n"
    assert int((remote.cache() / "start.lock").read_bytes()[1:]) == 1


def test_only_the_user_can_read_the_cache(remote: RemoteSet) -> None:
    ours = remote.open()
    ours[0]
    for folder in (remote.cache(), remote.cache().parent, remote.cache() / "blocks"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_program_itself_does_not_load_the_library_that_talks_to_the_network(
    remote: RemoteSet,
) -> None:
    program = """
import sys, penstock
penstock.Packed(sys.argv[1], cache_folder=sys.argv[2])[0]
print([name for name in sys.modules if name.startswith("obstore") or name.endswith("object_store")])
"""
    command = [sys.executable, "-c", program, remote.server.url, str(remote.folder)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    assert ended.stdout == "[]\n"


def test_a_file_url_reads_the_same(photos: Path, tmp_path: Path) -> None:
    with ended_downloaders():
        ours = penstock.Packed(photos.as_uri(), cache_folder=tmp_path / "cache")
        assert is_same(ours[11], penstock.Packed(photos)[11])


def test_an_address_without_a_set_is_an_error_that_names_it(remote: RemoteSet) -> None:
    with pytest.raises(StorageFailed, match=r"nothing/manifest\.json does not exist"):
        penstock.Packed(remote.server.url + "/nothing", cache_folder=remote.folder)


def test_an_answer_that_is_no_manifest_is_an_error_that_names_the_address(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    for content in (b"<html>Sign in</html>", b"\xff\xfe", b"{}"):
        (tmp_path / "page" / "manifest.json").write_bytes(content)
        with (
            ended_downloaders(),
            RangeServer(tmp_path / "page") as server,
            pytest.raises(BadStore, match=re.escape(f"{server.url}/manifest.json is not")),
        ):
            penstock.Packed(server.url, cache_folder=tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_written_is_named(remote: RemoteSet, tmp_path: Path) -> None:
    with ended_downloaders():
        remote.open()
    cache = remote.cache()
    shutil.rmtree(cache)
    cache.write_bytes(b"in the way")
    with pytest.raises(StorageFailed, match=r"manifest\.json could not be stored in") as caught:
        remote.open()
    assert str(cache) in str(caught.value)
    assert "cache_folder=" in str(caught.value)
    with pytest.raises(CannotWrite, match="cannot be used"):
        penstock.Packed(remote.server.url, cache_folder=cache)
    cache.unlink()
    assert remote.open()[3]["label"] == 3


READ_ONLY = """
import os, sys
from penstock.sources.remote.cached_set import make_private
root = sys.argv[1]
os.chmod(root, 0o700)
if os.getuid() == 0:  # who may write everywhere
    os.chown(root, 65534, 65534)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
make_private(root)
os.chmod(root, 0o500)
make_private(root)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs permissions of POSIX")
def test_a_read_only_cache_folder_is_an_error_that_names_it() -> None:
    with tempfile.TemporaryDirectory() as folder:  # other users can reach it, unlike tmp_path
        command = [sys.executable, "-c", READ_ONLY, folder]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=240)
    assert f"the cache folder {folder} cannot be used: it is not writable" in ended.stderr
    assert "line 11" in ended.stderr  # not the first call


def test_an_address_that_does_not_answer_is_logged_once_with_the_cause(
    remote: RemoteSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(downloader_start, "_QUIET_S", 0.0)
    remote.open()
    assert not caplog.records
    dead = f"http://127.0.0.1:{free_port()}/set"
    for read in (penstock.Packed, penstock.open_dataset):
        with pytest.raises(StorageFailed, match=dead):
            read(dead + "/x.tar", cache_folder=remote.folder, network_timeout_s=6)
        (record,) = caplog.records
        assert dead in record.getMessage()
        assert "network_timeout_s=6" in record.getMessage()
        caplog.clear()


def test_a_file_of_one_block_needs_no_checksums_but_those_of_the_manifest(tmp_path: Path) -> None:
    rows = [np.full(UNIT_BYTES // 2 - 999, at, np.uint8) for at in range(30)]
    penstock.pack(rows, tmp_path / "set", workers=0, shard_bytes=3 << 20)
    flip(tmp_path / "set" / "value-00003.npy", at=2 << 20)
    with ended_downloaders(), RangeServer(tmp_path / "set") as server:
        server.faults.append(Fault("flip", "value-00001"))
        ours = penstock.Packed(server.url, cache_folder=tmp_path / "cache")
        sizes = ours._files[0].layout.block_bytes
        assert all(UNIT_BYTES < size <= BLOCK_BYTES for size in sizes[:-1])
        assert np.array_equal(ours[1], rows[1])
        assert np.array_equal(ours[8], rows[8])
        requested = [name.strip("/") for name, _, _ in server.requests]
        assert requested == ["manifest.json", "value-00000.npy", *2 * ["value-00001.npy"]]
        with pytest.raises(Damaged, match=r"value-00003\.npy"):
            ours[3 * 6 + 1]


def test_sets_in_and_out_of_object_storage_are_not_joined(remote: RemoteSet) -> None:
    ours, local = remote.open(), remote.open_local()
    both = ours + ours.subset(range(3))
    assert is_same(both[NUM_SAMPLES + 1], local[1])
    with pytest.raises(BadArgument, match="object storage"):
        ours + local


@pytest.mark.parametrize("has_gather", [True, False], ids=["gather", "row by row"])
def test_rows_of_all_sizes_are_copied_from_the_right_places(
    remote: RemoteSet, has_gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_gather:  # as on systems other than Linux
        monkeypatch.setattr(RemoteRows, "make_gather", lambda *_: None)
    rows = np.random.default_rng(0).integers(0, NUM_SAMPLES, 500)
    for name in ("pixels", "label"):
        ours, local = remote.open().select(name), remote.open_local().select(name)
        size = local.schema[name].row_bytes
        found, expected = (np.zeros((500, size), np.uint8) for _ in range(2))
        ours.read_rows(rows, [found])
        local.read_rows(rows, [expected])
        assert np.array_equal(found, expected)
