"""Lance datasets: samples, versions, batches, faults."""

from __future__ import annotations

import os
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import BadArgument, BadStore, Damaged, MissingExtra
from penstock.sources.lance_dataset import LanceDataset

pa: Any = pytest.importorskip("pyarrow")
lance: Any = pytest.importorskip("lance")
pytestmark = pytest.mark.formats


def make_table(count: int, first: int = 0) -> Any:
    numbers = np.arange(first, first + count)
    pixels = (numbers[:, None] + np.arange(6)).astype(np.uint8)
    x = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 6)
    return pa.table({"n": numbers, "text": [f"sample {n}" for n in numbers], "x": x})


def write_set(folder: Any, count: int = 10, first: int = 0) -> str:
    path = str(folder / "set.lance")
    lance.write_dataset(make_table(count, first), path, max_rows_per_file=4)
    return path


@pytest.fixture(scope="module", autouse=True)
def lance_runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start Lance's threads, which stay until the process ends, before a test counts them."""
    lance.dataset(write_set(tmp_path_factory.mktemp("first"))).take([0])


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    is_tensor = torch.is_tensor
    return {name: one.tolist() if is_tensor(one) else one for name, one in sample.items()}


def test_samples_are_those_that_were_written(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_set(tmp_path))
    assert [plain(data[n]) for n in range(10)] == make_table(10).to_pylist()
    assert data.block_starts.tolist() == [0, 4, 8, 10]
    picked = [9, 0, 0, 5]
    assert [plain(one) for one in data.__getitems__(picked)] == [plain(data[n]) for n in picked]
    assert plain(pickle.loads(pickle.dumps(data))[6]) == plain(data[6])
    assert data.__getitems__([]) == []
    with pytest.raises(IndexError):
        data[10]


def test_only_the_chosen_columns_are_returned(tmp_path: Any) -> None:
    path = write_set(tmp_path)
    assert penstock.open_dataset(path, columns=["text"])[2] == {"text": "sample 2"}
    with pytest.raises(BadArgument, match="no field 'label'"):
        penstock.open_dataset(path, columns=["label"])


def test_batches_of_numbers_are_gathered_and_equal_to_samples(tmp_path: Any) -> None:
    data = penstock.open_dataset(write_set(tmp_path), columns=["n", "x"])
    index = [9, 2, 2, 5]
    (batch,) = penstock.DataLoader(data, batch_size=4, sampler=index)
    expected = torch.utils.data.default_collate([data[n] for n in index])
    assert callable(data.read_rows)
    for name, values in expected.items():
        assert torch.equal(batch[name], values)


def test_deleted_rows_are_left_out_and_later_versions_are_not_seen(tmp_path: Any) -> None:
    path = write_set(tmp_path)
    old = penstock.open_dataset(path)
    lance.dataset(path).delete("n = 3 or n = 8 or n = 9")
    new = penstock.open_dataset(path)
    assert [new[n]["n"] for n in range(len(new))] == [0, 1, 2, 4, 5, 6, 7]
    assert new.block_starts.tolist() == [0, 3, 7]
    assert [old[n]["n"] for n in range(10)] == list(range(10))
    assert len(penstock.open_dataset(path, version=1)) == 10
    with pytest.raises(BadStore, match=r"has no version 99. Its latest versions are 1, 2"):
        penstock.open_dataset(path, version=99)


def test_a_dataset_that_was_replaced_is_an_error_not_another_sample(tmp_path: Any) -> None:
    path = write_set(tmp_path)
    data = penstock.open_dataset(path)
    assert data[0]["n"] == 0
    shutil.rmtree(path)
    write_set(tmp_path, first=100)
    with pytest.raises(Damaged, match="has changed since"):
        data[0]
    assert penstock.open_dataset(path)[0]["n"] == 100


def test_a_truncated_data_file_raises_for_its_samples_only(tmp_path: Any) -> None:
    path = write_set(tmp_path)
    name = lance.dataset(path).get_fragments()[1].data_files()[0].path
    os.truncate(os.path.join(path, "data", name if isinstance(name, str) else name()), 50)
    data = penstock.open_dataset(path)
    with pytest.raises(Damaged, match=r"set\.lance cannot be read"):
        data[5]
    assert data[3]["n"] == 3


def test_a_set_without_rows_has_its_fields(tmp_path: Any) -> None:
    lance.write_dataset(pa.table({"n": pa.array([], pa.int64())}), str(tmp_path / "set.lance"))
    data = penstock.open_dataset(tmp_path / "set.lance")
    assert (len(data), data.fields) == (0, ("n",))


def test_a_folder_that_is_not_lance_is_named(tmp_path: Any) -> None:
    path = tmp_path / "x.lance"
    os.makedirs(path / "_versions")
    os.makedirs(path / "data")
    with pytest.raises(BadStore, match=r"x\.lance cannot be opened"):
        penstock.open_dataset(path)


def test_the_install_line_is_named_if_lance_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_set(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "lance", None)
    with pytest.raises(MissingExtra, match='pip install "pylance>='):
        penstock.open_dataset(path)


def test_the_block_order_reads_whole_blocks_and_a_random_order_single_rows(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "set.lance")
    lance.write_dataset(make_table(1200), path, max_rows_per_file=8)
    taken: list[int] = []
    original = LanceDataset._rows

    def note(self: Any, places: list[int]) -> Any:
        taken.append(len(places))
        return original(self, places)

    monkeypatch.setattr(LanceDataset, "_rows", note)
    data = penstock.open_dataset(path, columns=["n"])
    order = data.block_order(seed=1, num_mixed=2)
    loader = penstock.DataLoader(data, batch_size=8, sampler=order)
    assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(1200))
    assert taken.count(8) > 100
    taken.clear()
    data = penstock.open_dataset(path, columns=["n"])
    loader = penstock.DataLoader(data, batch_size=2, shuffle=True, seed=1)
    assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(1200))
    assert taken.count(8) < 20
