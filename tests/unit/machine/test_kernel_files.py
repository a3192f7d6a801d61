"""Small kernel files, and files with invalid contents."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.machine.kernel_files import parse_count, read_fields, read_text

pytestmark = pytest.mark.legacy


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"Disk \xff\x00\n")
    assert read_text(tmp_path / "model") == "Disk \ufffd"
    assert read_text(tmp_path / "missing") == ""
    assert read_text(tmp_path) == ""
    assert read_text(Path("a\x00b")) == ""


def test_fields_are_read_by_name_and_other_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("State:\tS (sleeping)\noom_kill 3\nNSpid: 71 1\n\nalone\n")
    fields = {"State": "S (sleeping)", "oom_kill": "3", "NSpid": "71 1"}
    assert read_fields(tmp_path / "status") == fields
    assert read_fields(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        (" 42\n", 42),
        (str(2**64 - 1), 2**64 - 1),
        ("9" * 21, None),
        ("-1", None),
        ("max", None),
        ("", None),
        ("4.5", None),
        ("\u0664", None),  # a digit, but not one that a kernel writes
    ],
)
def test_a_count_is_digits_and_nothing_else(text: str, count: int | None) -> None:
    assert parse_count(text) == count
