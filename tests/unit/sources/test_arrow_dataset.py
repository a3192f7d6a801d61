"""Arrow files and streams, and folders of Hugging Face datasets written by hand."""

from __future__ import annotations

import json
import os
import pickle
import struct
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import BadStore, Damaged

pa: Any = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.formats


def make_table(count: int, first: int = 0) -> Any:
    numbers = np.arange(first, first + count)
    return pa.table({"n": numbers, "text": [f"sample {n}" for n in numbers]})


def write_table(path: Any, table: Any, kind: str = "file", compression: Any = None) -> str:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    return str(path)


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_samples_are_those_that_were_written(tmp_path: Any, kind: str, compression: Any) -> None:
    write_table(tmp_path / "a.arrow", make_table(10), kind, compression)
    write_table(tmp_path / "b.arrow", make_table(3, 10), kind, compression)
    data = penstock.open_dataset(tmp_path)
    assert [data[n] for n in range(13)] == make_table(13).to_pylist()
    assert data.block_starts.tolist() == [0, 4, 8, 10, 13]
    assert pickle.loads(pickle.dumps(data))[12] == data[12]
    assert penstock.open_dataset(tmp_path, columns=["n"])[5] == {"n": 5}
    is_allocated = [block.num_bytes > 0 for block in data._blocks]
    assert all(is_allocated) if compression else not any(is_allocated)


def test_files_and_streams_with_dictionaries_are_read(tmp_path: Any) -> None:
    table = pa.table({"word": pa.array(["a", "b", "a", "c", "b"]).dictionary_encode()})
    for kind in ("file", "stream"):
        data = penstock.open_dataset(write_table(tmp_path / f"{kind}.arrow", table, kind))
        assert [data[n]["word"] for n in range(5)] == ["a", "b", "a", "c", "b"]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_every_truncation_is_an_error_when_the_set_is_opened(tmp_path: Any, kind: str) -> None:
    path = write_table(tmp_path / "a.arrow", make_table(10), kind)
    size = os.path.getsize(path)
    assert len(penstock.open_dataset(path)) == 10
    for end in (size - 1, size - 8, size - 9, size // 2, 20, 0):
        with open(path, "r+b") as file:
            file.truncate(end)
        with pytest.raises(BadStore, match=r"a\.arrow cannot be opened"):
            penstock.open_dataset(path)


def test_a_stream_that_ends_between_two_batches_is_not_taken_for_a_shorter_one(
    tmp_path: Any,
) -> None:
    half = write_table(tmp_path / "half.arrow", make_table(4), "stream")
    with open(half, "r+b") as file:
        file.truncate(os.path.getsize(half) - 8)  # the end mark: as an interrupted copy leaves it
    assert (
        pa.ipc.open_stream(pa.memory_map(half)).read_all().num_rows == 4
    )  # control: pyarrow does not notice
    with pytest.raises(BadStore, match="no end mark"):
        penstock.open_dataset(half)


def test_bytes_after_the_end_of_a_stream_are_an_error(tmp_path: Any) -> None:
    path = write_table(tmp_path / "a.arrow", make_table(8), "stream")
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "ab") as file:
        file.write(content)
    with pytest.raises(BadStore, match="continues after the end"):
        penstock.open_dataset(path)


def test_offsets_that_point_outside_the_file_raise_and_do_not_crash(tmp_path: Any) -> None:
    path = write_table(tmp_path / "a.arrow", make_table(8))
    with open(path, "rb") as file:
        content = file.read()
    offsets = struct.pack("<iiiii", 0, 8, 16, 24, 32)
    place = content.index(offsets)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(struct.pack("<iiiii", 0, 8, 16, 24, 1 << 30))
    data = penstock.open_dataset(path)
    with pytest.raises(Damaged, match=r"record batch 0 of .*a\.arrow") as caught:
        data[3]
    assert "samples 0 to 3" in str(caught.value)
    assert data[5]["n"] == 5


def test_a_schema_that_changes_between_files_is_refused(tmp_path: Any) -> None:
    write_table(tmp_path / "a.arrow", make_table(4))
    write_table(tmp_path / "b.arrow", pa.table({"n": ["1"], "text": ["x"]}))
    with pytest.raises(BadStore, match=r"field 'n' is int64 .* string in .*b\.arrow"):
        penstock.open_dataset(tmp_path)


def test_batches_and_files_without_rows_are_left_out(tmp_path: Any) -> None:
    write_table(tmp_path / "a.arrow", make_table(0), "stream")
    write_table(tmp_path / "b.arrow", make_table(3))
    data = penstock.open_dataset(tmp_path)
    assert [data[n]["n"] for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_a_changed_file_is_an_error_not_another_sample(tmp_path: Any, how: str) -> None:
    path = write_table(tmp_path / "a.arrow", make_table(8))
    data = penstock.open_dataset(path)
    assert data[0]["n"] == 0
    with open(path, "rb") as file:
        content = file.read().replace(b"sample 0", b"sample X")
    if how == "replaced":
        with open(path + ".new", "wb") as file:
            file.write(content)
        os.replace(path + ".new", path)
    else:
        with open(path, "r+b") as file:  # the memory map of the reader changes with it
            file.write(content)
        os.utime(path, ns=(1, 1))
    with pytest.raises(Damaged, match="has changed since"):
        data[0]
    assert penstock.open_dataset(path)[0]["text"] == "sample X"


# -- Hugging Face datasets -------------------------------------------------------------------------


def write_set(folder: Any, **state: Any) -> str:
    os.makedirs(folder)
    files = []
    for number in range(2):
        name = f"data-{number:05}-of-00002.arrow"
        write_table(os.path.join(folder, name), make_table(5, 5 * number), "stream")
        files.append({"filename": name})
    known = {"_data_files": files, "_format_columns": None, "_format_type": None}
    info = {"features": {"n": {"_type": "Value"}, "text": {"_type": "Value"}}}
    for name, content in (("state.json", {**known, **state}), ("dataset_info.json", info)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(content, file)
    return str(folder)


def test_the_files_of_a_saved_set_are_read_in_its_order(tmp_path: Any) -> None:
    path = write_set(tmp_path / "set")
    data = penstock.open_dataset(path)
    assert [data[n] for n in range(10)] == make_table(10).to_pylist()
    names = [f"data-{number:05}-of-00002.arrow" for number in (1, 0)]
    turned = write_set(tmp_path / "turned", _data_files=[{"filename": name} for name in names])
    assert penstock.open_dataset(turned)[0]["n"] == 5


def test_the_columns_of_a_saved_format_are_kept(tmp_path: Any) -> None:
    path = write_set(tmp_path / "set", _format_columns=["text"])
    assert penstock.open_dataset(path)[0] == {"text": "sample 0"}
    assert penstock.open_dataset(path, columns=["n"])[0] == {"n": 0}
    other = write_set(tmp_path / "other", _format_columns=["text"], _output_all_columns=True)
    assert len(penstock.open_dataset(other)[0]) == 2


def test_an_index_mapping_is_refused(tmp_path: Any) -> None:
    path = write_set(tmp_path / "set", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(BadStore, match="index mapping") as caught:
        penstock.open_dataset(path)
    assert "flatten_indices" in str(caught.value)


def test_a_folder_of_splits_says_which_there_are(tmp_path: Any) -> None:
    write_set(tmp_path / "all" / "train")
    with open(tmp_path / "all" / "dataset_dict.json", "w", encoding="utf-8") as file:
        json.dump({"splits": ["train", "test"]}, file)
    with pytest.raises(BadStore, match="several splits: train, test") as caught:
        penstock.open_dataset(tmp_path / "all")
    assert repr(str(tmp_path / "all" / "train")) in str(caught.value)
    assert len(penstock.open_dataset(tmp_path / "all" / "train")) == 10
    with open(tmp_path / "all" / "dataset_dict.json", "w", encoding="utf-8") as file:
        json.dump({"splits": ["train"]}, file)
    assert len(penstock.open_dataset(tmp_path / "all")) == 10  # the only split


@pytest.mark.parametrize(
    ("files", "words"),
    [([], "set has no samples"), (None, "not a complete Hugging Face dataset")],
)
def test_an_empty_or_incomplete_set_is_named(tmp_path: Any, files: Any, words: str) -> None:
    with pytest.raises(BadStore, match=words):
        penstock.open_dataset(write_set(tmp_path / "set", _data_files=files))


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_columns_of_the_same_name_are_refused_if_they_are_loaded(
    tmp_path: Any, ending: str
) -> None:
    arrays = [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])]
    table = pa.Table.from_arrays(arrays, names=["a", "a", "b"])
    path = str(tmp_path / f"x.{ending}")
    if ending == "arrow":
        write_table(path, table, "file")
    else:
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    with pytest.raises(BadStore, match="has 2 columns named 'a'") as caught:
        penstock.open_dataset(path)
    assert "columns=['b']" in str(caught.value)
    assert penstock.open_dataset(path, columns=["b"])[1] == {"b": 6}


@pytest.mark.parametrize(
    ("values", "feature", "words"),
    [
        ([1], {"_type": "Image"}, "field 'n' of .* is int64, but .* calls it an Image"),
        ([[1]], [{"_type": "Image"}], "is list<item: int64>, but"),
        ([b"P6 1 1 255 abc"], {"_type": "Image"}, None),
    ],
)
def test_a_column_that_cannot_hold_images_is_not_called_one(
    tmp_path: Any, values: Any, feature: Any, words: str | None
) -> None:
    features = json.dumps({"info": {"features": {"n": feature}}})
    table = pa.table({"n": values}).replace_schema_metadata({"huggingface": features})
    write_table(str(tmp_path / "x.arrow"), table, "file")
    if words is None:
        sample = penstock.open_dataset(tmp_path / "x.arrow")[0]
        assert sample["n"].flatten().tolist() == list(b"abc")
        return
    with pytest.raises(BadStore, match=words):
        penstock.open_dataset(tmp_path / "x.arrow")


def test_a_missing_file_of_a_set_is_named(tmp_path: Any) -> None:
    path = write_set(tmp_path / "set")
    os.unlink(os.path.join(path, "data-00001-of-00002.arrow"))
    with pytest.raises(BadStore, match=r"data-00001-of-00002\.arrow cannot be opened"):
        penstock.open_dataset(path)
