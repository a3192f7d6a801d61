"""Parquet files: samples, chosen columns, blocks decoded once, batches, faults."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.engine.memory.batch_layout import LayoutError
from penstock.errors import BadArgument, BadStore, Damaged
from penstock.sources import source_files
from penstock.sources.parquet_dataset import ParquetDataset

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.formats


def make_table(count: int, first: int = 0) -> Any:
    numbers = np.arange(first, first + count)
    pixels = (numbers[:, None] + np.arange(6)).astype(np.uint8)
    return pa.table(
        {
            "n": numbers,
            "half": (numbers / 2).astype(np.float32),
            "text": [f"sample {n}" for n in numbers],
            "x": pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 6),
        }
    )


def write_files(folder: Any, counts: tuple[int, ...] = (10, 7), **options: Any) -> list[str]:
    paths, first = [], 0
    os.makedirs(folder, exist_ok=True)
    for number, count in enumerate(counts):
        paths.append(os.path.join(folder, f"{number}.parquet"))
        options = {"row_group_size": 4, **options}
        pq.write_table(make_table(count, first), paths[-1], **options)
        first += count
    return paths


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    is_tensor = torch.is_tensor
    return {name: one.tolist() if is_tensor(one) else one for name, one in sample.items()}


@pytest.mark.parametrize("how", ["folder", "pattern", "list", "format"])
def test_samples_are_those_that_were_written(tmp_path: Any, how: str) -> None:
    paths = write_files(tmp_path)
    ways: dict[str, Any] = {
        "folder": (tmp_path, {}),
        "pattern": (str(tmp_path / "*.parquet"), {}),
        "list": (paths, {}),
        "format": (tmp_path, {"format": "parquet"}),
    }
    path, options = ways[how]
    data = penstock.open_dataset(path, **options)
    assert [plain(data[n]) for n in range(17)] == make_table(17).to_pylist()
    assert data.block_starts.tolist() == [0, 4, 8, 10, 14, 17]
    assert plain(data[-1])["n"] == 16
    assert plain(pickle.loads(pickle.dumps(data))[11]) == plain(data[11])
    picked = [16, 0, 3, 12, 0]
    assert [plain(one) for one in data.__getitems__(picked)] == [plain(data[n]) for n in picked]


def test_only_the_chosen_columns_are_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    original = ParquetDataset._read_arrays

    def note(self: Any, place: Any) -> Any:
        arrays, num_bytes = original(self, place)
        read.append(set(arrays))
        return arrays, num_bytes

    monkeypatch.setattr(ParquetDataset, "_read_arrays", note)
    path = write_files(tmp_path)[0]
    data = penstock.open_dataset(path, columns=["text", "n"])
    assert data[5] == {"text": "sample 5", "n": 5}
    assert read == [{"text", "n"}]
    assert all(block.num_bytes < 1000 for block in data._blocks)
    with pytest.raises(BadArgument, match=r"no field 'label'; its fields are n, half, text, x"):
        penstock.open_dataset(path, columns=["label"])


def test_a_chosen_column_is_read_although_another_one_is_damaged(tmp_path: Any) -> None:
    path = write_files(tmp_path, (10,), compression="zstd", write_page_checksum=True)[0]
    damage(path, row_group=1, column=2)
    assert [one["n"] for one in penstock.open_dataset(path, columns=["n"])] == list(range(10))
    with pytest.raises(Damaged):
        penstock.open_dataset(path, columns=["text"])[4]


def test_row_groups_are_decoded_once_in_the_block_order(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    original = ParquetDataset._read_arrays

    def note(self: Any, place: Any) -> Any:
        read.append((place.file, place.number))
        return original(self, place)

    monkeypatch.setattr(ParquetDataset, "_read_arrays", note)
    write_files(tmp_path, (40, 40))
    data = penstock.open_dataset(tmp_path)
    loader = penstock.DataLoader(data, batch_size=7, sampler=data.block_order(seed=3, num_mixed=4))
    numbers = [n for batch in loader for n in batch["n"].tolist()]
    assert sorted(numbers) == list(range(80))
    assert numbers != sorted(numbers)
    assert len(read) == len(set(read)) == 20
    read.clear()
    data.cache_bytes = 1  # control: with no room for them, blocks are decoded again
    data._cache = None
    list(penstock.DataLoader(data, batch_size=7, sampler=data.block_order(seed=3, num_mixed=4)))
    assert len(read) > 20


def test_threads_decode_a_row_group_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    both = threading.Barrier(2)
    original = ParquetDataset._read_arrays

    def note(self: Any, place: Any) -> Any:
        read.append(place.number)
        return original(self, place)

    monkeypatch.setattr(ParquetDataset, "_read_arrays", note)
    write_files(tmp_path, (40,))
    data = penstock.open_dataset(tmp_path, columns=["n"])
    found: list[int] = []

    def load() -> None:
        both.wait(timeout=60)
        found.extend(data[n]["n"] for n in range(40))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == sorted([*range(40), *range(40)])
    assert sorted(read) == list(range(10))


def test_the_block_order_mixes_as_many_row_groups_as_fit(tmp_path: Any) -> None:
    write_files(tmp_path, (100,))
    data = penstock.open_dataset(tmp_path)
    assert data.block_order().num_mixed == 16
    size = max(block.num_bytes for block in data._blocks)
    small = penstock.open_dataset(tmp_path, cache_bytes=3 * size + 1)
    assert small.block_order().num_mixed == 3
    assert penstock.open_dataset(tmp_path, cache_bytes=1).block_order().num_mixed == 1
    assert data.block_order(num_mixed=2).num_mixed == 2


def test_the_plan_says_when_a_random_order_decodes_row_groups_again(tmp_path: Any) -> None:
    write_files(tmp_path, (100,))
    assert penstock.open_dataset(tmp_path).plan_notes == ()
    data = penstock.open_dataset(tmp_path, cache_bytes=1000)
    (note,) = data.plan_notes
    assert "a row group is decoded again" in note
    loader = penstock.DataLoader(data, batch_size=5, shuffle=True)
    assert any("block_order" in one for one in loader.plan.notes)


def test_batches_of_numbers_are_gathered_and_equal_to_samples(tmp_path: Any) -> None:
    write_files(tmp_path)
    data = penstock.open_dataset(tmp_path, columns=["n", "half", "x"])
    assert callable(data.read_rows)
    index = [16, 2, 3, 9, 10]
    (batch,) = penstock.DataLoader(data, batch_size=5, sampler=index)
    expected = torch.utils.data.default_collate([data[n] for n in index])
    for name, values in expected.items():
        assert torch.equal(batch[name], values)
        assert batch[name].dtype == values.dtype
    with pytest.raises(AttributeError):
        _ = penstock.open_dataset(tmp_path).read_rows  # text cannot be gathered


def test_blocks_with_nulls_or_other_shapes_are_loaded_sample_by_sample(tmp_path: Any) -> None:
    lists = [[1, 2], [3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]
    table = pa.table({"n": pa.array([0, 1, 2, 3], pa.int8()), "x": pa.array(lists)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    data = penstock.open_dataset(tmp_path)
    out = [np.zeros((1, 8), np.uint8), np.zeros((1, 16), np.uint8)]
    data.read_rows(np.array([1]), out)
    assert out[1].view(np.int64).tolist() == [[3, 4]]
    with pytest.raises(LayoutError):
        data.read_rows(np.array([2]), out)
    loader = penstock.DataLoader(data, batch_size=2)
    assert [batch["x"].tolist() for batch in loader] == [lists[:2], lists[2:]]


def test_rows_of_equal_bytes_but_another_shape_are_not_gathered(tmp_path: Any) -> None:
    rows = [[[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4], [5, 6]]]
    pq.write_table(pa.table({"x": pa.array(rows)}), tmp_path / "x.parquet", row_group_size=1)
    data = penstock.open_dataset(tmp_path)
    with pytest.raises(LayoutError):
        data.read_rows(np.array([1]), [np.zeros((1, 48), np.uint8)])
    loader = penstock.DataLoader(data, batch_size=1)
    assert [batch["x"].tolist()[0] for batch in loader] == rows


def test_columns_with_dots_in_their_names_are_read(tmp_path: Any) -> None:
    table = pa.table({"a.b": [1, 2], "a": [{"b": 3}, {"b": 4}]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert penstock.open_dataset(tmp_path)[1] == {"a.b": 2, "a": {"b": 4}}
    assert penstock.open_dataset(tmp_path, columns=["a.b"])[0] == {"a.b": 1}


def test_transforms_are_applied_and_samples_loaded_one_by_one(tmp_path: Any) -> None:
    write_files(tmp_path)
    data = penstock.open_dataset(tmp_path, transforms={"text": len})
    assert data[3]["text"] == len("sample 3")
    assert not hasattr(data, "__getitems__")
    with pytest.raises(BadArgument, match="no field 'y'"):
        penstock.open_dataset(tmp_path, transforms={"y": len})


# -- faults ----------------------------------------------------------------------------------------


def damage(path: str, row_group: int, column: int) -> None:
    """Overwrite the middle of a column chunk."""
    chunk = pq.ParquetFile(path).metadata.row_group(row_group).column(column)
    with open(path, "r+b") as file:
        file.seek(chunk.data_page_offset + chunk.total_compressed_size // 2)
        file.write(b"\xa5" * 8)


def test_a_damaged_row_group_is_named_and_others_stay_readable(tmp_path: Any) -> None:
    path = write_files(tmp_path, (10,), compression="zstd", write_page_checksum=True)[0]
    damage(path, row_group=1, column=0)
    data = penstock.open_dataset(path)
    with pytest.raises(Damaged, match=r"row group 1 of .*0\.parquet cannot be read") as caught:
        data[5]
    assert "samples 4 to 7" in str(caught.value)
    assert plain(data[3])["n"] == 3
    loader = penstock.DataLoader(data, batch_size=5, on_error="skip", max_bad=4)
    assert [n for batch in loader for n in batch["n"].tolist()] == [0, 1, 2, 3, 8, 9]
    with pytest.raises(Damaged):  # control: without the policy
        list(penstock.DataLoader(data, batch_size=5))


@pytest.mark.parametrize("num_bytes", [0, 3, 1000])
def test_a_truncated_file_is_named_when_the_set_is_opened(tmp_path: Any, num_bytes: int) -> None:
    paths = write_files(tmp_path)
    with open(paths[1], "r+b") as file:
        file.truncate(num_bytes)
    with pytest.raises(BadStore, match=r"1\.parquet cannot be opened"):
        penstock.open_dataset(tmp_path)
    assert len(penstock.open_dataset(paths[0])) == 10


CHANGES = [
    (make_table(2).drop_columns(["text"]), "has no field 'text'"),
    (make_table(2).append_column("more", pa.array([1, 2])), "has the field 'more'"),
    (
        make_table(2).set_column(0, "n", pa.array([1, 2], pa.int32())),
        r"field 'n' is int64 in .*0\.parquet, int32 in .*1\.parquet",
    ),
]


@pytest.mark.parametrize(("table", "message"), CHANGES)
def test_a_schema_that_changes_between_files_is_refused(
    tmp_path: Any, table: Any, message: str
) -> None:
    paths = write_files(tmp_path)
    pq.write_table(table, paths[1])
    with pytest.raises(BadStore, match=message):
        penstock.open_dataset(tmp_path)
    assert len(penstock.open_dataset(tmp_path, columns=["half", "x"])) == 12


def test_files_without_rows_are_left_out(tmp_path: Any) -> None:
    write_files(tmp_path, (3, 0, 2))
    data = penstock.open_dataset(tmp_path)
    assert [data[n]["n"] for n in range(5)] == list(range(5))
    write_files(tmp_path / "empty", (0,))
    assert len(penstock.open_dataset(tmp_path / "empty")) == 0


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_file_that_was_replaced_is_an_error_not_another_sample(
    tmp_path: Any, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "CHECK_EVERY_S", 0 if is_cached else 1000)
    paths = write_files(tmp_path)
    data = penstock.open_dataset(tmp_path, columns=["n"])
    index, out = np.array([0]), [np.zeros((1, 8), np.uint8)]
    if is_cached:
        assert data[0]["n"] == 0
    pq.write_table(make_table(10, 100), paths[0] + ".new", row_group_size=4)
    os.replace(paths[0] + ".new", paths[0])
    for read in (lambda: data[0], lambda: data.read_rows(index, out)):
        with pytest.raises(Damaged, match="has changed since"):
            read()
    assert data[12]["n"] == 12
    assert penstock.open_dataset(tmp_path)[0]["n"] == 100
