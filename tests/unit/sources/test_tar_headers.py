"""Headers of archives in every format, and archives that are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadStore
from penstock.sources.tar_headers import split_name
from support.tar_archives import sample_files, scan, write_tar

pytestmark = pytest.mark.legacy
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
FILES = sample_files(0, 5)


def contents(path: Path) -> list[tuple[str, bytes]]:
    data = path.read_bytes()
    return [
        (one.name.decode("utf-8", "surrogateescape"), data[one.offset : one.offset + one.size])
        for one in scan(path)
    ]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_files_are_found_where_they_lie(tmp_path: Path, format: int) -> None:
    files = [
        *FILES,
        ("a" * 90 + "/" + "b" * 95 + ".txt", b"long"),
        ("empty.txt", b""),
        ("block.bin", bytes(512)),
        ("large.bin", os.urandom(300_000)),
        ("tiny.txt", b"x"),
    ]
    if format != tarfile.USTAR_FORMAT:
        files += [("é" * 200 + "/x.txt", b"long name"), ("after.txt", b"z")]
    path = write_tar(tmp_path / "a.tar", files, format)
    assert contents(path) == files
    assert contents(path) != files[1:]  # control


def test_a_pax_header_can_hold_the_size(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x.txt")
        info.size, info.pax_headers = 3, {"size": "3", "comment": "é", "mtime": "1.5"}
        archive.addfile(info, io.BytesIO(b"abc"))
        archive.pax_headers = {"comment": "for all"}
    assert contents(tmp_path / "a.tar") == [("x.txt", b"abc")]


def test_global_headers_and_folders_and_devices_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    pax = {"comment": "of all files"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=pax) as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("p", tarfile.FIFOTYPE), ("c", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("d/x.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    assert contents(path) == [("d/x.txt", b"1")]


def test_a_size_above_8_gib_is_read_from_its_binary_form(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x.bin")
    info.size = 9 << 30
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:  # sparse on disk
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.seek((9 << 30) + 512)
        file.write(tarfile.TarInfo("y.bin").tobuf() + bytes(1024))
    assert [(one.name, one.size) for one in scan(path)] == [(b"x.bin", 9 << 30), (b"y.bin", 0)]


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{n}.bin", bytes(1 << 20)) for n in range(20)])
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
    assert len(scan(path)) == 20
    assert sum(read) < (1 << 20)
    assert path.stat().st_size > (20 << 20)  # control


# Refused


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip), ("bzip2", bz2), ("xz", lzma)])
def test_a_compressed_archive_is_refused_with_the_reason(
    tmp_path: Path, name: str, pack: object
) -> None:
    plain = write_tar(tmp_path / "a.tar", FILES)
    path = tmp_path / "b.tar"
    path.write_bytes(pack.compress(plain.read_bytes()))  # type: ignore[attr-defined]
    with pytest.raises(BadStore, match=f"compressed with {name}.*cannot be read by index"):
        scan(path)


def make_link(path: Path, kind: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
        info = tarfile.TarInfo("b.txt")
        info.type, info.linkname = kind, "a.txt"
        archive.addfile(info)
    return path


@pytest.mark.parametrize(
    ("kind", "shown"), [(tarfile.LNKTYPE, "hard link"), (tarfile.SYMTYPE, "symbolic link")]
)
def test_a_link_is_refused_because_it_has_no_content(
    tmp_path: Path, kind: bytes, shown: str
) -> None:
    with pytest.raises(BadStore, match=f"'b.txt' in .* is a {shown}"):
        scan(make_link(tmp_path / "a.tar", kind))


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_a_sparse_file_is_refused(tmp_path: Path, format: str) -> None:
    info = tarfile.TarInfo("a.txt")
    info.size = 1
    if format == "gnu":
        info.type = tarfile.GNUTYPE_SPARSE
        header = info.tobuf()
    else:
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "a.txt"}
        header = info.tobuf(tarfile.PAX_FORMAT)
    (tmp_path / "a.tar").write_bytes(header + b"1".ljust(512, b"\0") + bytes(1024))
    with pytest.raises(BadStore, match=r"'a.txt' in .* is a sparse file"):
        scan(tmp_path / "a.tar")


@pytest.mark.parametrize("length", [100, 511, 512, 700, 1024, 2500, 7000])
def test_a_truncated_archive_is_refused_wherever_it_ends(tmp_path: Path, length: int) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    assert len(scan(path)) == 15  # control
    os.truncate(path, length)
    with pytest.raises(BadStore, match="is truncated"):
        scan(path)


def test_an_archive_that_lacks_only_the_end_mark_is_refused_and_can_be_completed(
    tmp_path: Path,
) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    last = scan(path)[-1]
    os.truncate(path, last.offset + 512)
    with pytest.raises(BadStore, match="without an end mark") as caught:
        scan(path)
    assert "truncate -s +1024" in str(caught.value)
    with open(path, "ab") as file:
        file.write(bytes(1024))
    assert len(scan(path)) == 15


def test_an_empty_file_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(BadStore, match="is empty"):
        scan(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(bytes(1024))  # an archive without files
    assert scan(tmp_path / "a.tar") == []


@pytest.mark.parametrize("num_bytes", [100, 5000])
def test_a_file_of_another_format_is_named(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1".ljust(num_bytes, b"1"))
    with pytest.raises(BadStore, match="is not a tar archive") as caught:
        scan(tmp_path / "a.parquet")
    assert "format='parquet'" in str(caught.value)
    assert "truncate -s" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\x93NUMPY" * 500, b"a" * 5000, bytes(range(1, 256)) * 20])
def test_garbage_is_not_a_tar_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(BadStore, match="is not a tar archive"):
        scan(tmp_path / "a.tar")


def test_every_changed_byte_of_a_header_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", FILES)
    data, places = path.read_bytes(), [one.offset - 512 for one in scan(path)]
    chosen = np.random.default_rng(0)
    for _ in range(60):
        place = int(chosen.choice(places))
        at = place + int(chosen.integers(0, 345))
        changed = bytearray(data)
        changed[at] ^= 1 << int(chosen.integers(0, 8))
        path.write_bytes(changed)
        if 148 <= at - place < 156 and contents_equal(path, data):
            continue  # the checksum itself, with other digits of the same value
        with pytest.raises(BadStore, match=r"header at byte|not a tar|truncated|is a|compressed"):
            scan(path)


def contents_equal(path: Path, data: bytes) -> bool:
    try:
        found = scan(path)
    except BadStore:
        return False
    path.write_bytes(data)
    return [one[:3] for one in found] == [one[:3] for one in scan(path)]


def test_content_behind_the_end_mark_is_reported(tmp_path: Path) -> None:
    one, other = (write_tar(tmp_path / f"{name}.tar", FILES) for name in "ab")
    (tmp_path / "c.tar").write_bytes(one.read_bytes() + other.read_bytes())
    with pytest.warns(UserWarning, match="content after its end mark"):
        assert len(scan(tmp_path / "c.tar")) == 15


# Names


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("a/b.c/0001.seg.PNG", ("a/b.c/0001", "seg.PNG")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("0001.", ("0001", "")),
        ("no-ending", None),
        ("a.b/no-ending", None),
        (".hidden", None),
        ("folder/.hidden", ("folder/", "hidden")),
        ("a.b/.hidden", None),
        ("__meta__", None),
        ("__meta__/x.txt", None),
        ("__meta__.txt", ("__meta__", "txt")),
        ("a/__meta__/x.txt", ("a/__meta__/x", "txt")),
        ("__x.txt__", None),
    ],
)
def test_a_name_is_a_key_and_a_field(name: str, parts: tuple[str, str] | None) -> None:
    found = split_name(name.encode())
    assert found == (None if parts is None else tuple(part.encode() for part in parts))
