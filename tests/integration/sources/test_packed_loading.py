"""Packed sets with real workers: same bits, little memory, and caches filled by many processes."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import default_collate

from penstock import (
    CenterCrop,
    Compose,
    DataLoader,
    Field,
    Packed,
    RandomHorizontalFlip,
    RandomResizedCrop,
    cached,
    pack,
)
from penstock.errors import BadArgument, BadStore, CannotPack, Damaged
from support.packed_sets import Mixed, Pixels, digest, flip

MAX_PRIVATE_BYTES = 50 << 20


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pixels") / "set"
    pack(Pixels(800, 4096), folder, workers=0, shard_bytes=1 << 20)
    return folder


def epoch(dataset: Any, **keywords: Any) -> list[torch.Tensor]:
    loader = DataLoader(dataset, batch_size=50, shuffle=True, seed=1, **keywords)
    return [x for x, _ in loader]


def test_a_packed_set_gives_the_same_bits_for_any_workers(pixels: Path) -> None:
    packed = Packed(pixels)
    alone = epoch(packed)
    assert alone[0].shape == (50, 4096)
    for keywords in ({"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "pool": "thread"}):
        assert all(map(torch.equal, alone, epoch(packed, **keywords)))
    assert not all(map(torch.equal, alone, epoch(packed.subset(range(799, -1, -1)))))


@pytest.mark.legacy
def test_packing_with_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    for workers in (0, 2):
        pack(Mixed(), tmp_path / str(workers), workers=workers, shard_bytes=2000)
    assert digest(tmp_path / "0") == digest(tmp_path / "2")
    assert len(list((tmp_path / "0").glob("image-*.npy"))) > 2


class Torn(Mixed):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 33:
            raise ValueError("torn")
        sample = super().__getitem__(index)
        return {**sample, "label": "many"} if index == 45 else sample


def test_a_sample_that_cannot_be_packed_is_named_from_a_worker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"while loading sample 33[^0-9](.|\n)*torn") as caught:
        pack(Torn(), tmp_path / "one", workers=2, shard_bytes=2000)
    assert caught.value.sample_index == 33  # type: ignore[attr-defined]
    with pytest.raises(CannotPack, match="sample 45: field 'label' is text"):
        pack(Torn(), tmp_path / "two", workers=2, shard_bytes=2000, on_error=_give_first)


def _give_first(index: int, error: Exception) -> Any:
    if isinstance(error, CannotPack):
        raise error
    return Mixed()[0]


def test_damage_is_named_from_a_worker(pixels: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pixels, tmp_path / "set"))
    flip(broken / "field_0-00001.npy", 500_000)
    with pytest.raises(Damaged, match=r"field_0-00001\.npy is damaged"):
        epoch(Packed(broken), num_workers=2)


def test_workers_check_each_block_once_for_all(pixels: Path) -> None:
    packed = Packed(pixels)
    epoch(packed, num_workers=2)
    assert packed._files[0].checked.blocks.all()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="counted from /proc")
def test_reading_adds_little_private_memory_to_a_worker(tmp_path: Path) -> None:
    """One worker reads every page of a 200 MB set, another one reads a 2 MB set."""
    large = pack(Sparse(200), tmp_path / "large", workers=0)
    small = pack(Sparse(2), tmp_path / "small", workers=0)
    measured = {}
    for name, dataset in (("large", large), ("small", small), ("hoarded", Hoarding(large))):
        loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
        for _ in loader:
            pass
        (worker,) = loader._iterator._workers  # type: ignore[union-attr]
        measured[name] = private_bytes(worker.pid)
        loader.close()
    assert measured["large"] - measured["small"] < MAX_PRIVATE_BYTES
    # Negative control: a dataset that keeps the samples it has read.
    assert measured["hoarded"] - measured["small"] > 3 * MAX_PRIVATE_BYTES


class Hoarding:
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.kept = dataset, []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.kept.append(self.dataset[index])
        return self.kept[-1]


class Sparse:
    """Samples of one megabyte."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(1 << 20, index % 251, np.uint8)


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, without its pages in the page cache."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(psutil.Process(pid))


# Caches


class Counted:
    """Records each computed sample in a file."""

    def __init__(self, notes: Path, length: int = 40, ragged: bool = False) -> None:
        self.notes, self.length, self.ragged = notes, length, ragged

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with open(self.notes, "a") as file:
            file.write(f"{index}\n")
        size = 1 + index % 5 if self.ragged else 16
        return np.full(size, index, np.int32), index

    def counts(self) -> Counter[str]:
        return Counter(self.notes.read_text().split())


@pytest.mark.parametrize("where", ["ram", "folder"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_computes_each_sample_once(where: str, ragged: bool, tmp_path: Path) -> None:
    source = Counted(tmp_path / "notes", ragged=ragged)
    data = cached(source, where if where == "ram" else tmp_path / "cache")
    for num_workers in (2, 0, 1):
        loader = DataLoader(data, batch_size=8, num_workers=num_workers, collate_fn=list)
        samples = [sample for batch in loader for sample in batch]
        sizes = [1 + y % 5 if ragged else 16 for _, y in samples]
        assert [y for _, y in samples] == list(range(40))
        assert all((x == y).all() for x, y in samples)
        assert [len(x) for x, _ in samples] == sizes
    assert data.num_ready == 40
    assert source.counts() == Counter(str(index) for index in range(40))


def test_without_a_cache_each_sample_is_computed_each_time(tmp_path: Path) -> None:
    source = Counted(tmp_path / "notes")
    for _ in range(2):
        list(DataLoader(source, batch_size=8))
    assert source.counts()["7"] == 2


def test_a_full_cache_is_mapped_and_computes_nothing(tmp_path: Path) -> None:
    source = Counted(tmp_path / "notes")
    data = cached(source, tmp_path / "cache")
    first = [x for x, _ in DataLoader(data, batch_size=8, num_workers=2)]
    computed = source.counts()
    assert set(computed) == {str(i) for i in range(40)}
    for num_workers in (0, 2):
        again = [x for x, _ in DataLoader(data, batch_size=8, num_workers=num_workers)]
        assert all(map(torch.equal, first, again))
    assert source.counts() == computed
    other = cached(source, tmp_path / "cache")  # the next run
    assert other.num_ready == 40
    assert callable(other.read_rows)


def test_two_ranks_fill_one_cache_at_once(tmp_path: Path) -> None:
    source = Counted(tmp_path / "notes", 200)
    with ThreadPoolExecutor(2) as executor:  # both find no cache, and one creates it
        ranks = list(executor.map(lambda _: cached(source, tmp_path / "cache"), range(2)))
    loaders = [
        DataLoader(data, batch_size=8, num_workers=1, shuffle=True, seed=rank)
        for rank, data in enumerate(ranks)
    ]
    for batches in zip(*loaders, strict=True):
        assert all((x == y[:, None]).all() for x, y in batches)
    assert [data.num_ready for data in ranks] == [200, 200]
    assert all((cached(source, tmp_path / "cache")[i][0] == i).all() for i in (0, 77, 199))


def test_a_cache_of_another_dataset_is_refused(tmp_path: Path) -> None:
    cached(Counted(tmp_path / "notes"), tmp_path / "cache")
    with pytest.raises(BadStore, match="a different dataset"):
        cached(Counted(tmp_path / "notes", 41), tmp_path / "cache")


def test_a_cache_that_was_torn_by_a_power_cut_forgets_what_is_wrong(tmp_path: Path) -> None:
    source = Counted(tmp_path / "notes")
    data = cached(source, tmp_path / "cache")
    for index in range(40):
        data[index]
    flip(tmp_path / "cache" / "field_0.npy")  # in the last sample
    (tmp_path / "cache" / "boot").write_text("before")
    again = cached(source, tmp_path / "cache")
    assert (again[39][0] == 39).all()
    flip(tmp_path / "cache" / "field_0.npy")  # negative control: trusted without a reboot
    assert not (cached(source, tmp_path / "cache")[39][0] == 39).all()


class Doubled(Packed):
    """A set whose class, not a transform, changes the samples."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_class_that_changes_samples_is_not_passed_over(num_workers: int, tmp_path: Path) -> None:
    arrays = [np.full(3, number, np.float32) for number in range(4)]
    pack(arrays, tmp_path / "set", workers=0)
    changed = next(iter(DataLoader(Doubled(tmp_path / "set"), 4, num_workers=num_workers)))
    assert changed[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
    plain = next(iter(DataLoader(Packed(tmp_path / "set"), 4, num_workers=num_workers)))
    assert plain[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


# -- channels_last ---------------------------------------------------------------------------------


class Photographs:
    """Arrays of pixels of one shape, and a label."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (50, 60, 3), dtype=np.uint8)
        return pixels, index


@pytest.fixture(scope="module", params=[True, False], ids=["ragged", "fixed"])
def photographs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs") / "set"
    fields = {"x": Field(ragged=request.param), "y": Field()}
    pack(Photographs(), folder, fields=fields, workers=0)
    return folder


@pytest.mark.legacy
@pytest.mark.parametrize(
    "keywords",
    [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "pool": "thread"}],
    ids=["inline", "1 worker", "2 workers", "2 threads"],
)
def test_channels_last_changes_strides_and_no_value(
    photographs: Path, keywords: dict[str, Any]
) -> None:
    crop = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])
    plain = Packed(photographs, transforms={"x": crop}, memory_format=torch.contiguous_format)
    last = Packed(photographs, transforms={"x": crop})
    expected = list(DataLoader(plain, batch_size=16, shuffle=True, seed=1))
    found = list(DataLoader(last, batch_size=16, shuffle=True, seed=1, **keywords))
    assert len(found) == len(expected) == 3
    for (images, labels), (same_images, same_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert not images.is_contiguous()
        assert same_images.is_contiguous(), "control: asked for"
    assert last[0][0].is_contiguous(), "samples have the format that they always had"


def test_your_own_dataset_and_collate_fn_get_contiguous_batches(photographs: Path) -> None:
    last = Packed(photographs, transforms={"x": RandomResizedCrop(48)})

    class Wrapped:
        def __len__(self) -> int:
            return len(last)

        def __getitem__(self, index: int) -> Any:
            return last[index]

    def collate(samples: list[Any]) -> Any:
        return default_collate(samples)

    for num_workers in (0, 1):
        options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers, "seed": 2}
        own = next(iter(DataLoader(Wrapped(), **options)))
        by_hand = next(iter(DataLoader(last, collate_fn=collate, **options)))
        kept = next(iter(DataLoader(last, **options)))
        assert own[0].is_contiguous()
        assert by_hand[0].is_contiguous()
        assert not kept[0].is_contiguous(), "control"
        assert torch.equal(own[0], kept[0])
        assert torch.equal(by_hand[0], kept[0])


def test_a_subset_a_copy_and_a_sum_keep_the_memory_format(photographs: Path) -> None:
    crop = CenterCrop(40)
    last = Packed(photographs, transforms={"x": crop}, memory_format=torch.channels_last)
    plain = Packed(photographs, transforms={"x": crop}, memory_format=torch.contiguous_format)
    parts = (last.subset(range(5, 25)), last + last, pickle.loads(pickle.dumps(last)))
    for one in (*parts, last.select("x", "y"), torch.utils.data.Subset(last, range(12))):
        images, _ = next(iter(DataLoader(one, batch_size=8)))
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert not images.is_contiguous()
    for one in (plain.subset(range(5, 25)), pickle.loads(pickle.dumps(plain))):
        assert next(iter(DataLoader(one, batch_size=8)))[0].is_contiguous(), "control"
    with pytest.raises(BadArgument, match="different memory formats"):
        last + plain


def test_bad_samples_do_not_change_the_memory_format(photographs: Path) -> None:
    def refuse(label: int) -> int:
        if label in (3, 17, 18):
            raise ValueError("refused")
        return label

    last = Packed(photographs).with_transforms(x=RandomResizedCrop(48), y=refuse)
    runs = [
        list(DataLoader(last, batch_size=8, num_workers=num_workers, on_error="skip", seed=3))
        for num_workers in (0, 2)
    ]
    assert [len(labels) for _, labels in runs[0]] == [7, 8, 6, 8, 8]
    for (images, labels), (same_images, same_labels) in zip(*runs, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
        assert images.stride() == same_images.stride()
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_transform_of_your_own_gets_contiguous_tensors(photographs: Path) -> None:
    def double(label: int) -> int:
        return 2 * label

    last = Packed(photographs)
    last = last.with_transforms(x=CenterCrop(40), y=double)
    images, labels = next(iter(DataLoader(last, batch_size=8, num_workers=1)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == list(range(0, 16, 2))
    images, _ = next(iter(DataLoader(last.with_transforms(x=np.copy), batch_size=8)))
    assert images.shape == (8, 50, 60, 3), "control: without a crop, the array as it was packed"
    assert images.is_contiguous()
