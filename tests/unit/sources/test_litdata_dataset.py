"""LitData sets written by hand: values of every serializer, forms of samples, faults."""

from __future__ import annotations

import json
import os
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import BadArgument, BadStore, Damaged
from penstock.sources.litdata_leaves import make_decoder, read_nested, token_dtype
from support.chunk_sets import dict_spec, make_chunk, read_json, write_json, write_litdata

pytestmark = pytest.mark.legacy
LEAF = {"type": None, "context": None, "children_spec": []}


def write_numbers(folder: Any, counts: tuple[int, ...] = (3, 1, 4)) -> str:
    numbers = iter(range(sum(counts)))
    chunks = [
        [
            [struct.pack("<q", n), f"sample {n}".encode()]
            for n in (next(numbers) for _ in range(count))
        ]
        for count in counts
    ]
    path = str(folder / "set")
    write_litdata(path, ["int", "str"], dict_spec("n", "text"), chunks)
    return path


def test_samples_are_those_that_were_written(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path))
    assert [data[n] for n in range(8)] == [{"n": n, "text": f"sample {n}"} for n in range(8)]
    assert data.block_starts.tolist() == [0, 3, 4, 8]
    assert data.__getitems__([7, 0, 1, 2, 5]) == [data[n] for n in (7, 0, 1, 2, 5)]
    assert pickle.loads(pickle.dumps(data))[6] == data[6]
    with pytest.raises(IndexError):
        data[8]


def test_only_the_chosen_columns_are_returned(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    assert penstock.open_dataset(path, columns=["text"])[2] == {"text": "sample 2"}
    assert list(penstock.open_dataset(path, columns=["text", "n"])[2]) == ["text", "n"]
    with pytest.raises(BadArgument, match="no field 'label'"):
        penstock.open_dataset(path, columns=["label"])


def test_transforms_are_applied_to_their_field(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path), transforms={"text": str.upper})
    assert data[1] == {"n": 1, "text": "SAMPLE 1"}


@pytest.mark.parametrize(
    ("spec", "sample"),
    [
        (LEAF, 7),
        ({"type": "builtins.tuple", "context": "null", "children_spec": [LEAF]}, (7,)),
        ({"type": "builtins.list", "context": "null", "children_spec": [LEAF]}, [7]),
        (
            {
                "type": "builtins.dict",
                "context": '["a"]',
                "children_spec": [
                    {"type": "builtins.list", "context": "null", "children_spec": [LEAF]}
                ],
            },
            {"a": [7]},
        ),
    ],
)
def test_samples_have_the_form_that_they_were_written_in(
    tmp_path: Any, spec: Any, sample: Any
) -> None:
    write_litdata(str(tmp_path / "set"), ["int"], spec, [[[struct.pack("<q", 7)]]])
    found = penstock.open_dataset(str(tmp_path / "set"))[0]
    assert found == sample
    assert type(found) is type(sample)
    if not isinstance(sample, dict):
        with pytest.raises(BadArgument, match="not dicts"):
            penstock.open_dataset(str(tmp_path / "set"), columns=["a"])


def test_an_unknown_form_is_named(tmp_path: Any) -> None:
    spec = {"type": "mine.Sample", "context": "null", "children_spec": [LEAF]}
    write_litdata(str(tmp_path / "set"), ["int"], spec, [[[struct.pack("<q", 7)]]])
    with pytest.raises(BadStore, match=r"mine\.Sample"):
        penstock.open_dataset(str(tmp_path / "set"))


VALUES = [
    ("str", "é".encode(), "é"),
    ("text", b"a", "a"),
    ("bool", b"\x01", True),
    ("bool", b"\x00", False),
    ("int", struct.pack("<q", -5), -5),
    ("float", struct.pack("<d", 0.1), 0.1),
    ("bytes", b"\x00\xff", b"\x00\xff"),
    ("file:bin", b"ab", b"ab"),
    ("json", b'{"a": [1, null]}', {"a": [1, None]}),
]


@pytest.mark.parametrize(("form", "data", "value"), VALUES)
def test_serializer(form: str, data: bytes, value: Any) -> None:
    found = make_decoder(form, True)(memoryview(data))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("form", "data", "value"),
    [
        ("no_header_tensor:17", np.arange(3, dtype="<i8").tobytes(), torch.arange(3)),
        ("no_header_tensor:11", b"", torch.empty(0, dtype=torch.uint8)),
        (
            "tensor",
            struct.pack(">IIII", 0, 2, 1, 2) + struct.pack("<ff", 0.5, 2),
            torch.tensor([[0.5, 2.0]]),
        ),
        (
            "tensor",
            struct.pack(">III", 10, 1, 1) + b"\xc0\x3f",
            torch.tensor([1.5]).to(torch.bfloat16),
        ),
        ("no_header_numpy:1", np.arange(3, dtype="<i2").tobytes(), np.arange(3, dtype=np.int16)),
        (
            "numpy",
            struct.pack("<IIII", 10, 2, 2, 1) + struct.pack("<dd", 1, 2),
            np.array([[1.0], [2.0]]),
        ),
    ],
)
def test_serializer_of_numbers(form: str, data: bytes, value: Any) -> None:
    found = make_decoder(form, True)(memoryview(data))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert bool((found == value).all())
    found[...] = 1  # a copy, so writing is allowed


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x00" + text("[1.5]"), [1.5]),
        (struct.pack("<BI", 1, 2) + text("a") + text("é"[:0]), ["a", ""]),
        (struct.pack("<BIqq", 2, 2, 1, -2), [1, -2]),
        (struct.pack("<BId", 3, 1, 0.5), [0.5]),
        (struct.pack("<BIBB", 4, 2, 1, 0), [True, False]),
        (struct.pack("<BI", 5, 1) + text("k") + struct.pack("<Bq", 8, 4), {"k": 4}),
        (
            struct.pack("<BII", 6, 2, 2)
            + text("a")
            + text("b")
            + b"\x11"
            + text("x")
            + b"\x10"
            + struct.pack("<Bq", 0x12, 3)
            + struct.pack("<Bd", 0x13, 0.5),
            [{"a": "x", "b": None}, {"a": 3, "b": 0.5}],
        ),
        (b"\x07" + text("s"), "s"),
        (struct.pack("<Bd", 9, 0.25), 0.25),
        (b"\x0a\x01", True),
        (b"\x0b", None),
    ],
)
def test_nested_values(data: bytes, value: Any) -> None:
    assert read_nested(memoryview(data)) == value
    if len(data) > 1:
        with pytest.raises((ValueError, struct.error, IndexError)):
            read_nested(memoryview(data[:-1]))


def test_media_need_decode_false_and_unknown_serializers_are_named() -> None:
    with pytest.raises(BadStore, match="'video:mp4'"):
        make_decoder("video:mp4", True)
    assert make_decoder("video:mp4", False)(memoryview(b"v")) == b"v"
    for form in ("mine", "no_header_numpy:14", "no_header_tensor:99", "graph"):
        with pytest.raises(BadStore, match=r"not read|not known"):
            make_decoder(form, False)


def test_pickled_fields_need_permission(tmp_path: Any) -> None:
    path = str(tmp_path / "set")
    sample = [struct.pack("<q", 1), pickle.dumps({"a": 1})]
    write_litdata(path, ["int", "pickle"], dict_spec("n", "x"), [[sample]])
    with pytest.raises(BadStore, match=r"'x'.*run any code"):
        penstock.open_dataset(path)
    assert penstock.open_dataset(path, columns=["n"])[0] == {"n": 1}
    assert penstock.open_dataset(path, allow_pickle=True)[0]["x"] == {"a": 1}


def write_tokens(folder: Any, dims: tuple[int, ...]) -> str:
    path, numbers, entries = str(folder / "set"), iter(range(sum(dims))), []
    os.makedirs(path)
    for number, dim in enumerate(dims):
        tokens = np.array([next(numbers) for _ in range(dim)], "<i4")
        pieces = [tokens[:1].tobytes(), tokens[1:].tobytes()]
        data, name = make_chunk(pieces), f"chunk-0-{number}.bin"
        with open(os.path.join(path, name), "wb") as file:
            file.write(data)
        entry = {"chunk_bytes": len(data), "chunk_size": 2, "dim": dim, "filename": name}
        entries.append(entry)
    config = {
        "data_format": ["no_header_tensor:16"],
        "data_spec": json.dumps([1, LEAF]),
        "item_loader": "TokensLoader",
    }
    write_json(path, {"chunks": entries, "config": config})
    return path


def test_tokens_are_read_in_samples_of_block_size(tmp_path: Any) -> None:
    path = write_tokens(tmp_path, (10, 3, 8))
    data = penstock.open_dataset(path, block_size=4)
    assert data.block_starts.tolist() == [0, 2, 4]
    assert [data[n].tolist() for n in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [13, 14, 15, 16],
        [17, 18, 19, 20],
    ]
    assert data[0].dtype == torch.int32
    assert pickle.loads(pickle.dumps(data))[3].tolist() == [17, 18, 19, 20]
    with pytest.raises(BadArgument, match="length of a sample"):
        penstock.open_dataset(path)
    for wrong, words in (("7", "must be an integer"), (0, "must be at least 1")):
        with pytest.raises(BadArgument, match=f"block_size={wrong!r} {words}"):
            penstock.open_dataset(path, block_size=wrong)
    assert token_dtype("no_header_numpy:0") == np.int8


def test_block_size_is_only_for_tokens(tmp_path: Any) -> None:
    with pytest.raises(BadArgument, match="for sets of tokens"):
        penstock.open_dataset(write_numbers(tmp_path), block_size=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"compression": "zstd"}, "compressed"),
        ({"ipc_compression": "lz4"}, "compressed"),
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"item_loader": "ParquetLoader"}, "ParquetLoader"),
    ],
)
def test_chunks_that_cannot_be_read_by_offset_are_refused(
    tmp_path: Any, config: dict[str, Any], message: str
) -> None:
    path = write_numbers(tmp_path)
    index = read_json(path)
    index["config"].update(config)
    write_json(path, index)
    with pytest.raises(BadStore, match=message):
        penstock.open_dataset(path)


def test_truncated_and_missing_chunks_are_named_when_the_set_is_opened(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    chunk = os.path.join(path, "chunk-0-1.bin")
    with open(chunk, "rb") as file:
        whole = file.read()
    with open(chunk, "wb") as file:
        file.write(whole[:-1])
    with pytest.raises(BadStore, match=r"chunk-0-1.bin has \d+ bytes; index.json says"):
        penstock.open_dataset(path)
    os.unlink(chunk)
    with pytest.raises(BadStore, match=r"chunk-0-1.bin cannot be opened"):
        penstock.open_dataset(path)


def test_sets_of_old_versions_whose_sizes_leave_out_the_table_are_read(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    index = read_json(path)
    for chunk in index["chunks"]:
        chunk["chunk_bytes"] -= 4 * (chunk["chunk_size"] + 2)
    write_json(path, index)
    data = penstock.open_dataset(path)
    assert [data[n]["n"] for n in range(8)] == list(range(8))


def test_damaged_chunks_raise_and_the_bad_sample_policy_skips_them(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    with open(os.path.join(path, "chunk-0-2.bin"), "r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\x7f")
    data = penstock.open_dataset(path)
    with pytest.raises(Damaged, match=r"chunk-0-2.bin"):
        data[5]
    loader = penstock.DataLoader(data, batch_size=4, on_error="skip", max_bad=4)
    assert [n for batch in loader for n in batch["n"].tolist()] == [0, 1, 2, 3]


def test_a_chunk_that_was_replaced_is_an_error_not_another_sample(tmp_path: Any) -> None:
    path = write_numbers(tmp_path)
    data = penstock.open_dataset(path)
    assert data[0]["n"] == 0
    chunk = os.path.join(path, "chunk-0-0.bin")
    with open(chunk, "rb") as file:
        content = file.read()
    with open(chunk + ".new", "wb") as file:
        file.write(content.replace(b"sample 0", b"sample X"))
    os.replace(chunk + ".new", chunk)
    with pytest.raises(Damaged, match="has changed since"):
        data[0]
    assert penstock.open_dataset(path)[0]["text"] == "sample X"


def test_chunks_without_samples_are_left_out(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_numbers(tmp_path, (2, 0, 1)))
    assert [data[n]["n"] for n in range(3)] == [0, 1, 2]
