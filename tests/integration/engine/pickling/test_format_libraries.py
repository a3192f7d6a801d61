"""Handles of pyarrow, fsspec, Lance, obstore and torchcodec are reopened in workers, or rejected.

The libraries are installed in the formats leg. A test of a missing one is skipped by name.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import DataLoader
from penstock.engine.parent.launcher import _warn_of_inherited
from penstock.engine.pickling.process_bound import find_inherited
from penstock.errors import BadArgument, CannotTravel
from support.pickling import Holder, arrived, refusal

pytestmark = pytest.mark.formats

REOPENED = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
ROWS = 40


@pytest.fixture(scope="module", autouse=True)
def started_libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the event loops of the libraries, which keep their descriptors until exit."""
    folder = str(tmp_path_factory.mktemp("libraries"))
    with suppress(ImportError):
        import fsspec.asyn

        fsspec.asyn.get_loop()
    with suppress(ImportError):
        import obstore.store

        obstore.store.LocalStore(folder).put("x", b"x")
    with suppress(ImportError):
        import lance
        import pyarrow

        lance.write_dataset(pyarrow.table({"x": [1]}), f"{folder}/x.lance").take([0])


class Reads:
    """Reads each sample from an open handle with ``read(handle, index)``."""

    def __init__(self, handle: Any, read: Any) -> None:
        self.handle = handle
        self.read = read

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return int(self.read(self.handle, index))


def loaded(handle: Any, read: Any, method: str) -> list[int]:
    loader = DataLoader(
        Reads(handle, read), batch_size=5, num_workers=2, multiprocessing_context=method
    )
    return [int(value) for batch in loader for value in batch]


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A file of 8-byte numbers."""
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"".join(index.to_bytes(8, "little") for index in range(ROWS)))
    return path


@pytest.fixture
def table() -> Any:
    return pytest.importorskip("pyarrow").table({"x": list(range(ROWS))})


def read_at(file: Any, index: int) -> int:
    file.seek(8 * index)
    return int.from_bytes(file.read(8), "little")


# -- pyarrow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REOPENED)
@pytest.mark.parametrize("opener", ["OSFile", "memory_map", "BufferReader"])
def test_pyarrow_files_are_read_by_workers(numbers: Path, opener: str, method: str) -> None:
    pa = pytest.importorskip("pyarrow")
    source: Any = numbers.read_bytes() if opener == "BufferReader" else str(numbers)
    with getattr(pa, opener)(source) as file:
        assert loaded(file, read_at, method) == list(range(ROWS))
        with pytest.raises(TypeError):  # control: pickle alone rejects it
            pickle.dumps(file)


def test_pyarrow_files_keep_their_position(numbers: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    for file in (pa.OSFile(str(numbers)), pa.memory_map(str(numbers)), pa.BufferReader(b"0123")):
        file.seek(3)
        again = arrived(file)
        assert (type(again), again.tell()) == (type(file), 3)
        assert again.read() == file.read()


def test_pyarrow_files_that_cannot_be_reopened_are_refused(numbers: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(numbers.with_name("new")), "wb") as writing:
        assert "opened for writing" in refusal(writing)
    assert "closed" in refusal(writing)
    file = pa.OSFile(str(numbers))
    numbers.write_bytes(numbers.read_bytes())
    assert arrived(file).size() == 8 * ROWS  # written to, but still the same file
    numbers.unlink()
    assert "deleted or replaced" in refusal(file)


def test_handles_that_forked_workers_cannot_use_are_named_with_the_reason(numbers: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    obstore = pytest.importorskip("obstore")
    path = str(numbers.with_name("x.parquet"))
    pq.write_table(pa.table({"x": [1]}), path)
    dataset = Holder(
        file=pa.OSFile(str(numbers)),
        mapped=pa.memory_map(str(numbers)),  # keeps its position in its process
        parquet=pq.ParquetFile(path),
        store=obstore.store.LocalStore(str(numbers.parent)),
    )
    with pytest.warns(UserWarning, match="forked workers") as caught:
        notes = _warn_of_inherited({"dataset": dataset})
    assert notes == tuple(str(one.message) for one in caught)
    file, parquet, store = notes
    assert "dataset.file (pyarrow.lib.OSFile) is shared by this process and all forked" in file
    for name, text in (("parquet", parquet), ("store", store)):
        assert text.startswith(f"dataset.{name} (")
        assert "reads with threads that forked workers do not have, so they can hang" in text


@pytest.mark.parametrize("method", REOPENED)
def test_a_parquet_file_opened_reopenable_is_read_by_workers(
    tmp_path: Path, table: Any, method: str
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=8)
    file = penstock.reopenable(pq.ParquetFile, path, memory_map=True)

    def read(file: Any, index: int) -> int:
        return int(file.read_row_group(index // 8, ["x"])["x"][index % 8].as_py())

    assert loaded(file, read, method) == list(range(ROWS))


def test_pyarrow_readers_without_a_path_are_refused_with_the_line_to_paste(
    tmp_path: Path, table: Any
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pds = pytest.importorskip("pyarrow.dataset")
    path = str(tmp_path / "x.parquet")
    pq.write_table(table, path)
    text = refusal(pq.ParquetFile(path))
    assert "a ParquetFile does not expose the path" in text
    assert "dataset.deep[0].handle = penstock.reopenable(pq.ParquetFile, path)" in text
    arrow = str(tmp_path / "x.arrow")
    with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert "penstock.reopenable(pyarrow.ipc.open_file, path)" in refusal(pa.ipc.open_file(arrow))
    assert "only one process can read" in refusal(table.to_reader())
    assert "only one process can read" in refusal(pds.dataset(path).scanner())
    again = arrived(penstock.reopenable(pa.ipc.open_file, arrow))
    assert again.read_all().equals(table)


@pytest.mark.parametrize("method", REOPENED)
def test_datasets_of_pyarrow_open_their_files_in_workers(
    tmp_path: Path, table: Any, method: str
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pds = pytest.importorskip("pyarrow.dataset")
    pq.write_table(table, tmp_path / "x.parquet")

    def read(dataset: Any, index: int) -> int:
        return int(dataset.take([index])["x"][0].as_py())

    assert loaded(pds.dataset(tmp_path / "x.parquet"), read, method) == list(range(ROWS))


# -- fsspec ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REOPENED)
def test_fsspec_files_and_file_systems_are_read_by_workers(numbers: Path, method: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open(str(numbers), "rb") as file:
        assert loaded(file, read_at, method) == list(range(ROWS))
    system = fsspec.filesystem("dir", path=str(numbers.parent), target_protocol="file")

    def read(system: Any, index: int) -> int:
        with system.open("numbers.bin") as file:
            return read_at(file, index)

    assert loaded(system, read, method) == list(range(ROWS))


def test_fsspec_files_keep_their_position(numbers: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open(str(numbers), "rb") as file:
        file.seek(80)
        with arrived(file) as again:
            assert again.tell() == file.tell() == 80
            assert read_at(again, 10) == 10
    lines = tmp_path / "lines.txt"
    lines.write_bytes("ä first\r\nsecond\r\nthird\r\n".encode())
    with fsspec.open(str(lines), "rt", encoding="utf-8", newline="") as text:
        text.readline()
        with arrived(text) as again:
            assert again.readline() == "second\r\n"
        with pickle.loads(pickle.dumps(text)) as other:  # control: continues after the buffer
            assert other.readline() != "second\r\n"


def test_a_buffered_remote_file_of_fsspec_keeps_its_position(numbers: Path) -> None:
    pytest.importorskip("fsspec")
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.spec import AbstractBufferedFile

    class Remote(AbstractBufferedFile):  # type: ignore[misc]
        """Fetches ranges, as the files of s3fs and gcsfs do."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            return Path(self.path).read_bytes()[start:end]

    class RemoteSystem(LocalFileSystem):  # type: ignore[misc]
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Remote(self, path, mode, cache_type="readahead")

    with RemoteSystem().open(str(numbers), "rb") as file:
        file.seek(16)
        again = arrived(file)
        assert int.from_bytes(again.read(8), "little") == 2
        assert loaded(file, read_at, "forkserver") == list(range(ROWS))


def test_fsspec_files_that_cannot_be_reopened_are_refused(numbers: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open(str(numbers.with_name("new")), "wb") as writing:
        assert "opened for writing" in refusal(writing)
    with fsspec.open(str(numbers), "rb") as file:
        numbers.rename(numbers.with_name("moved"))
        assert "deleted or replaced" in refusal(file)
    assert "closed" in refusal(file)
    memory = fsspec.filesystem("memory")
    text = refusal(memory)
    assert "a MemoryFileSystem exists only in the memory of this process" in text
    assert "fsspec.filesystem('file')" in text
    # Control: its own pickling creates an empty file system in another process.
    memory.pipe("/kept", b"x")
    check = f"import pickle; print(pickle.loads({pickle.dumps(memory)!r}).exists('/kept'))"
    assert run_python(check).stdout.strip() == "False"


# -- obstore and Lance -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", REOPENED)
def test_obstore_stores_are_read_by_workers(numbers: Path, method: str) -> None:
    obstore = pytest.importorskip("obstore")
    store = obstore.store.LocalStore(str(numbers.parent))

    def read(store: Any, index: int) -> int:
        found = store.get_range("numbers.bin", start=8 * index, length=8)
        return int.from_bytes(bytes(found), "little")

    assert loaded(store, read, method) == list(range(ROWS))


def test_obstore_objects_of_this_process_are_refused(numbers: Path) -> None:
    obstore = pytest.importorskip("obstore")
    text = refusal(obstore.store.MemoryStore())
    assert "a MemoryStore exists only in the memory of this process" in text
    assert "obstore.store.LocalStore(folder)" in text
    reader = obstore.open_reader(obstore.store.LocalStore(str(numbers.parent)), "numbers.bin")
    assert "cannot pickle" in refusal(reader)


@pytest.mark.parametrize("method", REOPENED)
def test_lance_datasets_are_read_by_workers(tmp_path: Path, table: Any, method: str) -> None:
    lance = pytest.importorskip("lance")
    dataset = lance.write_dataset(table, str(tmp_path / "x.lance"))

    def read(dataset: Any, index: int) -> int:
        return int(dataset.take([index])["x"][0].as_py())

    assert loaded(dataset, read, method) == list(range(ROWS))


def test_lance_readers_are_refused_with_the_line_to_paste(tmp_path: Path, table: Any) -> None:
    lance = pytest.importorskip("lance")
    from lance.file import LanceFileReader, LanceFileWriter

    path = str(tmp_path / "x.lance")
    with LanceFileWriter(path) as writer:
        writer.write_batch(table)
    assert "penstock.reopenable(LanceFileReader, path)" in refusal(LanceFileReader(path))
    again = arrived(penstock.reopenable(LanceFileReader, path))
    assert again.read_all().to_table().equals(table)
    dataset = lance.write_dataset(table, str(tmp_path / "y.lance"))
    assert "only one process can read" in refusal(dataset.scanner())


# -- torchcodec ------------------------------------------------------------------------------------


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """A video of ROWS frames of one grey level each."""
    decoders = pytest.importorskip("torchcodec.decoders", exc_type=ImportError)
    if not hasattr(decoders, "VideoDecoder"):
        pytest.skip("torchcodec cannot load FFmpeg")
    path = tmp_path / "grey.mkv"
    lavfi = f"color=size=32x32:rate=10:duration={ROWS / 10},geq=lum='40+N*4':cb=128:cr=128"
    options = ["-v", "error", "-f", "lavfi", "-i", lavfi, "-c:v", "ffv1", str(path)]
    try:
        subprocess.run(["ffmpeg", *options], check=True, timeout=240)
    except FileNotFoundError:
        pytest.skip("the ffmpeg program is missing")
    return path


def frame_level(decoder: Any, index: int) -> float:
    return float(decoder[index].float().mean())


@pytest.mark.parametrize("method", REOPENED)
def test_a_video_decoder_opened_reopenable_decodes_in_workers(video: Path, method: str) -> None:
    from torchcodec.decoders import VideoDecoder

    decoder = penstock.reopenable(VideoDecoder, str(video), dimension_order="NHWC")
    assert decoder[0].shape == (32, 32, 3)
    expected = [int(frame_level(decoder, index)) for index in range(ROWS)]
    assert expected == sorted(set(expected))
    assert loaded(decoder, frame_level, method) == expected
    assert arrived(decoder)[0].shape == (32, 32, 3)


def test_a_plain_video_decoder_is_refused_before_the_first_batch(video: Path) -> None:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(str(video))
    text = refusal(decoder)
    assert "a VideoDecoder does not expose the path" in text
    assert "dataset.deep[0].handle = penstock.reopenable(VideoDecoder, path)" in text
    with pytest.raises(CannotTravel):
        iter(DataLoader(Reads(decoder, frame_level), num_workers=2))
    assert [name for name, _ in find_inherited({"dataset": Holder(video=decoder)})] == [
        "dataset.video"
    ]
    # Control: pickle sends a decoder that cannot decode in another process.
    check = f"import pickle, torchcodec.decoders; pickle.loads({pickle.dumps(decoder)!r})[0]"
    assert run_python(check).returncode != 0


def test_a_decoder_class_with_its_own_pickling_is_left_to_it(video: Path) -> None:
    from torchcodec.decoders import VideoDecoder

    class ByPath(VideoDecoder):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.path = path

        def __reduce__(self) -> Any:
            return type(self), (self.path,)

    decoder = ByPath(str(video))
    assert frame_level(arrived(decoder), 7) == frame_level(decoder, 7)


def test_an_object_without_weak_references_cannot_be_reopenable(numbers: Path) -> None:
    obstore = pytest.importorskip("obstore")
    store = obstore.store.LocalStore(str(numbers.parent))
    with pytest.raises(BadArgument, match="cannot be referenced weakly"):
        penstock.reopenable(obstore.open_reader, store, "numbers.bin")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
