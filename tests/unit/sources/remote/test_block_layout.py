"""The blocks of a set, and the URLs of sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadArgument, BadStore, MissingExtra
from penstock.sources.checksums import BLOCK_BYTES as UNIT_BYTES
from penstock.sources.manifest import FieldSchema, FileEntry, Manifest, ShardEntry
from penstock.sources.remote import address
from penstock.sources.remote.block_layout import BLOCK_BYTES, BlockLayout, blocks_between
from penstock.sources.remote.cached_set import make_cache_options

pytestmark = [pytest.mark.legacy]
SIZES = [BLOCK_BYTES + 5, 100, 2 * BLOCK_BYTES]


def make_layout(sizes: list[int]) -> BlockLayout:
    schema = FieldSchema(name="x", kind="array", dtype="<u1", shape=(1,))
    shards = [
        ShardEntry(rows=1, files={"x": (FileEntry(name=f"x-{at:05d}.npy", bytes=size, check=0),)})
        for at, size in enumerate(sizes)
    ]
    manifest = Manifest(num_samples=len(sizes), form="dict", fields=(schema,), shards=tuple(shards))
    return BlockLayout(manifest, "s3://bucket/set")


def test_every_byte_lies_in_exactly_one_block() -> None:
    layout = make_layout(SIZES)
    found: dict[int, list[tuple[int, int]]] = {}
    for block in range(layout.num_blocks):
        place = layout.range_of(block)
        found.setdefault(place.file, []).append((place.start, place.end))
        assert place.end - place.start == layout.block_bytes[block]
    for file, size in enumerate(SIZES):
        edges = [0, *(end for _, end in found[file])]
        assert [start for start, _ in found[file]] == edges[:-1]
        assert edges[-1] == size
    assert int(layout.block_bytes.sum()) == layout.num_bytes == sum(SIZES)


def test_the_checksum_units_of_a_block_are_its_own() -> None:
    layout = make_layout(SIZES)
    units = [range(*layout.units_of(block)) for block in range(layout.num_blocks)]
    assert [unit for some in units for unit in some] == list(range(layout.num_units))
    assert len(units[0]) == BLOCK_BYTES // UNIT_BYTES
    assert len(units[1]) == 1


def test_a_row_that_begins_in_a_block_ends_in_it() -> None:
    row_bytes, num_rows = 12_300, 1000
    schema = FieldSchema(name="x", kind="array", dtype="<u1", shape=(row_bytes,))
    entry = FileEntry(name="x-00000.npy", bytes=4096 + num_rows * row_bytes, check=0)
    shard = ShardEntry(rows=num_rows, files={"x": (entry,)})
    layout = BlockLayout(
        Manifest(num_samples=num_rows, form="dict", fields=(schema,), shards=(shard,)), "s3://b/s"
    )
    assert layout.tail_bytes.tolist() == [row_bytes, row_bytes, 0]
    starts = 4096 + np.arange(num_rows) * row_bytes
    blocks, owners = blocks_between(starts, starts + row_bytes, row_bytes)
    assert owners.tolist() == list(range(num_rows))  # one block each
    ends = blocks * BLOCK_BYTES + layout.block_bytes[blocks]
    assert (starts >= blocks * BLOCK_BYTES).all()
    assert (starts + row_bytes <= ends).all()
    assert len(blocks_between(starts, starts + row_bytes)[0]) == num_rows + 2  # without tails
    assert not make_layout(SIZES).tail_bytes.any()  # rows of one byte lie across no edge


def test_a_message_names_the_object_and_the_range() -> None:
    text = make_layout(SIZES).describe(1)
    assert text == f"s3://bucket/set/x-00000.npy, bytes {BLOCK_BYTES} to {BLOCK_BYTES + 5}"


def test_ranges_that_touch_a_boundary_need_both_blocks() -> None:
    starts = np.array([0, BLOCK_BYTES - 1, BLOCK_BYTES, 7])
    ends = np.array([BLOCK_BYTES, BLOCK_BYTES + 1, BLOCK_BYTES + 1, 7])
    blocks, owners = blocks_between(starts, ends)
    assert list(zip(owners.tolist(), blocks.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 1),
    ]


def test_a_file_whose_size_does_not_fit_its_rows_is_refused() -> None:
    layout = make_layout([4096 + 10])
    assert layout.check_rows(layout.entries[0], 5, 2) == 2
    for row_bytes, num_rows in ((5, 3), (4, None)):
        with pytest.raises(BadStore, match="x-00000"):
            layout.check_rows(layout.entries[0], row_bytes, num_rows)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/set",
        "s3:///set",
        "https://user:secret-word@host/set",
        "https://host/set?X-Amz-Signature=secret-word",
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(BadArgument) as caught:
        address.check_url(url)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize("scheme", address.SCHEMES)
def test_urls_of_all_schemes_are_accepted(scheme: str) -> None:
    assert address.check_url(f"{scheme}://place/a/set/") == f"{scheme}://place/a/set"


def test_the_case_of_a_scheme_does_not_matter() -> None:
    assert address.check_url("S3://Bucket/A-Set/") == "s3://Bucket/A-Set"
    assert address.check_url("HTTPS://host:80/x") == "https://host:80/x"


def test_an_address_with_one_slash_is_refused_with_the_address_to_use(tmp_path: Path) -> None:
    from penstock import Packed, open_dataset, pack
    from penstock.sources.remote.set_copy import copy_set

    meant = str(Path("S3://bucket/set"))
    for use in (Packed, open_dataset, lambda path: pack([1], path), lambda at: copy_set(at, at)):
        with pytest.raises(BadArgument, match="'s3://bucket/set'"):
            use(meant)
    with pytest.raises(BadArgument, match="'file:///data/set'"):
        address.refuse_single_slash("file:/data/set")
    for other in (str(tmp_path), "C:/data/set", "s3", "bucket:8000/set"):
        address.refuse_single_slash(other)
    assert not Path("S3:").exists()


def test_the_values_of_secret_variables_are_removed_from_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh12345")
    monkeypatch.setenv("AWS_REGION", "eu-somewhere-1")
    text = address.without_secrets("key abcdefgh12345 in\neu-somewhere-1")
    assert text == "key *** in eu-somewhere-1"


def test_without_obstore_the_error_is_the_line_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match='pip install "obstore>='):
        address.require_obstore("s3://bucket/set")


@pytest.mark.parametrize(
    "url", ["http://me:pass-word@[::1/x", "http://me:pass-word/x", "http://host/a\nb"]
)
def test_an_address_that_cannot_be_parsed_is_refused(url: str) -> None:
    with pytest.raises(BadArgument, match="is not a valid URL") as caught:
        address.check_url(url)
    assert "pass-word" not in str(caught.value)


def test_a_cache_size_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="cache_bytes"):
        make_cache_options(cache_folder=tmp_path, cache_bytes="1GB")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"needs at least 16777216 bytes \(16\.8 MB\)"):
        make_cache_options(cache_folder=tmp_path, cache_bytes=16777215)
    make_cache_options(cache_folder=tmp_path, cache_bytes=16777216)  # control
    assert make_cache_options(cache_folder=tmp_path, cache_bytes=1 << 30).max_bytes == 1 << 30
