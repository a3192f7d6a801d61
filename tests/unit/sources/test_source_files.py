"""Files that are read at offsets, and files that change while a dataset is open."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from penstock.errors import BadStore, Damaged
from penstock.sources import source_files
from penstock.sources.source_files import SourceFiles

pytestmark = pytest.mark.legacy
CONTENT = bytes(range(256))


def make(folder: Path, count: int = 1) -> SourceFiles:
    paths = [folder / f"{number}.bin" for number in range(count)]
    for path in paths:
        path.write_bytes(CONTENT)
        os.utime(path, ns=(10**18, 10**18))
    return SourceFiles([str(path) for path in paths])


def test_bytes_are_read_at_an_offset(tmp_path: Path) -> None:
    files = make(tmp_path, 2)
    assert files.read(1, offset=3, num_bytes=4) == CONTENT[3:7]
    assert pickle.loads(pickle.dumps(files)).read(0, offset=250, num_bytes=6) == CONTENT[250:]


def test_a_read_past_the_end_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"0\.bin ends before byte 257"):
        make(tmp_path).read(0, offset=250, num_bytes=7)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("change", ["replaced", "rewritten", "truncated", "deleted"])
def test_a_file_that_changed_is_never_read(tmp_path: Path, change: str, is_open: bool) -> None:
    files = make(tmp_path)
    path = tmp_path / "0.bin"
    if is_open:
        assert files.read(0, 0, 1) == b"\0"  # control
    if change == "replaced":
        (tmp_path / "new").write_bytes(bytes(256))
        os.replace(tmp_path / "new", path)
    elif change == "rewritten":
        path.write_bytes(bytes(256))
    elif change == "truncated":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(Damaged, match=r"0\.bin (has changed|cannot be)"):
        files.read(0, 0, 1)


def test_an_open_file_replaced_by_one_with_the_same_size_and_time_is_noticed(
    tmp_path: Path,
) -> None:
    files = make(tmp_path)
    files.read(0, 0, 1)
    (tmp_path / "new").write_bytes(bytes(256))
    os.utime(tmp_path / "new", ns=(10**18, 10**18))
    os.replace(tmp_path / "new", tmp_path / "0.bin")
    with pytest.raises(Damaged, match="has changed"):
        files.read(0, 0, 1)


def test_a_missing_file_is_an_error_when_opening(tmp_path: Path) -> None:
    with pytest.raises(BadStore, match="cannot be opened"):
        SourceFiles([str(tmp_path / "missing")])


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_OPEN", 3)
    files = make(tmp_path, 10)
    for turn in range(2):
        for number in range(10):
            assert files.read(number, turn, 1) == bytes([turn])
    assert len(files._handles) == 3


def test_another_process_opens_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make(tmp_path)
    files.read(0, 0, 1)
    before = files._handles[0]
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    files.read(0, 0, 1)
    assert files._handles[0] is not before
