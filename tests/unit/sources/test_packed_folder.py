"""Invalid indices, arguments and manifests are rejected with a remedy.

Covers packed_folder, packed and manifest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import CenterCrop, Field, Packed, Resize, pack
from penstock.errors import BadArgument, BadStore
from support.packed_sets import Mixed

pytestmark = pytest.mark.windows


def make(tmp_path: Path) -> Packed:
    rows = [np.full(300, number, np.int64) for number in range(20)]
    return pack(rows, tmp_path / "set", workers=0, shard_bytes=10_000)


@pytest.mark.parametrize("rows", [range(-3, 0), range(-1, 3), range(2, -3, -1), slice(-2, None)])
@pytest.mark.parametrize("part", [range(20), range(5, 15)])
def test_a_range_may_begin_at_the_end(rows: Any, part: range, tmp_path: Path) -> None:
    some = make(tmp_path).subset(part).subset(rows)
    numbers = list(part)
    wanted = numbers[rows] if isinstance(rows, slice) else [numbers[row] for row in rows]
    assert [int(row[0]) for row in some] == wanted
    assert [int(row[0]) for row in some.__getitems__(range(len(some)))] == wanted


def test_odd_indices_are_told_what_to_write_instead(tmp_path: Path) -> None:
    packed = make(tmp_path)
    with pytest.raises(IndexError, match="index 20 is out of range for 20"):
        packed.__getitems__([1, 20, 3])
    with pytest.raises(IndexError, match="out of range"):
        packed[2**70]
    for index in (slice(3, 6), [1, 2], 1.0, None, True):
        with pytest.raises(TypeError, match="subset"):
            packed[index]  # type: ignore[index]
    for indices in (5, np.zeros((2, 2), int), np.arange(20) < 3):
        with pytest.raises(TypeError, match="subset"):
            packed.subset(indices)
    assert packed[np.uint8(7)][0] == packed[torch.tensor(7)][0] == 7


def test_sets_with_other_transforms_are_not_put_together(tmp_path: Path) -> None:
    packed = make(tmp_path)
    changed = packed.with_transforms(value=np.negative)
    with pytest.raises(BadArgument, match="different transforms"):
        changed + packed
    assert (changed + changed)[25][0] == -5
    one, same = (packed.with_transforms(value=Resize(4)) for _ in range(2))
    assert len(one + same) == 40
    with pytest.raises(BadArgument, match="different transforms"):
        one + packed.with_transforms(value=CenterCrop(4))


def test_odd_arguments_are_named_at_opening(tmp_path: Path) -> None:
    packed = make(tmp_path)
    with pytest.raises(BadArgument, match="is not callable"):
        Packed(packed.path, transforms={"value": 5})  # type: ignore[dict-item]
    with pytest.raises(BadArgument, match="must be a dict"):
        Packed(packed.path, transforms=[str])  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"Packed\(\.\.\., verify='lazy'\)"):
        Packed(packed.path, verify="maybe")
    assert Packed(packed.path, columns="value").fields == ("value",)
    numbers = pack(
        [1, 2], packed.path + "-numbers", workers=0, fields={"value": Field(ragged=True)}
    )
    assert numbers[1] == 2


CHANGES = {
    "text of one size": ("image", {"kind": "text"}, "must be ragged bytes"),
    "an image of one size": (
        "image",
        {"kind": "image", "encoding": "raw", "ndim": 3},
        "must be ragged bytes",
    ),
    "a number of one shape": ("image", {"kind": "int"}, "must be a number"),
    "a number of any shape": ("name", {"kind": "int"}, "must be a number"),
    "an encoding of numbers": ("image", {"encoding": "file"}, "cannot have an encoding"),
    "an image in no encoding": ("name", {"kind": "image"}, "invalid encoding ''"),
}


@pytest.mark.parametrize(("field", "change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_contradicts_itself_is_refused_at_opening(
    field: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    pack(Mixed(8), tmp_path, workers=0)
    content = json.loads((tmp_path / "manifest.json").read_text())
    next(one for one in content["fields"] if one["name"] == field).update(change)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BadStore, match=told):
        Packed(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [("", "it has no file manifest.json"), ("absent", "there is no such folder")],
)
def test_a_folder_that_is_no_packed_set_is_told_apart_from_none(
    tmp_path: Path, name: str, told: str
) -> None:
    folder = os.path.join(tmp_path, name).rstrip(os.sep)
    with pytest.raises(BadStore, match=told) as caught:
        Packed(folder)
    assert f"penstock pack {folder if not name else 'SOURCE'} " in str(caught.value)


def test_a_manifest_cannot_ask_for_memory(tmp_path: Path) -> None:
    pack(Mixed(8), tmp_path, workers=0)
    content = json.loads((tmp_path / "manifest.json").read_text())
    content["shards"][0]["files"]["image"][0]["bytes"] = 1 << 70
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BadStore, match="the manifest says"):
        Packed(tmp_path)


def test_checks_that_are_missing_are_missed_at_opening(tmp_path: Path) -> None:
    pack([np.full(2 << 20, number, np.uint8) for number in range(2)], tmp_path, workers=0)
    (tmp_path / "value-00000.crc.npy").unlink()
    with pytest.raises(
        BadStore, match=r"value-00000\.crc\.npy, the checksums of value-00000\.npy, is missing"
    ):
        Packed(tmp_path)
    assert Packed(tmp_path, verify="full")[1][0] == 1  # needs no list: it compares all
