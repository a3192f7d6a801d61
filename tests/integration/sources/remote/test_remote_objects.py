"""Tars and Parquet files behind real servers: the same samples, batches and states as from disk."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import DataLoader
from penstock.errors import BadArgument, BadStore, Damaged, StorageFailed
from support.range_server import Fault, RangeServer
from support.remote_sets import cached_bytes, ended_downloaders, needs_obstore
from support.s3_servers import S3Place, upload
from support.tar_archives import sample_files, write_shards, write_tar

pytestmark = [pytest.mark.remote, pytest.mark.formats, needs_obstore]
NAMES = "shard-{000..002}.tar"
COUNTS = (200, 120, 90)
WIDTH = 20_000
"""Arrays of 80 kB, so that each archive has several blocks and samples lie across their edges."""


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_shards(folder, COUNTS, WIDTH)
    return folder


@pytest.fixture
def server(tars: Path, tmp_path: Path) -> Iterator[RangeServer]:
    shutil.copytree(tars, tmp_path / "served")
    with ended_downloaders(), RangeServer(tmp_path / "served") as server:
        yield server


def open_remote(server: RangeServer, folder: Path, **options: Any) -> Any:
    return penstock.open_dataset(f"{server.url}/{NAMES}", cache_folder=folder / "cache", **options)


def take(dataset: Any, **options: Any) -> list[list[Any]]:
    loader = DataLoader(dataset, batch_size=16, **options)
    found = [[batch["x.npy"].clone(), batch["cls"], batch["__key__"]] for batch in loader]
    loader.close()
    return found


def are_equal(some: list[list[Any]], others: list[list[Any]]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one[0], other[0]) and list(one[1:]) == list(other[1:])
        for one, other in zip(
            [[one[0], *map(list, one[1:])] for one in some],
            [[one[0], *map(list, one[1:])] for one in others],
            strict=True,
        )
    )


def test_samples_are_those_of_the_files_and_the_index_is_kept(
    server: RangeServer, tars: Path, tmp_path: Path
) -> None:
    ours, local = open_remote(server, tmp_path), penstock.open_dataset(tars)
    assert len(ours) == len(local) == sum(COUNTS)
    assert ours.fields == local.fields
    for index in (0, 51, 52, 199, 200, -1):
        assert ours[index]["__key__"] == local[index]["__key__"]
        assert np.array_equal(ours[index]["x.npy"], local[index]["x.npy"])
    assert pickle.loads(pickle.dumps(ours))[7]["json"] == local[7]["json"]
    assert ours.block_starts.tolist() == local.block_starts.tolist()
    urls = penstock.open_dataset(
        f"{server.url}/{NAMES}", columns=["__url__"], cache_folder=tmp_path / "cache"
    )
    assert urls[0]["__url__"] == f"{server.url}/shard-000.tar"
    # Opened again, nothing but sizes and ETags is asked for.
    before = len(server.requests)
    again = open_remote(server, tmp_path)
    assert np.array_equal(again[3]["x.npy"], local[3]["x.npy"])
    assert all(end is None and start == 0 for _, start, end in server.requests[before:])
    assert not list((tmp_path / "served").glob("*penstock*"))


@pytest.mark.parametrize("num_workers", [0, 3, 8])
def test_batches_cold_and_warm_are_those_of_the_files(
    server: RangeServer, tars: Path, tmp_path: Path, num_workers: int
) -> None:
    ours, local = open_remote(server, tmp_path), penstock.open_dataset(tars)
    shutil.rmtree(tmp_path / "cache")  # the index is in memory, and all blocks are cold
    ours = open_remote(server, tmp_path)
    order = ours.block_order(seed=3, num_mixed=4)
    assert list(order) == list(local.block_order(seed=3, num_mixed=4))
    expected = take(local, sampler=order)
    assert are_equal(take(ours, sampler=order, num_workers=num_workers), expected)
    warm = len(server.requests)
    assert are_equal(take(ours, sampler=order, num_workers=num_workers), expected)
    assert len(server.requests) == warm
    ranges = [one for one in server.requests if one[2] is not None]
    assert len(ranges) == 2 * len(set(ranges))  # each block once for each of the two caches
    assert not are_equal(expected, take(local, shuffle=True, seed=6))


def test_ranks_and_a_resumed_run_continue_with_the_same_bits(
    server: RangeServer, tars: Path, tmp_path: Path
) -> None:
    local = penstock.open_dataset(tars)
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            options = {"rank": rank, "world_size": world_size, "seed": 2, "shuffle": True}
            assert are_equal(take(open_remote(server, tmp_path), **options), take(local, **options))
    first = DataLoader(local, batch_size=16, shuffle=True, seed=1)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    ours = open_remote(server, tmp_path)
    second = DataLoader(ours, batch_size=16, shuffle=True, seed=1, num_workers=2)
    second.load_state_dict(first.state_dict())
    rest = [batch["__key__"] for batch in second]
    assert [list(one) for one in rest] == [list(batch["__key__"]) for batch in batches]
    second.close()
    ranges = [one for one in server.requests if one[2] is not None]
    assert len(set(ranges)) == len(ranges)


def test_a_small_cache_keeps_its_limit_and_the_order_is_downloaded_ahead(
    server: RangeServer, tars: Path, tmp_path: Path
) -> None:
    local = penstock.open_dataset(tars)
    limit = 20 << 20
    ours = open_remote(server, tmp_path, cache_bytes=limit, read_ahead_bytes=8 << 20)
    order = ours.block_order(seed=1, num_mixed=2)
    loader = DataLoader(ours, batch_size=16, sampler=order)
    for batch, expected in zip(
        loader, DataLoader(local, batch_size=16, sampler=order), strict=True
    ):
        assert torch.equal(batch["x.npy"], expected["x.npy"])
        (blocks,) = (tmp_path / "cache").glob("*/*/blocks")
        assert cached_bytes(blocks, limit) <= limit
    counted = loader.metrics().network
    assert counted is not None
    assert counted["num_evicted"] > 0
    assert counted["is_ahead"]
    assert any("kept in" in note for note in loader.plan.notes)
    with pytest.raises(BadArgument, match="one batch need"):
        next(iter(DataLoader(ours, batch_size=256, shuffle=True, seed=0)))


def test_an_object_that_is_replaced_is_an_error_that_names_it_and_the_next_one_is_read(
    server: RangeServer, tmp_path: Path
) -> None:
    ours = open_remote(server, tmp_path)
    last = len(ours) - 1
    for path in (tmp_path / "cache").rglob("blocks/*"):
        path.unlink()
    ours = pickle.loads(pickle.dumps(ours))  # without mapped blocks, which stay readable
    write_tar(tmp_path / "served" / "shard-002.tar", sample_files(1000, 1090, WIDTH))
    with pytest.raises(Damaged, match=r"shard-002\.tar has changed .*ETag"):
        ours[last]
    assert ours[0]["cls"] == 0  # other objects can be read
    again = open_remote(server, tmp_path)
    assert again[last]["cls"] == 1089


@pytest.mark.parametrize("kind", ["status", "reset", "short"])
def test_faults_that_pass_cost_a_retry(
    server: RangeServer, tars: Path, tmp_path: Path, kind: str
) -> None:
    server.faults.append(Fault(kind, pattern="tar", times=4))
    ours, local = open_remote(server, tmp_path), penstock.open_dataset(tars)
    for index in range(0, len(local), 37):
        assert np.array_equal(ours[index]["x.npy"], local[index]["x.npy"])
    assert server.faults[0].times == 0


def test_what_is_not_there_or_not_readable_is_named(server: RangeServer, tmp_path: Path) -> None:
    cache = {"cache_folder": tmp_path / "cache"}
    with pytest.raises(BadStore, match=r"nothing\.tar does not exist"):
        penstock.open_dataset(f"{server.url}/nothing.tar", **cache)
    with pytest.raises(StorageFailed, match="could not be listed"):
        penstock.open_dataset(f"{server.url}/folder/", **cache)
    (tmp_path / "served" / "a.arrow").write_bytes(b"x")
    with pytest.raises(BadStore, match="1 of 'arrow'"):
        penstock.open_dataset(f"{server.url}/a.arrow", **cache)
    with pytest.raises(BadArgument, match="other paths are not"):
        penstock.open_dataset([f"{server.url}/a.tar", "b.tar"])
    with pytest.raises(BadArgument, match="not in one bucket"):
        penstock.open_dataset(["s3://one/a.tar", "s3://two/b.tar"])
    with pytest.raises(TypeError, match="cache_bites"):
        penstock.open_dataset(f"{server.url}/{NAMES}", cache_bites=1, **cache)


def test_folders_patterns_and_lists_in_s3(s3: S3Place, tars: Path, tmp_path: Path) -> None:
    upload(tars, s3.url)
    local = penstock.open_dataset(tars)
    names = [f"{s3.url}/shard-00{at}.tar" for at in range(3)]
    with ended_downloaders():
        for address in (f"{s3.url}/", f"{s3.url}/*.tar", f"{s3.url}/{NAMES}", names):
            ours = penstock.open_dataset(address, cache_folder=tmp_path / "cache")
            assert len(ours) == len(local)
            assert ours[250]["__key__"] == local[250]["__key__"]
        (cached,) = (tmp_path / "cache").glob("*/*/blocks")  # all are the same set
        options = {"shuffle": True, "seed": 4}
        assert are_equal(take(ours, num_workers=2, **options), take(local, **options))
        kept = b"".join(path.read_bytes() for path in cached.parent.glob("*.json"))
        assert s3.environment["AWS_SECRET_ACCESS_KEY"].encode() not in kept + pickle.dumps(ours)
        with pytest.raises(BadStore, match="no objects"):
            penstock.open_dataset(f"{s3.url}-missing/", cache_folder=tmp_path / "cache")


def test_a_packed_set_is_recognised_by_its_address(
    photos: Path, tmp_path: Path, obstore_threads: None
) -> None:
    with ended_downloaders():
        ours = penstock.open_dataset(photos.as_uri(), cache_folder=tmp_path / "cache")
        assert isinstance(ours, penstock.Packed)
        assert ours[3]["label"] == 3


needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as arrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    for at in range(3):
        table = arrow.table(
            {
                "id": np.arange(2000) + 2000 * at,
                "x": [random.random(500) for _ in range(2000)],
                "name": [str(one) for one in range(2000)],
            }
        )
        arrow.parquet.write_table(table, folder / f"part-{at}.parquet", row_group_size=300)
    return folder


@needs_pyarrow
@pytest.mark.parametrize("num_workers", [0, 8])
def test_parquet_files_are_read_in_the_same_blocks(
    tables: Path, tmp_path: Path, num_workers: int
) -> None:
    local = penstock.open_dataset(tables)
    with ended_downloaders(), RangeServer(tables) as server:

        def open_ours(**options: Any) -> Any:
            address = f"{server.url}/part-{{0..2}}.parquet"
            return penstock.open_dataset(address, cache_folder=tmp_path / "cache", **options)

        ours = open_ours()
        assert (len(ours), ours.fields) == (len(local), local.fields)
        order = ours.block_order(seed=2)
        options = {"batch_size": 64, "sampler": order}
        loader = DataLoader(ours, num_workers=num_workers, **options)
        for batch, expected in zip(loader, DataLoader(local, **options), strict=True):
            assert batch["id"].tolist() == expected["id"].tolist()
            assert batch["name"] == expected["name"]
            assert all(torch.equal(*both) for both in zip(batch["x"], expected["x"], strict=True))
        assert any("kept in" in note for note in loader.plan.notes)
        loader.close()
        ranges = [one for one in server.requests if one[2] is not None]
        assert len(set(ranges)) == len(ranges)
        before = len(server.requests)
        assert open_ours(columns=["id"])[4321] == {"id": 4321}
        assert all(end is None for _, _, end in server.requests[before:])
        # Only the blocks of the chosen column are read.
        few = penstock.open_dataset(
            f"{server.url}/part-0.parquet", columns=["id"], cache_folder=tmp_path / "other"
        )
        before = len(server.requests)
        few[5]
        assert len([one for one in server.requests[before:] if one[2]]) <= 2


@needs_pyarrow
def test_parquet_files_in_s3_are_read_in_ranks_and_in_every_order(
    s3: S3Place, tables: Path, tmp_path: Path
) -> None:
    upload(tables, s3.url)
    local = penstock.open_dataset(tables)
    with ended_downloaders():
        ours = penstock.open_dataset(f"{s3.url}/", cache_folder=tmp_path / "cache")
        assert (len(ours), ours.fields) == (len(local), local.fields)
        every = [
            {"sampler": local.block_order(seed=2), "num_workers": 2},
            {"shuffle": True, "seed": 1, "rank": 1, "world_size": 3},
            {"sampler": [5999, 0, 3001]},
        ]
        for options in every:
            loaders = [DataLoader(one, batch_size=64, **options) for one in (ours, local)]
            for batch, expected in zip(*loaders, strict=True):
                assert batch["id"].tolist() == expected["id"].tolist()
                assert batch["name"] == expected["name"]
                assert all(map(torch.equal, batch["x"], expected["x"]))
            for loader in loaders:
                loader.close()
        for path in (tmp_path / "cache").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert s3.environment["AWS_SECRET_ACCESS_KEY"].encode() not in content
        with pytest.raises(BadStore, match=r"part-9\.parquet does not exist"):
            penstock.open_dataset(f"{s3.url}/part-9.parquet", cache_folder=tmp_path / "cache")


@needs_pyarrow
def test_a_parquet_file_that_is_replaced_is_named(tables: Path, tmp_path: Path) -> None:
    served = shutil.copytree(tables, tmp_path / "served")
    with ended_downloaders(), RangeServer(served) as server:
        ours = penstock.open_dataset(
            f"{server.url}/part-{{0..1}}.parquet", cache_folder=tmp_path / "cache"
        )
        shutil.rmtree(tmp_path / "cache")
        shutil.copy(served / "part-2.parquet", served / "part-1.parquet")
        with pytest.raises(Damaged, match=r"part-1\.parquet has changed"):
            ours[3000]
        assert ours[10]["id"] == 10
