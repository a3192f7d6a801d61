"""MDS sets written by hand: values of every encoding, faults, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import BadArgument, BadStore, Damaged
from penstock.sources.mds_dataset import make_decoder
from support.chunk_sets import read_json, write_json, write_mds

pytestmark = pytest.mark.legacy


def write_numbers(folder: Any, counts: tuple[int, ...] = (3, 1, 4)) -> str:
    numbers = iter(range(sum(counts)))
    shards = [
        [
            {"n": struct.pack("<q", n), "text": f"sample {n}".encode()}
            for n in (next(numbers) for _ in range(count))
        ]
        for count in counts
    ]
    write_mds(str(folder / "set"), {"n": ("int", 8), "text": ("str", None)}, shards)
    return str(folder / "set")


def test_samples_are_those_that_were_written(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path))
    assert [data[n] for n in range(8)] == [{"n": n, "text": f"sample {n}"} for n in range(8)]
    assert data.block_starts.tolist() == [0, 3, 4, 8]
    assert data.__getitems__([7, 0, 1, 2, 5]) == [data[n] for n in (7, 0, 1, 2, 5)]
    assert pickle.loads(pickle.dumps(data))[6] == data[6]


def test_only_the_chosen_columns_are_returned_in_the_given_order(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    assert penstock.open_dataset(path, columns=["text"])[2] == {"text": "sample 2"}
    assert list(penstock.open_dataset(path, columns=["text", "n"])[2]) == ["text", "n"]
    with pytest.raises(BadArgument, match="no field 'label'"):
        penstock.open_dataset(path, columns=["label"])


def test_transforms_are_applied_to_their_field(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path), transforms={"text": str.upper})
    assert data[1] == {"n": 1, "text": "SAMPLE 1"}
    assert not hasattr(data, "__getitems__")
    with pytest.raises(BadArgument, match="no field 'x'"):
        penstock.open_dataset(write_numbers(tmp_path / "other"), transforms={"x": str.upper})


VALUES = [
    ("bytes", b"\x00\xff", b"\x00\xff"),
    ("str", "é".encode(), "é"),
    ("int", struct.pack("<q", -5), -5),
    ("uint8", b"\xc8", np.uint8(200)),
    ("int16", struct.pack("<h", -300), np.int16(-300)),
    ("float32", struct.pack("<f", 0.1), np.float32(0.1)),
    ("str_int", b"100000000000000000000", 10**20),
    ("str_float", b"0.25", 0.25),
    ("str_decimal", b"0.10", Decimal("0.10")),
    ("json", b'[1, {"a": null}]', [1, {"a": None}]),
]


@pytest.mark.parametrize(("encoding", "data", "value"), VALUES)
def test_encoding(encoding: str, data: bytes, value: Any) -> None:
    found = make_decoder(encoding, True)(memoryview(data))
    assert found == value
    assert type(found) is type(value)
    assert make_decoder("bytes", True)(memoryview(data)) == data


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("ndarray:int16:2,3", b""),
        ("ndarray:int16", bytes([2 << 2, 2, 3])),
        ("ndarray", bytes([17, 2 << 2, 2, 3])),
        ("ndarray", bytes([17, 2 << 2 | 1, 2, 0, 3, 0])),
    ],
)
def test_array_encoding_with_fixed_and_stored_dtype_and_shape(encoding: str, head: bytes) -> None:
    values = np.arange(6, dtype="<i2").reshape(2, 3)
    found = make_decoder(encoding, True)(memoryview(head + values.tobytes()))
    np.testing.assert_array_equal(found, values)
    assert found.dtype == np.int16
    found[0, 0] = 9  # a copy, so writing is allowed
    with pytest.raises(ValueError, match=r"reshape|size"):
        make_decoder(encoding, True)(memoryview(head + values.tobytes()[:-2]))


def test_raw_images_become_tensors_or_bytes() -> None:
    head = struct.pack("<III", 2, 1, 3) + b"RGB"
    found = make_decoder("pil", True)(memoryview(head + bytes(range(6))))
    assert found.tolist() == [[[0, 3]], [[1, 4]], [[2, 5]]]
    assert make_decoder("pil", False)(memoryview(head)) == head
    one = head + bytes(range(6))
    listed = struct.pack("<III", 0, 1, len(one)) + one
    assert make_decoder("list[pil]", True)(memoryview(listed))[0].tolist() == found.tolist()
    with pytest.raises(ValueError, match="do not match"):
        make_decoder("list[pil]", True)(memoryview(listed[:-1]))


def test_unknown_encodings_are_named(tmp_path: Any) -> None:
    write_mds(str(tmp_path / "set"), {"x": ("mine", None)}, [[{"x": b"1"}]])
    with pytest.raises(BadStore, match="encoding 'mine'"):
        penstock.open_dataset(str(tmp_path / "set"))


def test_pickled_fields_need_permission(tmp_path: Any) -> None:
    columns: dict[str, Any] = {"n": ("int", 8), "x": ("pkl", None)}
    sample = {"n": struct.pack("<q", 1), "x": pickle.dumps({"a": 1})}
    write_mds(str(tmp_path / "set"), columns, [[sample]])
    path = str(tmp_path / "set")
    with pytest.raises(BadStore, match="run any code"):
        penstock.open_dataset(path)
    assert penstock.open_dataset(path, columns=["n"])[0] == {"n": 1}
    assert penstock.open_dataset(path, allow_pickle=True)[0]["x"] == {"a": 1}


def test_truncated_and_missing_shards_are_named_when_the_set_is_opened(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    shard = os.path.join(path, "shard.00001.mds")
    with open(shard, "rb") as file:
        whole = file.read()
    with open(shard, "wb") as file:
        file.write(whole[:-1])
    with pytest.raises(BadStore, match=r"shard.00001.mds has \d+ bytes; index.json says"):
        penstock.open_dataset(path)
    os.unlink(shard)
    with pytest.raises(BadStore, match=r"shard.00001.mds cannot be opened"):
        penstock.open_dataset(path)
    with open(shard, "wb") as file:
        file.write(whole)
    assert len(penstock.open_dataset(path)) == 8


@pytest.mark.parametrize("place", [0, 4, 8])
def test_damaged_offsets_raise_and_other_shards_stay_readable(tmp_path: Any, place: int) -> None:
    path = write_numbers(tmp_path)
    with open(os.path.join(path, "shard.00002.mds"), "r+b") as file:
        file.seek(place)
        file.write(b"\xff\xff\xff\x7f")
    data = penstock.open_dataset(path)
    with pytest.raises(Damaged, match=r"shard.00002.mds"):
        data[5]
    assert data[2]["n"] == 2
    loader = penstock.DataLoader(data, batch_size=4, on_error="skip", max_bad=4)
    assert [n for batch in loader for n in batch["n"].tolist()] == [0, 1, 2, 3]


def test_damaged_sizes_raise_with_the_number_of_the_sample(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    with open(os.path.join(path, "shard.00000.mds"), "r+b") as file:
        start = int(np.frombuffer(file.read(12), "<u4")[2])
        file.seek(start)
        file.write(struct.pack("<I", 3))
    data = penstock.open_dataset(path)
    assert data[0]["n"] == 0
    with pytest.raises(Damaged, match="sample 1 cannot be read"):
        data[1]


def test_a_shard_that_was_replaced_is_an_error_not_another_sample(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    data = penstock.open_dataset(path)
    assert data[0]["n"] == 0
    shard = os.path.join(path, "shard.00000.mds")
    with open(shard, "rb") as file:
        content = file.read()
    with open(shard + ".new", "wb") as file:
        file.write(content.replace(b"sample 0", b"sample X"))
    os.replace(shard + ".new", shard)
    with pytest.raises(Damaged, match="has changed since"):
        data[0]
    assert data[3]["n"] == 3
    assert penstock.open_dataset(path)[0]["text"] == "sample X"


def test_shards_without_samples_are_left_out(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path, (2, 0, 1)))
    assert [data[n]["n"] for n in range(3)] == [0, 1, 2]
    assert data.block_starts.tolist() == [0, 2, 3]


def test_shards_that_differ_in_their_columns_are_refused(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    index = read_json(path)
    index["shards"][2]["column_encodings"][1] = "bytes"
    write_json(path, index)
    with pytest.raises(BadStore, match=r"schema changes.*text: bytes"):
        penstock.open_dataset(path)


def test_compressed_shards_are_refused_unless_they_were_decompressed(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    index = read_json(path)
    for shard in index["shards"]:
        shard["compression"] = "zstd"
        shard["zip_data"] = {"basename": shard["raw_data"]["basename"] + ".zstd", "bytes": 1}
    write_json(path, index)
    assert len(penstock.open_dataset(path)) == 8
    os.unlink(os.path.join(path, "shard.00000.mds"))
    with pytest.raises(BadStore, match=r"compressed \(zstd\)") as caught:
        penstock.open_dataset(path)
    assert "zstd -d" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{}", '{"shards": [{"format": "mds"}]}', "[1]"])
def test_an_invalid_index_is_named(tmp_path: Any, content: str) -> None:
    path = write_numbers(tmp_path)
    with open(os.path.join(path, "index.json"), "w", encoding="utf-8") as file:
        file.write(content)
    with pytest.raises(BadStore, match=r"index\.json"):
        penstock.open_dataset(path, format="mds")


def test_other_formats_of_streaming_are_refused(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    index = read_json(path)
    index["shards"][0]["format"] = "json"
    write_json(path, json.loads(json.dumps(index)))
    with pytest.raises(BadStore, match="format 'json'"):
        penstock.open_dataset(path)
