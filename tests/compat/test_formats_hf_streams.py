"""Hugging Face's IterableDataset: exact resume with workers, and too few shards."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from penstock import DataLoader

datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.formats, pytest.mark.vision]

LENGTH = 41


def stream(num_shards: int = 4) -> Any:
    table = datasets.Dataset.from_dict({"x": list(range(LENGTH))})
    return table.to_iterable_dataset(num_shards=num_shards)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def take(batches: Any, count: int) -> list[list[int]]:
    return [next(batches)["x"].tolist() for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_a_stream_of_hugging_face_resumes_at_the_next_sample(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(
            stream(), batch_size=3, num_workers=num_workers, persistent_workers=num_workers > 0
        )

    loader = make()
    whole = numbers(loader)
    assert sorted(number for batch in whole for number in batch) == list(range(LENGTH))
    for point in (1, 4, len(whole) - 1):
        batches = iter(loader)
        assert take(batches, point) == whole[:point]
        state = json.loads(json.dumps(loader.state_dict()))
        later = make()
        later.load_state_dict(state)
        assert numbers(later) == whole[point:]
        assert numbers(later) == whole  # the next epoch is whole
        later.close()
    loader.close()


def test_control_a_loaded_state_of_hugging_face_shortens_every_later_epoch() -> None:
    dataset = stream()
    batches = iter(dataset)
    for _ in range(5):
        next(batches)
    other = stream()
    other.load_state_dict(dataset.state_dict())
    assert len(list(other)) == len(list(other)) == LENGTH - 5


def test_a_shuffle_buffer_is_replayed_because_its_state_leaves_samples_out() -> None:
    def make(num_workers: int = 2) -> DataLoader[Any]:
        shuffled = stream().shuffle(seed=3, buffer_size=8)
        return DataLoader(shuffled, batch_size=3, num_workers=num_workers)

    for num_workers in (0, 2):
        loader = make(num_workers)
        whole = numbers(loader)
        batches = iter(loader)
        take(batches, 4)
        state = json.loads(json.dumps(loader.state_dict()))
        del batches
        later = make(num_workers)
        later.load_state_dict(state)
        with pytest.warns(UserWarning, match="does not save its shuffle buffer"):
            assert numbers(later) == whole[4:]
    # Control: the state of the dataset alone loses what is in the buffer.
    dataset, other = (stream().shuffle(seed=3, buffer_size=8) for _ in range(2))
    samples = iter(dataset)
    before = [next(samples)["x"] for _ in range(12)]
    other.load_state_dict(dataset.state_dict())
    after = [sample["x"] for sample in other]
    assert sorted(before + after) != list(range(LENGTH))


def test_fewer_shards_than_workers_are_reported_before_the_first_batch() -> None:
    def messages(num_shards: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            iter(DataLoader(stream(num_shards), batch_size=3, num_workers=2))
        return [str(one.message) for one in caught if "shard" in str(one.message)]

    (text,) = messages(1)
    assert "the dataset has 1 shard for 2 workers, so 1 of them get no samples" in text
    assert "DataLoader(..., num_workers=1)" in text
    assert messages(2) == messages(3) == []
