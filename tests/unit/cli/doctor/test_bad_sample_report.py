"""The report on a bad-sample file. Its suggested lines work when pasted."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.doctor.bad_sample_report import (
    BadSampleReport,
    examine_bad_samples,
    print_bad_samples,
)
from penstock.engine.loading.bad_sample_file import append
from penstock.errors import BadTarget
from support import command_line
from support.paths import DOCS

pytestmark = pytest.mark.legacy

DOCUMENT = DOCS / "doctor.md"
ODD_NAMES = [
    *("plain.jpg", "two words.jpg", "it's.jpg", 'a"b.jpg', "$HOME `ls`;rm -rf *.jpg", "-n", "--"),
    *("line\nbreak.jpg", "tab\t.jpg", "\x1b[2Jx.jpg", "back\\slash'.jpg", "Käse 漢.jpg", "!x", "~"),
    *("\udcff\udcfe.jpg", "\u202egpj.exe", "\\012\n.jpg"),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*records: dict[str, Any]) -> str:
    for record in records:
        append("bad.jsonl", record)
    return "bad.jsonl"


def write_files(*paths: str) -> str:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(path, errors="surrogateescape")
    return write(*({"index": n, "path": path, "error": "E: x"} for n, path in enumerate(paths)))


def printed(report: BadSampleReport, **options: Any) -> str:
    out = io.StringIO()
    print_bad_samples(Console(file=out, width=80, highlight=False, **options), report)
    return out.getvalue()


def test_samples_are_counted_grouped_and_the_worst_comes_first() -> None:
    report = examine_bad_samples(
        write(
            {"index": 4, "error": "KeyError: 'x'", "count": 1},
            {"index": 17, "error": "OSError: image file is truncated", "count": 9},
            {"index": 8, "error": "OSError: image file is truncated"},
            {"index": 9, "error": "OSError: cannot identify image file"},
            {"index": 10},
            {"index": 11, "error": "a text without a type"},
        )
    )
    assert [sample.index for sample in report.samples] == [17, 4, 8, 9, 10, 11]
    kinds = [(kind.error, kind.num_samples, kind.num_times) for kind in report.kinds]
    assert kinds[0] == ("OSError", 3, 11)
    assert sorted(kinds[1:]) == [
        *(("KeyError", 1, 1), ("a text without a type", 1, 1), ("unknown", 1, 1)),
    ]
    assert report.kinds[0].example == "image file is truncated"


def test_in_a_pipe_no_line_is_broken_and_there_is_no_colour() -> None:
    path = "/data/" + "long/" * 18 + "a.jpg"
    report = examine_bad_samples(
        write({"index": 17, "path": path, "error": "OSError: " + "x " * 40})
    )
    text = printed(report)
    assert path in text
    assert "\x1b[" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("  17 ")]
    assert "x x x" in row
    assert row.endswith(path)


def test_a_person_gets_a_table_that_fits_the_window() -> None:
    report = examine_bad_samples(
        write({"index": 17, "path": "a/" * 60, "error": "OSError: " + "x " * 40})
    )
    text = printed(report, force_terminal=True, color_system="standard")
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    table = plain.partition("Worst samples")[2].partition("To exclude")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_texts_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[2J\u202e"
    report = examine_bad_samples(write({"index": evil, "path": evil, "error": evil, "end": evil}))
    for text in (printed(report), printed(report, force_terminal=True, color_system=None)):
        assert not re.search("[\x1b\x07\u202e]", text)


def test_many_are_shortened_and_json_has_all() -> None:
    records = [{"index": n, "error": f"Error{n % 30}: x"} for n in range(300)]
    text = printed(examine_bad_samples(write(*records)))
    assert "and 290 more samples" in text
    assert "and 20 more kinds" in text
    assert len(text.splitlines()) < 45
    done = command_line.invoke("doctor", "bad.jsonl", "--json")
    assert done.exit_code == 1
    facts = json.loads(done.output)["bad_samples"]
    assert (facts["num_samples"], len(facts["samples"]), len(facts["kinds"])) == (300, 300, 30)


@pytest.mark.parametrize("num_bad", [3, 40])
def test_the_pasted_python_leaves_exactly_the_bad_ones_out(num_bad: int) -> None:
    report = examine_bad_samples(write(*({"index": 2 * n} for n in range(num_bad))))
    names: dict[str, Any] = {"dataset": list(range(100))}
    exec("\n".join(report.leave_out), names)
    assert [*names["dataset"]] == [n for n in range(100) if n % 2 or n >= 2 * num_bad]
    assert all(len(line) < 100 for line in report.leave_out)
    assert not any("penstock." in line for line in report.leave_out)  # public names only


def test_the_pasted_lines_move_files_of_any_name_and_no_other() -> None:
    paths = [os.path.join("in here", name) for name in ODD_NAMES]
    report = examine_bad_samples(write_files(*paths, "-leading.jpg"))
    Path("in here", "good.jpg").touch()
    assert all(line.isprintable() for line in report.move)
    exec("\n".join(report.move), {})
    assert sorted(os.listdir("bad-samples")) == sorted([*ODD_NAMES, "-leading.jpg"])
    assert os.listdir("in here") == ["good.jpg"]
    for name in ODD_NAMES:
        text = Path("bad-samples", name).read_text(errors="surrogateescape")
        assert text == os.path.join("in here", name)


def test_nothing_is_overwritten_when_files_are_moved() -> None:
    paths = ["cat/1.jpg", "dog/1.jpg", "dog/2.jpg"]
    report = examine_bad_samples(write_files(*paths))
    Path("bad-samples").mkdir()
    Path("bad-samples", "2.jpg").write_text("moved away earlier")
    exec("\n".join(report.move), {})
    left = {path.as_posix(): path.read_text() for path in Path().rglob("*.jpg")}
    assert left == {
        "bad-samples/1.jpg": "cat/1.jpg",
        "dog/1.jpg": "dog/1.jpg",
        "bad-samples/2.jpg": "moved away earlier",
        "dog/2.jpg": "dog/2.jpg",
    }


def test_only_files_that_are_here_and_hold_one_bad_sample_are_moved() -> None:
    write_files("one.jpg")
    Path("link.jpg").symlink_to("nowhere.jpg")
    Path("folder.jpg").mkdir()
    Path("all.h5").touch()
    write(
        *({"index": 10 + n, "path": "all.h5"} for n in range(3)),
        *({"index": path, "path": path} for path in ("s3://box/2.jpg", "gone.jpg", "folder.jpg")),
        *({"index": path, "path": path} for path in ("link.jpg", "a\0b", "")),
    )
    report = examine_bad_samples("bad.jsonl")
    exec("\n".join(report.move), {})
    assert sorted(os.listdir("bad-samples")) == ["link.jpg", "one.jpg"]
    assert (report.num_elsewhere, report.num_shared) == (4, 1)
    text = printed(report)
    assert "4 files not found on this machine" in text
    assert "1 file left in place (several samples per file)" in text


def test_without_paths_or_numbers_nothing_is_proposed() -> None:
    report = examine_bad_samples(write({"index": "a key", "error": "KeyError: 'a key'"}))
    assert (report.leave_out, report.move) == ([], [])
    assert "To exclude" not in printed(report)


def test_an_empty_file_is_healthy_and_one_with_bad_samples_is_not() -> None:
    Path("bad.jsonl").touch()
    done = command_line.invoke("doctor", "bad.jsonl")
    assert (done.exit_code, done.output) == (0, "Bad samples in bad.jsonl: none\n")
    write({"index": 1})
    with open("bad.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n{"index"')
    done = command_line.invoke("doctor", "bad.jsonl")
    assert done.exit_code == 1
    assert done.output.startswith(
        "Bad samples in bad.jsonl: 1, which failed once\n  2 lines could not be read\n"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("folder", "is not a file"),
        (b"\x00\xff" * 9000, "is not a list of bad samples: 1 line"),
        (b"print('a script')\n\n[1]\n", "is not a list of bad samples: 2 lines"),
    ],
)
def test_what_is_no_such_file_is_a_usage_error(content: Any, words: str) -> None:
    path = Path("samples.jsonl")
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BadTarget, match=words) as caught:
        examine_bad_samples("samples.jsonl")
    assert "[D01]" in str(caught.value)
    assert "the file that DataLoader(..., on_error='skip', bad_samples_file=" in str(caught.value)


def test_the_report_in_the_document_is_the_one_that_is_printed() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Bad samples")[2]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    code = next(text for kind, text in blocks if kind == "python")
    shown = next(text for kind, text in blocks if kind == "text" and "Bad samples in" in text)
    exec(code.partition("report =")[0], {})
    assert printed(examine_bad_samples("bad.jsonl")) == shown
