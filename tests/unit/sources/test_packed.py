"""A packed set returns its samples unchanged, and damage is reported and never read.

Covers packed, columns, checksums and array_files.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock import BlockOrder, DataLoader, Packed, pack
from penstock.engine.loading.gather import RowGatherer, find_gatherer
from penstock.errors import BadArgument, BadStore, CannotPack, Damaged
from penstock.sources.columns import TRY_OTHER_EVERY, RowTable
from support.packed_sets import Mixed, Pixels, digest, flip

pytestmark = [pytest.mark.legacy, pytest.mark.windows]

NUM_PIXELS = 1022
"""Two shards of equal size."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "set"
    pack(Mixed(), folder, workers=0, shard_bytes=1500)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a set whose shards have more than one block each."""
    folder = tmp_path_factory.mktemp("pixels") / "set"
    pack(Pixels(NUM_PIXELS, 4096), folder, workers=0, shard_bytes=2 << 20)
    return folder


@pytest.fixture
def pixels(made: Path, tmp_path: Path) -> Path:
    """Return a copy of a set, for tests that damage it."""
    return Path(shutil.copytree(made, tmp_path / "pixels"))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def test_what_went_in_comes_out(mixed: Path) -> None:
    packed, source = Packed(mixed), Mixed()
    assert len(list(mixed.glob("image-*.npy"))) > 2
    assert len(packed) == len(source)
    assert all(same(packed[i], source[i]) for i in range(len(source)))
    many = packed.__getitems__([3, -1])
    assert same(many[0], source[3])
    assert same(many[1], source[59])
    with pytest.raises(IndexError):
        packed[len(source)]
    with pytest.raises(TypeError):
        packed[1.5]  # type: ignore[index]


KINDS: dict[str, Any] = {
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "complex": np.array([1 + 2j]),
    "a tensor of one number": torch.tensor(7),
    "an empty array": np.zeros((0, 3), np.float32),
    "true": True,
    "big-endian": np.array([1, 2], ">i4"),
    "a number of NumPy": np.float32(0.5),
    "a transposed tensor": torch.arange(6).reshape(2, 3).t(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_alone_and_in_batches(kind: str, tmp_path: Path) -> None:
    value = KINDS[kind]
    packed = pack([value] * 3, tmp_path / "set", workers=0)
    assert torch.equal(torch.as_tensor(packed[1]), torch.as_tensor(native(value)))
    assert type(packed[1]) is type(value)
    (batch,) = DataLoader(packed, batch_size=3)
    (expected,) = DataLoader([native(value)] * 3, batch_size=3)
    assert batch.dtype == expected.dtype
    assert torch.equal(batch, expected)


def native(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    return value


def test_numpy_alone_reads_the_files(mixed: Path) -> None:
    images = [np.load(path) for path in sorted(mixed.glob("image-*.npy"))]
    assert np.concatenate(images)[:, 0, 0, 0].tolist() == list(range(60))
    names = np.load(mixed / "name-00000.data.npy").tobytes()
    offsets = np.load(mixed / "name-00000.offsets.npy")
    assert names[offsets[2] : offsets[3]].decode() == "éé"


def test_batches_are_gathered_over_shards_into_slots(pixels: Path) -> None:
    packed = Packed(pixels)
    assert isinstance(find_gatherer(packed), RowGatherer)
    assert find_gatherer(Packed(pixels, transforms={"field_0": np.copy})) is None
    for verify in ("lazy", "full", "off"):
        loader = DataLoader(Packed(pixels, verify=verify), batch_size=64, shuffle=True, seed=0)
        rows = [(x, y) for x, y in loader]
        assert all((x == (y % 251)[:, None]).all() for x, y in rows)
        assert sorted(torch.cat([y for _, y in rows]).tolist()) == list(range(NUM_PIXELS))


@pytest.mark.parametrize("num_bytes", [3, 4096, 5001])
def test_rows_of_any_size_are_gathered(num_bytes: int, tmp_path: Path) -> None:
    """Some rows are on the common grid of all shards, and others are copied one by one."""
    packed = pack(Pixels(64, num_bytes), tmp_path / "set", workers=0, shard_bytes=num_bytes * 25)
    (batch,) = DataLoader(packed, batch_size=64, shuffle=True, seed=1)
    assert (batch[0] == batch[1][:, None]).all()


@pytest.mark.parametrize("width", [4096, 24, 4099])
def test_threads_gather_what_one_thread_gathers(width: int) -> None:
    """Both methods alternate until one is known to be faster. Odd widths have one method."""
    rows = np.random.default_rng(0).integers(0, 256, (5000, width), dtype=np.uint8)
    table = RowTable(rows.ctypes.data, rows.shape, [rows])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(TRY_OTHER_EVERY + 3):
            count = -(-(1 << 20) // width)
            chosen = np.random.default_rng(seed).integers(0, 5000, count)
            out = np.zeros((count, width), np.uint8)
            table.gather(chosen, out)
            assert np.array_equal(out, rows[chosen])
    finally:
        torch.set_num_threads(before)
    assert (table._tensor is not None) == (width % 8 == 0)


def test_a_batch_that_is_kept_outlives_the_epochs_after_it(made: Path) -> None:
    loader = DataLoader(Packed(made), batch_size=100, shuffle=True, seed=0)
    kept, values = [], []
    for _ in range(3):
        for x, y in loader:
            kept.append((x, y))
            values.append(y.tolist())
            break
        for _ in loader:
            pass
    assert [y.tolist() for _, y in kept] == values
    assert all((x == (y % 251)[:, None]).all() for x, y in kept)


@pytest.mark.parametrize("num_bytes", [3, 4096, 5001])
def test_files_that_are_mapped_one_by_one_give_the_same(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates systems without fixed-address mappings."""
    pack(Pixels(64, num_bytes), tmp_path / "set", workers=0, shard_bytes=num_bytes * 25)
    together = list(DataLoader(Packed(tmp_path / "set"), batch_size=64, shuffle=True, seed=1))
    monkeypatch.setattr("penstock.sources.array_files._map_together", lambda *arguments: None)
    apart = list(DataLoader(Packed(tmp_path / "set"), batch_size=64, shuffle=True, seed=1))
    assert all(map(torch.equal, together[0], apart[0]))
    assert (apart[0][0] == apart[0][1][:, None]).all()


@pytest.mark.skipif(sys.platform != "linux", reason="files are mapped one by one elsewhere")
def test_an_open_set_holds_no_descriptor_of_its_files(mixed: Path) -> None:
    packed = Packed(mixed)
    held = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in held if path.startswith(str(mixed))]
    assert packed[3]["label"] == 3


def test_parts_of_a_set(mixed: Path) -> None:
    packed = Packed(mixed)
    labels = packed.select("label")
    assert labels.fields == ("label",)
    assert Packed(mixed, columns=["label", "name"])[7] == {"label": 7, "name": "ééé"}

    def numbers(part: Packed) -> list[int]:
        return [part[i]["label"] for i in range(len(part))]

    assert numbers(labels.subset(slice(10, 0, -3))) == [10, 7, 4, 1]
    assert numbers(labels.subset([5, -1]).subset([1])) == [59]
    assert numbers(labels.subset(range(10, 20)).subset(range(1, 10, 4))) == [11, 15, 19]
    shards = [numbers(labels.shard(rank, 3)) for rank in range(3)]
    assert sorted(itertools.chain(*shards)) == list(range(60))
    both = labels.subset(range(2)) + labels.subset([9])
    assert numbers(both) == [0, 1, 9]
    assert numbers(labels + labels)[58:62] == [58, 59, 0, 1]
    (batch,) = DataLoader(both, batch_size=3)
    assert batch["label"].tolist() == [0, 1, 9]
    again = pickle.loads(pickle.dumps(both))
    assert numbers(again) == [0, 1, 9]
    assert again.fields == ("label",)
    with pytest.raises(BadArgument, match="no field 'age'"):
        packed.select("age")
    with pytest.raises(BadArgument, match="different fields"):
        packed + labels
    with pytest.raises(IndexError):
        labels.subset(range(100))


def test_a_block_order_is_near_on_the_disk_and_takes_each_once(pixels: Path) -> None:
    packed = Packed(pixels)
    order = packed.block_order(seed=3, block_size=50, num_mixed=4)
    assert isinstance(order, BlockOrder)
    assert sorted(order) == list(range(NUM_PIXELS))
    assert len({index // 50 for index in list(order)[:200]}) == 4
    first = [y.tolist() for _, y in DataLoader(packed, batch_size=100, sampler=order, seed=3)]
    again = [y.tolist() for _, y in DataLoader(packed, batch_size=100, sampler=order, seed=3)]
    assert first == again
    assert first != [y.tolist() for _, y in DataLoader(packed, batch_size=100)]


# Damage


def break_manifest(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def escape(content: dict[str, Any]) -> None:
    content["shards"][0]["files"]["field_0"][0]["name"] = "../../etc/passwd"


def rename_field(content: dict[str, Any]) -> None:
    content["fields"][0]["name"] = "../x"


AT_OPENING = {
    "truncated": lambda f: os.truncate(f / "field_0-00000.npy", 5000),
    "missing": lambda f: (f / "field_0-00001.npy").unlink(),
    "replaced by another field": lambda f: os.replace(
        f / "field_1-00000.npy", f / "field_0-00000.npy"
    ),
    "a newer version": lambda f: break_manifest(f, lambda c: c.update(version=2)),
    "no version": lambda f: break_manifest(f, lambda c: c.pop("version")),
    "a path that escapes": lambda f: break_manifest(f, escape),
    "a field that escapes": lambda f: break_manifest(f, rename_field),
    "not enough rows": lambda f: break_manifest(f, lambda c: c.update(num_samples=3)),
    "a count that is none": lambda f: break_manifest(f, lambda c: c.update(num_samples="3")),
    "an object dtype": lambda f: break_manifest(f, lambda c: c["fields"][0].update(dtype="|O")),
    "not JSON": lambda f: (f / "manifest.json").write_bytes(b"\x80\x04pickle"),
    "another JSON": lambda f: (f / "manifest.json").write_text("[]"),
    "deep JSON": lambda f: (f / "manifest.json").write_text("[" * 100_000),
    "unfinished": lambda f: (f / "manifest.json").rename(f / "packing.json"),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
}


@pytest.mark.parametrize("case", AT_OPENING)
def test_what_can_be_seen_at_opening_is_named_there(case: str, pixels: Path) -> None:
    AT_OPENING[case](pixels)
    for verify in ("lazy", "full", "off"):
        with pytest.raises((BadStore, CannotPack)) as caught:
            Packed(pixels, verify=verify)
        assert isinstance(caught.value, ValueError)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_link_out_of_the_folder_is_refused(pixels: Path, tmp_path: Path) -> None:
    file = pixels / "field_0-00000.npy"
    file.rename(tmp_path / "elsewhere.npy")
    file.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(BadStore, match="is a link to a file outside"):
        Packed(pixels)


def swap(folder: Path) -> None:
    one, two = folder / "field_0-00000.npy", folder / "field_0-00001.npy"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


WHEN_READ = {
    "the last bit of a shard": lambda f: flip(f / "field_0-00000.npy"),
    "the first bit of a sample": lambda f: flip(f / "field_0-00000.npy", 4096),
    "a label": lambda f: flip(f / "field_1-00000.npy"),
    "swapped shards": swap,
    "the list of checks": lambda f: flip(f / "field_0-00000.crc.npy"),
}


@pytest.mark.parametrize("case", WHEN_READ)
def test_what_is_damaged_inside_is_named_when_it_is_read(case: str, pixels: Path) -> None:
    WHEN_READ[case](pixels)
    if case != "the list of checks":  # "full" does not need it
        with pytest.raises(Damaged, match=r"-0000\d.npy is damaged"):
            Packed(pixels, verify="full")
    with pytest.raises(Damaged, match=r"-0000\d.npy is damaged") as caught:
        for _ in DataLoader(Packed(pixels), batch_size=50, shuffle=True):
            pass
    assert isinstance(caught.value, OSError)
    packed = Packed(pixels)
    with pytest.raises(Damaged):
        [packed[index] for index in range(NUM_PIXELS)]
    # Negative control: with "off" nothing is checked.
    assert len(Packed(pixels, verify="off")) == NUM_PIXELS
    assert len(list(DataLoader(Packed(pixels, verify="off"), batch_size=511))) == 2


def test_offsets_that_lead_nowhere_are_named_even_with_right_checks(
    mixed: Path, tmp_path: Path
) -> None:
    """An attacker can also write checksums, so nothing outside the file is ever read."""
    folder = Path(shutil.copytree(mixed, tmp_path / "set"))
    for name, at, value in (
        ("name-00000.offsets.npy", 3, 1 << 40),
        ("raw-00000.offsets.npy", 2, -5),
        ("boxes-00000.shapes.npy", (1, 0), -1),
    ):
        array = np.load(folder / name, mmap_mode="r+")
        array[at] = value
        array.flush()
        del array
    packed = Packed(folder, verify="off")
    for field, index in (("name", 2), ("raw", 1), ("boxes", 1)):
        with pytest.raises(Damaged):
            packed.select(field)[index]
    assert packed.select("label")[2] == {"label": 2}


def test_damage_elsewhere_does_not_touch_what_is_whole(pixels: Path) -> None:
    flip(pixels / "field_0-00001.npy")
    packed = Packed(pixels)
    first = packed._files[0].manifest.shards[0].rows
    assert all(packed[i][1] == i for i in range(first))
    loader = DataLoader(packed, batch_size=50, on_error="skip")
    kept = sum(len(y) for _, y in loader)
    assert 0 < len(loader.bad_samples) == NUM_PIXELS - kept < 600
    assert "field_1" not in loader.bad_samples[0].error


def test_blocks_are_checked_once_for_all_copies(pixels: Path) -> None:
    packed = Packed(pixels)
    other = pickle.loads(pickle.dumps(packed))  # as in a worker
    assert not packed._files[0].checked.blocks.any()
    for _ in DataLoader(other, batch_size=100):
        pass
    assert other._files[0].checked.blocks.all()
    assert packed._files[0].checked.blocks.all() == hasattr(os, "memfd_create")


def test_reading_leaves_the_folder_as_it_was(mixed: Path) -> None:
    before = digest(mixed)
    for _ in DataLoader(Packed(mixed).select("image", "label"), batch_size=7):
        pass
    assert digest(mixed) == before
