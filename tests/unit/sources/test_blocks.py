"""Block readers: indexing, batches, the cache of blocks, and what is pickled."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import BadArgument
from penstock.sources.blocks import BlockCache, BlockReader

pytestmark = pytest.mark.legacy


class Counted(BlockReader):
    """Numbers in blocks of different sizes. Notes which blocks are read."""

    def __init__(self, starts: Any = (0, 3, 4, 9, 10), **keywords: Any) -> None:
        self.read: list[int] = []
        super().__init__(starts, **keywords)

    def _read_block(self, block: int) -> np.ndarray:
        self.read.append(block)
        return np.arange(self.block_starts[block], self.block_starts[block + 1])

    def _sample(self, content: np.ndarray, row: int) -> dict[str, int]:
        return {"n": int(content[row])}


def numbers(samples: list[Any]) -> list[int]:
    return [sample["n"] for sample in samples]


def test_samples_are_found_by_index_also_from_the_end() -> None:
    data = Counted()
    assert len(data) == 10
    assert numbers([data[index] for index in range(10)]) == list(range(10))
    assert data[-1] == {"n": 9}
    assert data[-10] == {"n": 0}
    assert data[np.int64(4)] == {"n": 4}


@pytest.mark.parametrize("index", [10, -11, 1 << 70])
def test_an_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="out of range for 10 samples"):
        Counted()[index]


@pytest.mark.parametrize("index", [1.0, "1", None, slice(2)])
def test_an_index_that_is_no_integer_is_a_type_error(index: Any) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        Counted()[index]


def test_a_batch_is_in_the_order_asked_for_and_needs_each_block_once() -> None:
    data = Counted()
    data.cache_bytes = 0
    assert numbers(data.__getitems__([8, 0, -1, 3, 8, 2, 4])) == [8, 0, 9, 3, 8, 2, 4]
    assert sorted(data.read) == [0, 1, 2, 3]
    assert data.__getitems__([]) == []
    with pytest.raises(IndexError):
        data.__getitems__([0, 10])


def test_blocks_used_last_stay_in_memory() -> None:
    data = Counted()
    data.cache_bytes = 8 * 8  # the blocks have 24, 8, 40 and 8 bytes
    for index in (0, 3, 1, 4):
        data[index]
    assert data.read == [0, 1, 2]
    data[0]  # block 1 is out, because block 2 needed its place and block 0 was used later
    assert data.read == [0, 1, 2]
    data[3]
    assert data.read == [0, 1, 2, 1]


def test_a_block_larger_than_the_cache_is_still_read_once_for_a_batch() -> None:
    cache = BlockCache(max_bytes=1)
    cache.put(0, np.zeros(100, np.uint8))
    assert cache.get(0) is not None
    cache.put(1, np.zeros(100, np.uint8))
    assert cache.get(0) is None
    assert len(cache) == 1


def test_no_block_is_pickled() -> None:
    data = Counted()
    data.read = []
    empty = len(pickle.dumps(data))
    data.__getitems__(list(range(10)))
    data.read = []
    assert len(pickle.dumps(data)) == empty
    again = pickle.loads(pickle.dumps(data))
    assert again[5] == {"n": 5}
    assert again.read == [2]


def test_another_process_begins_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Counted()
    data[0]
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    data[0]
    data[0]
    assert data.read == [0, 0]


def test_samples_with_transforms_are_loaded_one_by_one() -> None:
    assert hasattr(Counted(), "__getitems__")  # control
    assert not hasattr(Counted(transforms={"n": abs}), "__getitems__")


@pytest.mark.parametrize("transforms", [[abs], {"n": 3}])
def test_transforms_that_are_no_functions_by_name_are_refused(transforms: Any) -> None:
    with pytest.raises(BadArgument, match=r"transforms=|not callable"):
        Counted(transforms=transforms)


def test_a_transform_without_a_field_is_shown_with_a_field_of_the_samples(tmp_path: Any) -> None:
    packed = penstock.pack([(1, 2)], tmp_path / "set", fields=["label", "image"], workers=0)
    other = penstock.pack([(1, 2)], tmp_path / "other", fields=["a", "b"], workers=0)
    for opened, field in ((packed, "image"), (other, "a")):
        with pytest.raises(BadArgument, match=rf"transforms={{'{field}': penstock\."):
            penstock.Packed(opened.path, transforms=abs)
    with pytest.raises(BadArgument, match=r"transforms={'jpg': penstock\."):  # a tar file
        Counted(transforms=abs)


def test_a_subclass_with_its_own_samples_is_not_bypassed() -> None:
    class Negated(Counted):
        def __getitem__(self, index: int) -> Any:
            return -super().__getitem__(index)["n"]

    assert not hasattr(Negated(), "__getitems__")
    (batch,) = penstock.DataLoader(Negated(), batch_size=10)
    assert batch.tolist() == [-n for n in range(10)]


def test_the_block_order_needs_each_block_once() -> None:
    data = Counted(np.cumsum([0, *[7, 2, 11] * 20]))
    data.cache_bytes = 1 << 20
    order = data.block_order(seed=3, num_mixed=4)
    delivered = numbers([data[index] for index in order])
    assert sorted(delivered) == list(range(len(data)))
    assert sorted(data.read) == list(range(60))


def test_packed_sets_and_image_folders_have_blocks(tmp_path: Any) -> None:
    samples = [(np.zeros(1 << 20, np.uint8), n) for n in range(10)]
    packed = penstock.pack(samples, tmp_path / "packed")
    starts = packed.block_starts
    assert starts.tolist() == [0, 4, 8, 10]  # what begins in each 4 MiB of the largest file
    same = penstock.BlockOrder(packed, block_starts=starts, seed=5)
    assert list(same) == list(packed.block_order(seed=5))
    assert packed.subset(range(4)).block_starts.tolist() == [0, 3, 4]
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for name in "ab":
        (tmp_path / "images" / "cat" / f"{name}.ppm").write_bytes(b"P6 2 1 255 " + bytes(6))
    assert penstock.ImageFolder(tmp_path / "images").block_starts.tolist() == [0, 1, 2]
