"""One shared file, mapped piece by piece: a memfd, or a temporary file that nobody can see."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.memory import GRAIN, SharedFile, round_up

pytestmark = pytest.mark.legacy


@pytest.fixture(params=[True, False], ids=["memfd", "file"])
def file(request: pytest.FixtureRequest) -> Iterator[SharedFile]:
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
    handle = replace(file.handle(), fd=os.dup(file.fd))  # as a worker gets it: a number of its own
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
    other = os.open("/dev/null", os.O_RDONLY)  # takes the number that was freed
    file.close()
    os.fstat(other)  # raises if the second close hit a stranger
    os.close(other)


def test_a_file_on_disk_has_no_name_that_could_be_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = SharedFile.create(allow_memfd=False)
    file.grow(10)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in os.readlink(f"/proc/self/fd/{file.fd}")  # control: it is there
    file.close()


def test_a_file_on_disk_is_allocated_when_it_grows_and_a_memfd_is_not() -> None:
    for allow_memfd, blocks in ((True, 0), (False, (1 << 20) // 512)):
        file = SharedFile.create(allow_memfd=allow_memfd)
        file.grow(1 << 20)
        assert (os.fstat(file.fd).st_blocks >= blocks) is True
        assert (os.fstat(file.fd).st_blocks > 0) is not allow_memfd
        file.close()


def test_round_up_gives_the_next_multiple() -> None:
    assert [round_up(size, 64) for size in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
