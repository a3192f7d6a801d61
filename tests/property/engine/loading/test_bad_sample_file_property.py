"""Any content of a bad-sample file can be read, and appended records are found."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.doctor.bad_sample_report import examine_bad_samples
from penstock.engine.loading.bad_sample_file import append, read
from penstock.errors import BadTarget

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(["path", "error", "count", "epoch", "position", "time", "end", "other"]), VALUES
)
INDICES = st.integers() | st.text(st.characters())  # includes lone surrogates


@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n", b'{"index": 1}\n', b'{"index"'])))
def test_any_bytes_are_read_or_refused(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bad.jsonl")
        file.write_bytes(b"".join(pieces))
        found = read(file)
        assert 0 <= found.num_unreadable <= found.num_lines
        assert bool(found.samples) == (found.num_unreadable < found.num_lines)
        try:
            examine_bad_samples(str(file))
        except BadTarget:
            assert not found.samples


@settings(max_examples=20)  # arbitrary text is slow to draw
@given(st.lists(st.tuples(INDICES, FIELDS), max_size=4), st.binary(max_size=8))
def test_what_is_appended_is_found_whatever_lay_there(
    records: list[tuple[Any, dict[str, Any]]], rubbish: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bad.jsonl")
        file.write_bytes(rubbish)
        for index, fields in records:
            append(file, {**fields, "index": index})
        found = read(file)
        indices = {sample.index for sample in found.samples}
        assert indices >= {index for index, _ in records}
        assert sum(sample.count for sample in found.samples) >= len(records)
        if found.samples:
            report = examine_bad_samples(str(file))
            assert all(line.isprintable() for line in [*report.move, *report.leave_out])
