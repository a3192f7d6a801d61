"""Archives of any files are read as Python's tarfile reads them. Damaged ones are refused."""

from __future__ import annotations

import os
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadStore
from penstock.sources.tar_headers import split_name
from penstock.sources.tar_index import build_index
from support.tar_archives import scan, write_tar

pytestmark = pytest.mark.legacy

NAMES = st.text(st.sampled_from("ab01./é_"), min_size=1, max_size=8).map(lambda name: f"{name}x")
LONG = st.integers(90, 300).map(lambda length: "d/" * (length // 4) + "n" * (length // 2) + ".txt")
FILES = st.lists(
    st.tuples(NAMES | LONG, st.integers(0, 2000).map(lambda size: bytes([size % 251]) * size)),
    max_size=12,
)
FORMATS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def read_by_tarfile(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        return [
            (info.name, archive.extractfile(info).read())  # type: ignore[union-attr]
            for info in archive
            if info.isreg()
        ]


@settings(deadline=None, max_examples=150)
@given(FILES, FORMATS)
def test_files_are_those_of_tarfile(files: list[tuple[str, bytes]], format: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", files, format)
        data = path.read_bytes()
        found = [
            (one.name.decode("utf-8", "surrogateescape"), data[one.offset :][: one.size])
            for one in scan(path)
        ]
        assert found == read_by_tarfile(path) == files


@settings(deadline=None, max_examples=100)
@given(FILES, FORMATS)
def test_samples_are_runs_of_files_with_one_key(
    files: list[tuple[str, bytes]], format: int
) -> None:
    expected: list[tuple[bytes, list[str]]] = []
    for name, _ in files:
        parts = split_name(name.encode())
        if parts is None:
            continue
        if not expected or expected[-1][0] != parts[0]:
            expected.append((parts[0], []))
        expected[-1][1].append(parts[1].decode().lower())
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", files, format)
        if any(len(set(fields)) < len(fields) for _, fields in expected):
            with pytest.raises(BadStore, match="twice"):
                build_index(str(path))
            return
        index = build_index(str(path))
        starts = index.first_fields.tolist()
        found = [
            (index.keys(n, n + 1)[0], [index.field_names[k] for k in index.names[first:last]])
            for n, (first, last) in enumerate(pairwise(starts))
        ]
        assert found == expected
        assert sorted(index.block_starts.tolist()) == index.block_starts.tolist()
        assert index.block_starts[-1] == len(index)


@settings(deadline=None, max_examples=150)
@given(FILES.filter(bool), FORMATS, st.data())
def test_a_truncated_or_changed_archive_is_refused_or_reads_the_same(
    files: list[tuple[str, bytes]], format: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", files, format)
        whole = path.read_bytes()
        before = scan(path)
        end = before[-1].offset + before[-1].size
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, end))])
            with pytest.raises(BadStore):
                scan(path)
            return
        header = data.draw(st.sampled_from(before)).offset - 512
        place = header + data.draw(st.integers(0, 511))
        changed = bytearray(whole)
        changed[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
        try:
            after = scan(path)
        except BadStore:
            return
        # Only spaces and zeros around the checksum can change unnoticed.
        assert 148 <= place - header < 156
        assert [one[:3] for one in after] == [one[:3] for one in before]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=3000))
def test_any_bytes_are_an_archive_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        path.write_bytes(content)
        try:
            found = scan(path)
        except BadStore:
            return
        assert found == []
        assert not content[:512].strip(b"\0")


def test_control_tarfile_reads_a_truncated_archive_without_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", b"2")])
    os.truncate(path, 1024)
    assert read_by_tarfile(path) == [("a.txt", b"1")]
    with pytest.raises(BadStore, match="truncated"):
        scan(path)
