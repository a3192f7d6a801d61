"""The file of a sample is found from the error or from the lists that datasets keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

import penstock
from penstock.engine.loading.sample_path import find_path, note_sample

pytestmark = pytest.mark.legacy

PATHS = [f"data/{number}.jpg" for number in range(6)]


class Images(Dataset):
    """Six images, listed under an attribute name that a library uses."""

    def __init__(self, name: str = "paths", files: Any = None) -> None:
        setattr(self, name, PATHS if files is None else files)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> NoReturn:
        raise AssertionError("nothing may be loaded")


class Hostile:
    """Raises on every operation."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError("no attribute of mine is to be read")

    def __len__(self) -> NoReturn:
        raise RuntimeError("no length")


@pytest.mark.parametrize(
    "name",
    [
        *("samples", "imgs", "items", "images"),
        *("paths", "files", "filenames", "image_files", "im_files", "img_files"),
    ],
)
def test_the_lists_of_known_libraries_are_found(name: str) -> None:
    assert find_path(Images(name), 4) == "data/4.jpg"
    assert find_path(Images("names"), 4) is None  # control: other lists are ignored


@pytest.mark.parametrize(
    "files",
    [
        [(path, 3) for path in PATHS],
        [[path, "a label"] for path in PATHS],
        tuple(PATHS),
        [Path(path) for path in PATHS],
        [path.encode() for path in PATHS],
        np.array(PATHS),
        np.array(PATHS, dtype=object),
    ],
    ids=lambda files: type(files).__name__ + "-" + type(files[0]).__name__,
)
def test_lists_of_many_kinds_are_read(files: Any) -> None:
    check_paths(files)


def test_shared_lists_are_read() -> None:
    check_paths(penstock.SharedList(PATHS))
    check_paths(penstock.SharedList((path, 3) for path in PATHS))


def check_paths(files: Any) -> None:
    for index in (2, np.int64(2)):
        found = find_path(Images("samples", files), index)
        assert found is not None
        assert Path(found) == Path("data/2.jpg")  # Windows writes a Path with backslashes


def test_parts_and_chains_of_datasets_are_looked_into() -> None:
    part = Subset(Images(), [5, 3, 1])
    assert find_path(part, 1) == "data/3.jpg"
    assert find_path(Subset(part, np.array([2])), 0) == "data/1.jpg"
    chain = ConcatDataset([Images(files=[f"other/{n}.png" for n in range(6)]), part, Images()])
    assert [find_path(chain, n) for n in (0, 5, 6, 8, 9, -1)] == [
        *("other/0.png", "other/5.png", "data/5.jpg", "data/1.jpg", "data/0.jpg", "data/5.jpg")
    ]
    for half in random_split(Images(), [4, 2]):
        assert [find_path(half, n) for n in range(len(half))] == [PATHS[i] for i in half.indices]


def test_a_part_of_a_seeded_split_is_looked_into() -> None:
    part, _ = penstock.split(Images(), [0.5, 0.5], seed=3)
    assert [find_path(part, n) for n in range(3)] == [PATHS[i] for i in part.indices]


def test_the_file_that_the_error_names_is_taken_first() -> None:
    error = FileNotFoundError(2, "No such file or directory", "data/4.png")
    assert find_path(Images(), 4, error) == "data/4.png"
    assert find_path(object(), 4, error) == "data/4.png"
    assert find_path(object(), "a key", PermissionError(13, "Denied", Path("a.jpg"))) == "a.jpg"


def test_the_file_of_an_error_behind_the_error_is_taken() -> None:
    inner = OSError(5, "Input/output error", "data/4.jpg")
    outer = ValueError("cannot decode")
    outer.__cause__ = inner
    assert find_path(object(), 4, outer) == "data/4.jpg"
    circle = ValueError("one")
    circle.__context__ = other = ValueError("two")
    other.__context__ = circle
    assert find_path(object(), 4, circle) is None


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("a text"),
        OSError("image file is truncated"),
        OSError(9, "Bad file descriptor", 7),
        FileNotFoundError(2, "No such file", ""),
        SyntaxError("invalid", ("code.py", 1, 1, "")),
    ],
)
def test_an_error_without_a_file_leaves_it_to_the_dataset(error: Any) -> None:
    assert find_path(Images(), 4, error) == "data/4.jpg"


@pytest.mark.parametrize(
    "files",
    [
        PATHS[:3],  # shards, so the file of the fourth sample is unknown
        [*PATHS, "one more.jpg"],
        [1, 2, 3, 4, 5, 6],
        [None] * 6,
        [()] * 6,
        np.zeros(6),
        np.array([PATHS] * 6),
        dict(enumerate(PATHS)),
        ["a sentence of a text without end"] * 6,
        ["x" * 5000 + ".jpg"] * 6,
        "abcdef",
        range(6),
    ],
    ids=lambda files: type(files).__name__,
)
def test_what_is_no_list_of_the_samples_files_says_nothing(files: Any) -> None:
    assert find_path(Images("samples", files), 4) is None


@pytest.mark.parametrize("index", [6, -7, 10**30, "4", 4.0, None, [4], (1, 2), slice(2), object()])
def test_an_index_that_is_none_finds_nothing(index: Any) -> None:
    assert find_path(Images(), index) is None
    assert find_path(Subset(Images(), [1, 2]), index) is None
    assert find_path(ConcatDataset([Images()]), index) is None


def test_no_dataset_makes_it_fail() -> None:
    for dataset in (None, 7, "abc", [1, 2], {}, object(), Hostile(), Images):
        assert find_path(dataset, 0) is None
        assert find_path(Subset(dataset, [0]), 0) is None  # type: ignore[arg-type]


def test_properties_lazy_lists_and_attributes_made_up_are_not_called() -> None:
    class LazyList(list[str]):
        def __getitem__(self, index: Any) -> NoReturn:
            raise SystemExit("was loaded")

    class Lazy:
        img_files = LazyList(PATHS)

        @property
        def samples(self) -> NoReturn:
            raise SystemExit("was called")

        def __getattr__(self, name: str) -> NoReturn:
            raise SystemExit("was asked")

        def __len__(self) -> int:
            return 6

    assert find_path(Lazy(), 0) is None


def test_a_dataset_with_slots_or_a_list_of_its_class_is_no_trouble() -> None:
    class Slotted:
        __slots__ = ("paths",)

        def __len__(self) -> int:
            return 6

    class Shared:
        paths = PATHS

        def __len__(self) -> int:
            return 6

    slotted = Slotted()
    assert find_path(slotted, 0) is None
    slotted.paths = PATHS
    assert find_path(slotted, 0) == "data/0.jpg"
    assert find_path(Shared(), 0) == "data/0.jpg"


def test_a_dataset_inside_itself_comes_to_an_end() -> None:
    part = Subset(Images(), [0])
    part.dataset = part
    assert find_path(part, 0) is None


def test_numpy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert find_path(Images(), 1) == "data/1.jpg"


def test_a_guess_that_the_error_contradicts_is_none() -> None:
    images = Images()
    assert find_path(images, 1, ValueError("cannot decode data/3.jpg")) is None
    assert find_path(images, 1, ValueError("cannot decode data/1.jpg")) == "data/1.jpg"
    assert find_path(images, 1, ValueError("12 bytes are missing")) == "data/1.jpg"


class Torn(Images):
    def __getitem__(self, index: int) -> NoReturn:
        raise OSError("image file is truncated")


class Remapped(Images):
    def __getitem__(self, index: int) -> NoReturn:
        index = 5 - index
        raise OSError("image file is truncated")


def raised_by(dataset: Any, index: int) -> Exception:
    try:
        dataset[index]
    except OSError as error:
        note_sample(error, dataset)
        return error
    raise AssertionError


def test_an_error_of_a_sample_gets_its_index_and_file() -> None:
    error: Any = raised_by(Torn(), 3)
    assert error.sample_index == 3
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["while loading sample 3 (data/3.jpg)"]
    inner: Any = raised_by(Subset(Torn(), [4, 2]), 1)
    assert inner.sample_index == 1
    if sys.version_info >= (3, 11):
        assert inner.__notes__ == ["while loading sample 1 (data/2.jpg)"]


def test_an_index_that_the_method_changes_is_not_guessed() -> None:
    assert not hasattr(raised_by(Remapped(), 3), "sample_index")


def test_an_error_from_elsewhere_gets_no_index() -> None:
    error = OSError("no")
    note_sample(error, Torn())
    note_sample(error, [1, 2])
    assert not hasattr(error, "sample_index")
