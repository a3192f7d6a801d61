"""The downloader's turns over a store in memory, and the table it shares with readers."""

from __future__ import annotations

import io
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.sources.checksums import block_checksums, file_checksum
from penstock.sources.manifest import FieldSchema, FileEntry, Manifest, ShardEntry
from penstock.sources.remote import cache_table
from penstock.sources.remote.block_layout import BLOCK_BYTES, BlockLayout
from penstock.sources.remote.cache_table import ABSENT, FAILED, PRESENT, CacheTable
from penstock.sources.remote.downloader import Downloader
from penstock.sources.remote.object_store import FetchFailed
from penstock.sources.remote.use_order import merge_uses, write_uses

pytestmark = [pytest.mark.legacy]
NUM_FILES = 6
CONTENT = [bytes([at]) * (64 << 10) for at in range(NUM_FILES)]


class MemoryStore:
    """Objects in memory. ``broken``: how many times the bytes of an object arrive changed."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.broken: dict[str, int] = {}
        self.missing: set[str] = set()

    def read(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> bytes:
        self.reads.append(name)
        if name in self.missing:
            raise FetchFailed("network", f"{name} does not exist")
        found = CONTENT[int(name[2:7])][start:end]
        if self.broken.get(name, 0) > 0:
            self.broken[name] -= 1
            return b"?" + found[1:]
        return found


class Cache:
    """A downloader, its table, and the same table as a reader maps it."""

    def __init__(self, folder: Path, max_blocks: int = 100) -> None:
        schema = FieldSchema(name="x", kind="array", dtype="<u1", shape=(1,))
        shards = [
            ShardEntry(rows=1, files={"x": (FileEntry(name=name, bytes=len(one), check=check),)})
            for name, one, check in (
                (f"x-{at:05d}.npy", one, file_checksum(block_checksums(one)))
                for at, one in enumerate(CONTENT)
            )
        ]
        manifest = Manifest(
            num_samples=NUM_FILES, form="dict", fields=(schema,), shards=tuple(shards)
        )
        for name in cache_table.FOLDERS:
            (folder / name).mkdir(exist_ok=True)
        self.folder = folder
        self.layout = BlockLayout(manifest, "s3://bucket/set")
        self.store = MemoryStore()
        self.max_bytes = max_blocks * len(CONTENT[0])
        self.table = CacheTable(str(folder), self.layout, create=True)
        self.reader = CacheTable(str(folder), self.layout)
        self.downloader = Downloader(self.store, self.layout, self.table, self.max_bytes, 1 << 30)

    def settle(self) -> None:
        """Run turns until nothing is left to do."""
        pause = threading.Event()
        deadline_s = time.monotonic() + 60
        while self.downloader.turn():
            assert time.monotonic() < deadline_s
            pause.wait(0.001)

    def want(self, *blocks: int) -> None:
        for block in blocks:
            self.reader.touched[block] = time.monotonic()
            self.reader.want[block] = 1
            self.settle()
            self.reader.touched[block] = time.monotonic()

    def publish(self, blocks: list[int], tick: int = 0) -> None:
        slot = self.reader.readers[0]
        slot["token"] = slot["token"] or secrets.randbits(60)
        number = cache_table.split_position(int(slot["position"]))[0] + 1
        uses = merge_uses(np.arange(len(blocks)) * 10, np.array(blocks))
        path = self.folder / cache_table.ORDERS / f"{int(slot['token'])}-{number}"
        write_uses(str(path), uses)
        slot["max_bytes"], slot["ahead_bytes"] = self.max_bytes, 1 << 30
        slot["position"], slot["beat"] = cache_table.join_position(number, tick), time.monotonic()

    @property
    def present(self) -> list[int]:
        return np.flatnonzero(self.reader.state == PRESENT).tolist()


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    made: list[Cache] = []

    def make(max_blocks: int = 100) -> Cache:
        made.append(Cache(tmp_path, max_blocks))
        return made[-1]

    yield make
    for one in made:
        one.downloader.close()


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    return make_cache()


def test_a_wish_is_fetched_once_and_both_sides_see_it(cache: Cache) -> None:
    cache.want(3, 3)
    assert cache.present == [3]
    assert Path(cache.table.block_path(3)).read_bytes() == CONTENT[3]
    assert cache.store.reads == ["x-00003.npy"]
    assert cache.reader.counters()["num_bytes"] == len(CONTENT[3])


def test_bytes_that_arrive_changed_are_fetched_again_once(cache: Cache) -> None:
    cache.store.broken["x-00002.npy"] = 1
    cache.want(2)
    assert cache.present == [2]
    assert Path(cache.table.block_path(2)).read_bytes() == CONTENT[2]
    assert len(cache.store.reads) == 2


def test_bytes_that_stay_changed_are_an_error_that_names_the_range(cache: Cache) -> None:
    cache.store.broken["x-00002.npy"] = 99
    cache.want(2)
    assert (cache.present, cache.reader.state[2], cache.reader.attempts[2]) == ([], FAILED, 1)
    error = cache.reader.read_error(2)
    assert error["kind"] == "damaged"
    assert f"x-00002.npy, bytes 0 to {len(CONTENT[2])}" in error["what"]
    cache.store.broken.clear()
    cache.want(2)  # a later wish tries again
    assert cache.present == [2]


def test_the_published_order_is_fetched_in_that_order_without_wishes(cache: Cache) -> None:
    cache.publish([4, 1, 5])
    cache.settle()
    assert cache.present == [1, 4, 5]


def test_an_object_that_is_missing_is_not_asked_for_again_and_again(cache: Cache) -> None:
    cache.store.missing.add("x-00004.npy")
    cache.publish([4, 1])
    cache.settle()
    cache.settle()
    assert (cache.present, cache.store.reads.count("x-00004.npy")) == ([1], 1)
    assert cache.reader.state[4] == ABSENT  # no reader has waited for it


def test_what_is_needed_last_is_evicted_and_nearer_blocks_are_not(
    make_cache: Callable[..., Cache],
) -> None:
    cache = make_cache(max_blocks=3)
    cache.publish([0, 1, 2, 3, 4, 5])
    cache.settle()
    assert cache.present == [0, 1, 2]  # reading ahead stops: all of them come first
    cache.publish([0, 1, 2, 3, 4, 5, 2], tick=11)
    cache.settle()
    assert cache.present == [2, 3, 4]
    cache.publish([0, 1, 2, 3, 4, 5, 2], tick=21)
    cache.settle()
    assert cache.present == [2, 3, 4]  # 5 takes the place of 3 or 4, because 2 is needed again
    cache.publish([0, 1, 2, 3, 4, 5, 2], tick=31)
    cache.settle()
    assert cache.present == [2, 4, 5]
    assert cache.reader.counters()["used_bytes"] == 3 * len(CONTENT[0])


def test_without_an_order_the_block_unused_for_longest_is_evicted(
    make_cache: Callable[..., Cache],
) -> None:
    cache = make_cache(max_blocks=2)
    cache.want(0, 1, 0, 2)
    assert cache.present == [0, 2]


class LargeStore:
    """One file of three blocks, with rows that lie across their edges."""

    row_bytes, num_rows = 12_300, 800

    def __init__(self) -> None:
        self.content = np.random.default_rng(0).bytes(4096 + self.num_rows * self.row_bytes)
        self.ranges: list[tuple[int, int | None]] = []

    def layout(self) -> BlockLayout:
        schema = FieldSchema(name="x", kind="array", dtype="<u1", shape=(self.row_bytes,))
        check = file_checksum(block_checksums(self.content))
        entry = FileEntry(name="x-00000.npy", bytes=len(self.content), check=check)
        shard = ShardEntry(rows=self.num_rows, files={"x": (entry,)})
        manifest = Manifest(
            num_samples=self.num_rows, form="dict", fields=(schema,), shards=(shard,)
        )
        return BlockLayout(manifest, "s3://bucket/set")

    def read(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> bytes:
        if ".crc." in name:
            file = io.BytesIO()
            np.save(file, block_checksums(self.content))
            return file.getvalue()
        self.ranges.append((start, end))
        return self.content[start:end]


def test_the_end_of_the_last_row_is_fetched_once_and_kept(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    make_cache()  # its folders
    (tmp_path / cache_table.TABLE).unlink()
    store = LargeStore()
    layout = store.layout()
    table = CacheTable(str(tmp_path), layout, create=True)
    downloader = Downloader(store, layout, table, 100 << 20, 1 << 30)

    def fetch(block: int) -> bytes:
        table.want[block] = 1
        deadline_s = time.monotonic() + 60
        while table.state[block] != PRESENT:
            downloader.turn()
            assert time.monotonic() < deadline_s
        return Path(table.block_path(block)).read_bytes()

    def content_of(block: int) -> bytes:
        start = block * BLOCK_BYTES
        return store.content[start : start + int(layout.block_bytes[block])]

    assert len(content_of(0)) == BLOCK_BYTES + store.row_bytes
    assert fetch(0) == content_of(0)
    assert store.ranges == [(0, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES + (1 << 20))]
    store.ranges.clear()
    downloader._forget(0)
    assert fetch(0) == content_of(0)
    assert store.ranges == [(0, BLOCK_BYTES)]
    store.ranges.clear()
    assert [fetch(block) for block in (2, 1)] == [content_of(2), content_of(1)]
    assert len(store.ranges) == 2  # block 2 begins with the end of block 1
    Path(table.tail_path(1)).write_bytes(b"damaged")
    downloader._forget(1)
    assert fetch(1) == content_of(1)
    assert len(store.ranges) == 4
    downloader.close()


def test_a_new_downloader_takes_over_what_is_complete(
    tmp_path: Path, make_cache: Callable[..., Cache]
) -> None:
    cache = make_cache()
    cache.want(1, 2)
    (tmp_path / cache_table.BLOCKS / "3.part").write_bytes(b"unfinished")
    (tmp_path / cache_table.BLOCKS / "4").write_bytes(b"too short")
    again = make_cache()
    assert again.present == [1, 2]
    assert not again.reader.checked.any()  # readers verify them again
    assert sorted(path.name for path in (tmp_path / cache_table.BLOCKS).iterdir()) == ["1", "2"]
    assert cache.reader.state.tolist() == again.reader.state.tolist()  # the same table
    assert again.reader.counters()["used_bytes"] == 2 * len(CONTENT[0])


def test_a_block_that_a_reader_finds_damaged_or_gone_is_fetched_again(cache: Cache) -> None:
    cache.want(1, 2)
    Path(cache.table.block_path(2)).unlink()
    cache.reader.corrupt[[1, 2]] = cache.reader.want[[1, 2]] = 1
    cache.settle()
    assert cache.present == [1, 2]
    assert cache.store.reads.count("x-00001.npy") == cache.store.reads.count("x-00002.npy") == 2
    assert not cache.reader.corrupt.any()


def test_a_table_of_other_files_is_not_used(cache: Cache) -> None:
    cache.layout.num_blocks += 1
    with pytest.raises(FileNotFoundError):
        CacheTable(str(cache.folder), cache.layout)


def test_a_table_that_was_deleted_is_noticed(cache: Cache) -> None:
    assert cache.reader.is_current()
    Path(cache.reader.path).unlink()
    assert not cache.reader.is_current()


def test_a_full_disk_frees_blocks_and_an_empty_cache_names_the_folder(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.want(1, 2)
    real, num_full = open, [2]

    def full_open(path: Any, mode: str = "r", **options: Any) -> Any:
        if str(path).endswith(".part") and "b" in mode and num_full[0]:
            num_full[0] -= 1
            raise OSError(28, "No space left on device")
        return real(path, mode, **options)

    import penstock.sources.remote.downloader as module

    monkeypatch.setattr(module, "_UNMAPPED_S", 0.5)
    monkeypatch.setattr(module, "open", full_open, raising=False)
    cache.want(3)
    cache.want(3)
    cache.want(3)
    assert 3 in cache.present
    num_full[0] = 10**9
    while cache.reader.state[5] != FAILED:
        cache.want(5)
    assert cache.reader.state[5] == FAILED
    assert "No space left" in cache.reader.read_error(5)["what"]
    assert str(cache.folder) in cache.reader.read_error(5)["what"]


@pytest.mark.parametrize(("whole_bytes", "num_begun"), [(BLOCK_BYTES, NUM_FILES), (64 << 10, 4)])
def test_small_files_are_requested_at_once_and_whole_blocks_a_few_at_a_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, num_begun: int
) -> None:
    monkeypatch.setattr("penstock.sources.remote.downloader.BLOCK_BYTES", whole_bytes)
    cache.publish(list(range(NUM_FILES)))
    cache.downloader.turn()
    assert cache.reader.counters()["used_bytes"] == num_begun * len(CONTENT[0])
    cache.settle()
    assert len(cache.present) == NUM_FILES
