"""Modified files raise Penstock's errors, which name the file, or are ignored."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import penstock
from penstock.conv import tuning
from penstock.conv.probing.probe import ProbeResult
from penstock.engine.loading import bad_sample_file
from penstock.errors import BadStore, BadTrace, Damaged, PenstockError
from penstock.machine import cache_folder

quick = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DEEP = b"[" * 200_000
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    "",
    "x" * 50,
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
]


# -- modifications of a file -----------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def spoiled(content: bytes, place: float, junk: bytes) -> bytes:
    start = int(place * len(content))
    return content[:start] + junk + content[start + len(junk) :]


def cut(content: bytes, place: float) -> bytes:
    return content[: int(place * len(content))]


def with_value(content: bytes, steps: list[int], value: Any) -> bytes:
    """Replace a value inside a JSON file. Other files are returned unchanged."""
    try:
        tree = json.loads(content)
    except ValueError:
        return content
    node, parents = tree, []
    for step in steps:
        if not isinstance(node, (dict, list)) or not node:
            break
        keys: Any = sorted(node) if isinstance(node, dict) else range(len(node))
        key = keys[step % len(keys)]
        parents.append((node, key))
        node = node[key]
    if not parents:
        return json.dumps(value).encode()
    parent, key = parents[-1]
    parent[key] = value
    return json.dumps(tree).encode()


places = st.floats(0, 1, allow_nan=False, exclude_max=True)
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(lambda p, j: lambda c: spoiled(c, p, j), places, st.binary(min_size=1, max_size=12)),
    st.builds(lambda p: lambda c: cut(c, p), places),
    st.builds(
        lambda s, v: lambda c: with_value(c, s, v),
        st.lists(st.integers(0, 20), max_size=6),
        st.sampled_from(VALUES),
    ),
    st.sampled_from([b"", DEEP, b'{"a":' * 50_000, b"\xff\xfe", b"1" * 10_000, b"null"]).map(
        lambda junk: lambda content: junk
    ),
)


def deep(content: bytes) -> bytes:
    return DEEP


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / "copy"))


@contextmanager
def only(*kinds: type[Exception], naming: Path) -> Iterator[None]:
    """Allow only these errors, and only if they name the file or folder."""
    said = None
    try:
        yield
    except kinds as error:
        said = str(error)
    assert said is None or str(naming) in said


# -- packed sets -----------------------------------------------------------------------------------


class Source:
    """A source whose class, and therefore its fingerprint, is the same in the interrupted run."""

    num_calls_left = 1000

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_calls_left -= 1
        if not self.num_calls_left:
            raise KeyboardInterrupt
        return {
            "text": "word " * index,
            "array": np.arange(index + 1.0),
            "image": np.full((2, 2), index, np.uint8),
            "label": index,
        }


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("packed") / "set"
    penstock.pack(Source(), folder, workers=0)
    return folder


def read_all(folder: Path, verify: str) -> None:
    """Open a set and read every sample. Only Penstock's own errors are allowed."""
    with only(BadStore, Damaged, naming=folder):
        packed = penstock.Packed(folder, verify=verify)
        for index in range(len(packed)):
            packed[index]


@quick
@given(data=st.data(), change=changes, verify=st.sampled_from(["lazy", "full", "off"]))
def test_a_packed_set_with_a_changed_file_is_named(
    packed_folder: Path, data: st.DataObject, change: Change, verify: str
) -> None:
    names = sorted(path.name for path in packed_folder.iterdir())
    name = data.draw(st.sampled_from([*names, "manifest.json"]))
    with copied(packed_folder) as folder:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
        read_all(folder, verify)


def test_text_that_is_no_utf_8_is_named_with_folder_and_field(packed_folder: Path) -> None:
    with copied(packed_folder) as folder:
        path = folder / "text-00000.data.npy"
        content = path.read_bytes()
        path.write_bytes(content.replace(b"word", b"w\xffrd"))
        with pytest.raises(Damaged, match="field 'text' of sample 1 is not UTF-8") as info:
            penstock.Packed(folder, verify="off")[1]
        assert info.value.field == "text"  # type: ignore[attr-defined]
        assert str(info.value.path) == str(folder.resolve())  # type: ignore[attr-defined]
        assert penstock.Packed(folder, verify="off")[0]["text"] == ""  # the others are unchanged


# -- resumed packing -------------------------------------------------------------------------------


@quick
@given(change=changes, name=st.sampled_from(["packing.json", "shard-00000.json"]))
@example(change=deep, name="shard-00000.json")
def test_a_changed_journal_is_named_or_packed_again(change: Change, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "set"
        source = Source()
        source.num_calls_left = 14  # ten samples are for the first inspection
        with pytest.raises(KeyboardInterrupt):
            penstock.pack(source, folder, workers=0, shard_bytes=1)
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
        with only(PenstockError, naming=folder):
            penstock.pack(Source(), folder, workers=0, shard_bytes=1)
            read_all(folder, "full")


# -- caches ----------------------------------------------------------------------------------------


@quick
@given(data=st.data(), change=changes)
def test_a_cache_with_a_changed_file_is_named_or_computed_again(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, change: Change
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        cache = penstock.cached(Source(), folder)
        for index in range(6):
            cache[index]
        del cache
        names = sorted(path.name for path in folder.iterdir() if path.stat().st_size)
        path = folder / data.draw(st.sampled_from(names))
        path.write_bytes(change(path.read_bytes()))
        with only(PenstockError, naming=folder):
            again = penstock.cached(Source(), folder)
            for index in range(6):
                assert set(again[index]) == {"text", "array", "image", "label"}


@quick
@given(change=changes, content=st.sampled_from([b"{}", b'{"a": "columns", "b": "winograd"}']))
@example(change=deep, content=b"{}")
def test_a_changed_cache_of_convolutions_is_no_cache(change: Change, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache_folder.VARIABLE, place)
        patch.setattr(tuning, "_files", {})
        (Path(place) / "choices.json").write_bytes(change(content))
        choices = tuning._choices("choices.json")
        assert all(type(value) is str for value in choices.values())
        patch.setattr(tuning, "_dirty", {"choices.json"})
        tuning.save()
        assert isinstance(json.loads((Path(place) / "choices.json").read_bytes()), dict)


def test_a_whole_cache_of_convolutions_is_read() -> None:
    """Negative control: an unmodified cache is used."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache_folder.VARIABLE, place)
        patch.setattr(tuning, "_files", {})
        (Path(place) / "choices.json").write_text('{"a": "columns"}')
        assert tuning._choices("choices.json") == {"a": "columns"}


# -- traces and bad-sample files -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("trace") / "run.json"
    loader = penstock.DataLoader(range(8), batch_size=2, trace=path)
    assert len(list(loader)) == 4
    loader.close()
    return path


@quick
@given(change=changes)
@example(change=deep)
def test_a_changed_trace_is_named_or_shown(trace: Path, change: Change) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run.json"
        path.write_bytes(change(trace.read_bytes()))
        with only(BadTrace, naming=path):
            timeline = penstock.Timeline.load(path)
            str(timeline)
            str(timeline.verdict)


LINE = b'{"index": 3, "error": "ValueError: x", "path": "a.jpg", "count": 2, "epoch": 0}\n'


@quick
@given(change=changes)
@example(change=deep)
def test_a_changed_list_of_bad_samples_counts_the_lines_it_cannot_read(change: Change) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "bad.jsonl"
        path.write_bytes(change(LINE) + b"\n" + LINE.replace(b"3", b"4"))
        found = bad_sample_file.read(path)
        assert [one.path for one in found.samples if one.index == 4] == ["a.jpg"]
        assert len(found.samples) + found.num_unreadable >= 1


def test_a_kept_probe_of_another_form_is_refused_by_its_reader() -> None:
    for kept in (*VALUES, {"verdicts": 1}, {"verdicts": [{"step": 5}], "trials": []}):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            ProbeResult.from_dict(kept)
