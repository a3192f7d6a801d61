"""Archives of WebDataset's own writer give the samples of its own reader, none lost or doubled."""

from __future__ import annotations

import itertools
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import BadImage, BadStore
from penstock.sources.tar_headers import split_name
from support.resumed_epochs import BATCH_SIZE, CASES, Case, deliver_resumed, lost_and_doubled
from support.tar_archives import write_tar

wds = pytest.importorskip("webdataset")
tariterators = pytest.importorskip("webdataset.tariterators")

pytestmark = [
    pytest.mark.vision,
    pytest.mark.formats,
    # WebDataset does not close the archives that it reads.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NOT_FIELDS = ("__url__", "__local_path__")
COUNTS = [13, 1, 30, 7]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def make_sample(number: int) -> dict[str, Any]:
    values = np.random.default_rng(number)
    return {
        "__key__": f"part.{number % 3}/{number:05d}",
        "png": values.integers(0, 256, (6, 7, 3), dtype=np.uint8),
        "x.npy": values.integers(0, 1000, (2, 3)),
        "arrays.npz": {"a": values.integers(0, 9, 4), "b": np.full(1, number)},
        "cls": number,
        "meta.json": {"number": number, "é": ["ß", None]},
        "caption.txt": f"é {number}",
        "raw.bin": bytes([number % 256]) * (number % 5),
    }


def write_set(folder: Path, counts: list[int] = COUNTS) -> list[str]:
    """Write archives with WebDataset's writer."""
    numbers = itertools.count()
    paths = []
    for shard, count in enumerate(counts):
        paths.append(str(folder / f"train-{shard:03d}.tar"))
        with wds.TarWriter(paths[-1]) as writer:
            for number in itertools.islice(numbers, count):
                writer.write(make_sample(number))
    return paths


def read_by_webdataset(paths: list[str], *decoders: Any, **options: Any) -> list[dict[str, Any]]:
    data = wds.WebDataset(paths, shardshuffle=False, **options)
    found = data.decode(*decoders) if decoders else data
    return [
        {name: value for name, value in sample.items() if name not in NOT_FIELDS}
        for sample in found
    ]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert_equal(ours[name], value)
    elif isinstance(theirs, (np.ndarray, torch.Tensor)):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()
    else:
        assert ours == theirs


def test_samples_are_those_of_webdataset(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    theirs = read_by_webdataset(paths, "torchrgb8")
    ours = penstock.open_dataset(f"{tmp_path}/train-{{000..003}}.tar")
    assert len(ours) == len(theirs) == sum(COUNTS)
    for index, sample in enumerate(theirs):
        assert_equal(ours[index], sample)
    with pytest.raises(AssertionError):  # control
        assert_equal(ours[0], theirs[1])


def test_undecoded_samples_are_those_of_webdataset(tmp_path: Path) -> None:
    paths = write_set(tmp_path, [9])
    theirs = read_by_webdataset(paths)
    ours = penstock.open_dataset(paths, decode=False)
    for index, sample in enumerate(theirs):
        assert_equal(ours[index], sample)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_unusual_names_are_grouped_as_by_webdataset(tmp_path: Path, format: int) -> None:
    names = [
        *("a/1.jpg", "a/1.CLS", "b/1.jpg", "b/1.cls", "a/1.jpg", "README", "2.x.Y.z"),
        *(
            "__meta__/1.jpg",
            "x/" * 80 + "é" * 60 + ".jpg",
            "./3.txt",
            "./3.cls",
            "d.e/4",
            "d.e/5.t",
        ),
        *("d/.hidden", ".top", "6.", "7.tar.gz", "__8__", "__9.txt", "a b/10.jpg"),
    ]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names], format)
    theirs = read_by_webdataset([str(path)])
    ours = penstock.open_dataset(path, decode=False)
    assert [ours[index] for index in range(len(ours))] == theirs
    assert len(theirs) == 12


@settings(deadline=None, max_examples=400)
@given(st.text(st.sampled_from("a./_"), max_size=12))
def test_names_are_split_as_by_webdataset(name: str) -> None:
    key, field = tariterators.base_plus_ext(name)
    is_meta = name.startswith("__") and name.endswith("__") and "/" not in name
    first = name.split("/")[0]
    is_meta |= len(first) > 3 and first.startswith("__") and first.endswith("__")
    expected = None if key is None or is_meta else (key.encode(), field.encode())
    assert split_name(name.encode()) == expected


def test_a_repeated_field_is_refused_by_both(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b""), ("1.JPG", b"")])
    with pytest.raises(ValueError, match="duplicate file name"):
        read_by_webdataset([str(path)])
    with pytest.raises(BadStore, match="twice"):
        penstock.open_dataset(path)


# Images


def test_crops_are_the_same_for_any_workers(tmp_path: Path) -> None:
    paths = write_set(tmp_path, [20, 12])
    crops = {"png": penstock.RandomResizedCrop(4)}
    dataset = penstock.open_dataset(paths, columns=["png", "cls"], transforms=crops)
    epochs = []
    for num_workers in (0, 2):
        order = dataset.block_order(seed=1)
        loader = penstock.DataLoader(
            dataset, batch_size=8, sampler=order, seed=1, num_workers=num_workers
        )
        epochs.append([(batch["cls"], batch["png"]) for batch in loader])
    for (labels, images), (same_labels, same_images) in zip(*epochs, strict=True):
        assert images.shape == (8, 3, 4, 4)
        assert torch.equal(labels, same_labels)
        assert torch.equal(images, same_images)
    first, again = ([batch["png"] for batch in penstock.DataLoader(dataset)] for _ in range(2))
    assert not all(map(torch.equal, first, again))  # control: they are random


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    (path,) = write_set(tmp_path, [3])
    files = [("1.png", b"\x89PNG\r\n\x1a\n" + bytes(40)), ("2.jpg", b"")]
    bad = write_tar(tmp_path / "bad.tar", files)
    dataset = penstock.open_dataset([path, str(bad)])
    for index, key in ((3, "1"), (4, "2")):
        with pytest.raises(BadImage, match=rf"bad\.tar, key '{key}', byte \d+"):
            dataset[index]
    assert dataset[2]["cls"] == 2  # control


# Whole epochs


def take(batch: Any) -> list[tuple[Any, ...]]:
    """Return the samples of a batch as comparable values."""
    pixels = batch["png"].flatten(1).tolist()
    columns = (batch["__key__"], batch["cls"].tolist(), batch["caption.txt"], map(tuple, pixels))
    return list(zip(*columns, strict=True))


def expected_samples(paths: list[str]) -> list[tuple[Any, ...]]:
    return [
        (one["__key__"], one["cls"], one["caption.txt"], tuple(one["png"].flatten().tolist()))
        for one in read_by_webdataset(paths, "torchrgb8")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_sample_is_lost_or_doubled_however_it_is_loaded(tmp_path: Path, case: Case) -> None:
    paths = write_set(tmp_path)
    columns = ["__key__", "cls", "caption.txt", "png"]
    dataset = penstock.open_dataset(paths, columns=columns)
    delivered = deliver_resumed(dataset, case, take, seed=case.num_workers)
    expected = expected_samples(paths)
    assert lost_and_doubled(delivered, expected) == (0, 0)
    if case.world_size == 1:
        assert delivered != expected  # shuffled


def test_no_sample_is_lost_or_doubled_inline(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    dataset = penstock.open_dataset(paths, columns=["__key__", "cls", "caption.txt", "png"])
    delivered = deliver_resumed(dataset, Case(0, 2, True), take, seed=3)
    assert lost_and_doubled(delivered, expected_samples(paths)) == (0, 0)


def webdataset_batches(paths: list[str], seed: int) -> Any:
    generator = random.Random(seed)
    data = wds.WebDataset(paths, shardshuffle=len(paths), nodesplitter=wds.split_by_node, seed=seed)
    data = data.shuffle(16, rng=generator).decode().to_tuple("cls").batched(BATCH_SIZE)
    return wds.WebLoader(data, batch_size=None, num_workers=0)


def numbers(batches: Any) -> list[int]:
    return [int(number) for (batch,) in batches for number in batch]


def test_control_webdataset_has_no_state_so_a_resumed_epoch_doubles_and_loses(
    tmp_path: Path,
) -> None:
    paths = write_set(tmp_path)
    assert not hasattr(webdataset_batches(paths, 0), "state_dict")
    first = numbers(itertools.islice(webdataset_batches(paths, seed=0), 6))
    # A new program begins a new epoch, and trains the number of batches that were left.
    num_batches = -(-sum(COUNTS) // BATCH_SIZE)
    rest = numbers(itertools.islice(webdataset_batches(paths, seed=1), num_batches - 6))
    lost, doubled = lost_and_doubled(first + rest, list(range(sum(COUNTS))))
    assert lost > 0
    assert doubled > 0


def test_control_webdataset_gives_ranks_whole_shards_so_equal_steps_lose_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_set(tmp_path)
    ranks = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        ranks.append(list(webdataset_batches(paths, seed=0)))
    steps = min(map(len, ranks))
    delivered = [number for batches in ranks for number in numbers(batches[:steps])]
    lost, _ = lost_and_doubled(delivered, list(range(sum(COUNTS))))
    assert lost > sum(COUNTS) // 3
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    # Penstock's ranks differ by at most one batch.
    dataset = penstock.open_dataset(paths, columns=["cls"])
    lengths = [
        len(penstock.DataLoader(dataset, batch_size=BATCH_SIZE, rank=rank, world_size=3, seed=0))
        for rank in range(3)
    ]
    assert max(lengths) - min(lengths) <= 1


def test_control_webdataset_without_a_splitter_refuses_ranks_and_with_none_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_set(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    delivered = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        data = wds.WebDataset(paths, shardshuffle=False, nodesplitter=None).decode()
        delivered += [sample["cls"] for sample in data]
    assert lost_and_doubled(delivered, list(range(sum(COUNTS)))) == (0, sum(COUNTS))
