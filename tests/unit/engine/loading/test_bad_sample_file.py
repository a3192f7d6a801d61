"""Appended records of a bad-sample file are read back, and an invalid line affects only itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.loading.bad_sample_file import BadSample, append, read

pytestmark = pytest.mark.legacy

RECORD: dict[str, Any] = {
    "index": 17,
    "path": "/data/a.jpg",
    "error": "OSError: image file is truncated",
    "count": 2,
    "epoch": 0,
    "position": 341,
    "time": "2026-11-15T08:00:00+00:00",
    "end": "skip",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bad.jsonl"


def test_what_is_appended_is_one_line_of_json_and_is_read_back(file: Path) -> None:
    append(file, RECORD)
    assert json.loads(file.read_text()) == RECORD
    assert file.read_bytes().count(b"\n") == 1
    found = read(file)
    assert found.samples == [BadSample(**RECORD)]
    assert (found.num_lines, found.num_unreadable, found.indices) == (1, 0, [17])


def test_the_last_line_of_a_sample_speaks_and_has_its_count(file: Path) -> None:
    append(file, {**RECORD, "count": 1})
    append(file, {"index": 3, "error": "KeyError: 'x'"})
    append(file, {**RECORD, "path": None, "error": "", "count": 5, "epoch": 2, "end": "poison"})
    first, second = read(file).samples
    assert (first.index, first.count, first.epoch, first.end) == (17, 5, 2, "poison")
    assert (first.path, first.error) == ("/data/a.jpg", RECORD["error"])  # from the older line
    assert (second.index, second.count, second.path) == (3, 1, None)


def test_runs_that_share_a_file_are_added_up(file: Path) -> None:
    for _ in range(2):
        for number in (1, 2, 3):
            append(file, {**RECORD, "count": number})
    assert read(file).samples[0].count == 6


def test_the_time_is_now_unless_it_is_given(file: Path) -> None:
    append(file, {"index": 1})
    assert str(read(file).samples[0].time).endswith("+00:00")


@pytest.mark.parametrize(
    ("index", "stored"),
    [(np.int64(7), 7), ("key", "key"), ((1, 2), "(1, 2)"), (None, "None"), (True, 1), (-1, -1)],
)
def test_an_index_of_any_kind_can_be_stored(file: Path, index: Any, stored: Any) -> None:
    append(file, {"index": index})
    assert [sample.index for sample in read(file).samples] == [stored]


@pytest.mark.parametrize("text", ["Käse\n.jpg", "\udcff\udc80.jpg", "\x00\x1b[2J", '"\\', "\u2028"])
def test_texts_of_any_kind_come_back_from_one_line(file: Path, text: str) -> None:
    append(file, {"index": text, "path": text, "error": text})
    (sample,) = read(file).samples
    assert sample.index == sample.path == sample.error == text
    assert len(file.read_bytes().splitlines()) == 1


def test_a_long_text_is_cut_and_values_of_any_type_are_shown(file: Path) -> None:
    append(file, {"index": 1, "error": "x" * 10**6, "extra": object()})
    assert len(read(file).samples[0].error) == 2000


def test_a_line_that_was_torn_by_a_death_costs_that_line_only(file: Path) -> None:
    append(file, RECORD)
    with open(file, "a") as torn:
        torn.write('{"index": 9, "err')
    assert (len(read(file).samples), read(file).num_unreadable) == (1, 1)
    append(file, {"index": 3})
    found = read(file)
    assert (found.indices, found.num_lines, found.num_unreadable) == ([17, 3], 3, 1)


RUBBISH = [
    *(
        b"not json",
        b"[1, 2]",
        b"17",
        b"null",
        b'"index"',
        b"{}",
        b'{"index": null}',
        b"{'index': 1}",
    ),
    *(b'{"index": true}', b'{"index": 1.5}', b'{"index": [1]}', b'{"index": {}}', b'{"index": 1'),
    *(b"\xff\xfe\x00\x01", b"\x00" * 50, b"[" * 60_000, b'{"index": ' + b"9" * 5000 + b"}"),
    b'{"index": 1, "error": "' + b"x" * 200_000 + b'"}',
]


@pytest.mark.parametrize("line", RUBBISH, ids=lambda line: repr(line[:16]))
def test_a_line_of_rubbish_is_counted_and_the_others_are_read(file: Path, line: bytes) -> None:
    good = json.dumps(RECORD).encode()
    file.write_bytes(b"\n".join([good, line, b"", b"  ", b'{"index": 4}', line]))
    found = read(file)
    assert (found.indices, found.num_lines, found.num_unreadable) == ([17, 4], 4, 2)


@pytest.mark.parametrize("value", [None, 1.5, True, [], {}, -3, "text"])
def test_fields_of_other_types_are_as_if_they_were_not_there(file: Path, value: Any) -> None:
    names = ("path", "error", "count", "epoch", "position", "time", "end")
    file.write_text(json.dumps({"index": 5, **dict.fromkeys(names, value)}))
    (sample,) = read(file).samples
    assert (sample.index, sample.count) == (5, 1)
    assert sample.path in (None, value)
    assert isinstance(sample.error, str)


def test_an_empty_file_holds_nothing_and_a_mark_at_the_beginning_is_no_harm(file: Path) -> None:
    file.write_bytes(b"")
    assert read(file).samples == []
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECORD).encode() + b"\r\n")
    assert read(file).indices == [17]


def test_a_file_that_cannot_be_opened_is_an_error_of_the_system_s(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "missing" / "bad.jsonl", RECORD)
    with pytest.raises(KeyError):
        append(tmp_path / "bad.jsonl", {"error": "whose?"})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_not_a_line_that_seems_written() -> None:
    with pytest.raises(OSError, match="No space left"):
        append("/dev/full", RECORD)
