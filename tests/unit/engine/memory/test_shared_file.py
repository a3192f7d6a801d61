"""A shared file, mapped piece by piece: a memfd or an unlinked temporary file."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.engine.memory.shared_file import GRAIN, SharedFile, round_up

pytestmark = [pytest.mark.legacy, pytest.mark.windows]

on_posix = pytest.mark.skipif(os.name != "posix", reason="descriptors and blocks as on POSIX")


@pytest.fixture(params=[True, False], ids=["memfd", "file"])
def file(request: pytest.FixtureRequest) -> Iterator[SharedFile]:
    if request.param and not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memfd")
    file = SharedFile.create(allow_memfd=request.param)
    assert file.is_sparse == request.param
    yield file
    file.close()


def test_two_mappings_of_one_piece_see_the_same_bytes(file: SharedFile) -> None:
    offset = file.grow(100)
    one, other = file.map(offset, 100), file.map(offset, 100)
    one[:5] = b"water"
    assert other[:5] == b"water"


def test_pieces_do_not_overlap_and_start_on_the_grain(file: SharedFile) -> None:
    offsets = [file.grow(size) for size in (1, GRAIN, GRAIN + 1, 10)]
    assert offsets == [0, GRAIN, 2 * GRAIN, 4 * GRAIN]
    pieces = [file.map(offset, 10) for offset in offsets]
    for number, piece in enumerate(pieces):
        piece[:] = bytes([number]) * len(piece)
    assert [piece[3] for piece in pieces] == [0, 1, 2, 3]


def test_a_private_mapping_keeps_its_changes_to_itself(file: SharedFile) -> None:
    offset = file.grow(10)
    shared, private = file.map(offset, 10), file.map(offset, 10, private=True)
    shared[:3] = b"abc"
    assert private[:3] == b"abc"
    private[:3] = b"xyz"
    assert shared[:3] == b"abc"


def test_another_holder_of_the_handle_maps_the_same_memory(file: SharedFile) -> None:
    offset = file.grow(10)
    file.map(offset, 10)[:3] = b"abc"
    handle = file.handle()._replace(fd=os.dup(file.fd))  # a separate descriptor, as in a worker
    other = SharedFile.attach(handle)
    assert other.map(offset, 10)[:3] == b"abc"
    other.close()


def test_a_mapping_outlives_the_file(file: SharedFile) -> None:
    mapping = file.map(file.grow(10), 10)
    file.close()
    mapping[:3] = b"abc"
    assert mapping[:3] == b"abc"


def test_closing_twice_is_closing_once(file: SharedFile) -> None:
    file.close()
    other = os.open(__file__, os.O_RDONLY)  # reuses the freed number
    file.close()
    assert os.fstat(other).st_size == os.stat(__file__).st_size  # still open
    os.close(other)


@on_posix
def test_a_file_on_disk_has_no_name_that_could_be_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = SharedFile.create(allow_memfd=False)
    file.grow(10)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in os.readlink(f"/proc/self/fd/{file.fd}")  # control: it is on disk
    file.close()


@pytest.mark.skipif(not hasattr(os, "O_TEMPORARY"), reason="Windows deletes by name")
def test_a_named_file_is_gone_when_the_last_of_its_users_has_closed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = SharedFile.create()
    mapping = file.map(file.grow(10), 10)
    other = SharedFile.attach(file.handle())
    file.close()
    assert len(list(tmp_path.iterdir())) == 1  # control: the other one has it open
    other.close()
    mapping[:3] = b"abc"
    del mapping
    assert list(tmp_path.iterdir()) == []


@on_posix
def test_a_file_on_disk_is_allocated_when_it_grows_and_a_memfd_is_not() -> None:
    for allow_memfd, blocks in ((True, 0), (False, (1 << 20) // 512)):
        file = SharedFile.create(allow_memfd=allow_memfd)
        file.grow(1 << 20)
        assert (os.fstat(file.fd).st_blocks >= blocks) is True
        assert (os.fstat(file.fd).st_blocks > 0) is not allow_memfd
        file.close()


def test_round_up_gives_the_next_multiple() -> None:
    assert [round_up(size, 64) for size in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def refuse(number: int) -> Callable[..., NoReturn]:
    def call(*arguments: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


@on_posix
def test_a_file_system_that_cannot_allocate_gets_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    file = SharedFile.create(allow_memfd=False)
    assert [file.grow(3 << 20), file.grow(1)] == [0, 3 << 20]
    assert os.fstat(file.fd).st_blocks * 512 >= (3 << 20) + GRAIN
    monkeypatch.delattr(os, "posix_fallocate")  # macOS
    file.grow(100)
    assert os.fstat(file.fd).st_size == (3 << 20) + 2 * GRAIN
    file.close()


@on_posix
@pytest.mark.parametrize("has_fallocate", [True, False])
def test_a_full_disk_is_an_error_that_says_what_to_do_and_the_file_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, has_fallocate: bool
) -> None:
    file = SharedFile.create(allow_memfd=False)
    file.grow(10)
    if has_fallocate:
        monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    else:
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr(os, "pwrite", lambda fd, content, offset: len(content) // 2)
    with pytest.raises(OSError, match=r"No space left .* Try: TMPDIR=") as caught:
        file.grow(10)
    assert caught.value.errno == errno.ENOSPC
    assert (file.num_bytes, os.fstat(file.fd).st_size) == (GRAIN, GRAIN)
    monkeypatch.setattr(os, "write", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="Try: TMPDIR="):
        file.append(b"content")
    file.close()


@on_posix
def test_without_a_descriptor_no_file_is_tried_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EMFILE))
    with pytest.raises(OSError, match=r"Too many open files\. Try: ulimit -n"):
        SharedFile.create()
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))  # control: a file is used
    file = SharedFile.create()
    assert "no memfd (" in file.note
    file.close()


def test_without_a_memfd_and_a_folder_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", refuse(errno.ENOENT))
    with pytest.raises(
        FileNotFoundError,
        match=r"no memfd_create and no writable temporary folder .*\. Try: TMPDIR=",
    ):
        SharedFile.create(allow_memfd=False)


@on_posix
def test_who_maps_a_piece_twice_pays_one_descriptor() -> None:
    file = SharedFile.create()
    offset = file.grow(100)
    one = file.map(offset, 100)
    before = len(os.listdir("/proc/self/fd"))
    assert file.map(offset, 100) is one
    assert len(os.listdir("/proc/self/fd")) == before
    private = file.map(offset, 100, private=True)
    assert private is not one
    assert len(os.listdir("/proc/self/fd")) == before + 1  # control: a mapping costs one
    file.close()
