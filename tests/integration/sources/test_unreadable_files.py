"""Files that are truncated while they are read, and files that the user may not read."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from support.chunk_sets import dict_spec, write_litdata, write_mds
from support.scripts import run
from support.tar_archives import write_shards

NUM_SAMPLES = 400
pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform == "win32", reason="mapped files cannot be truncated"),
]


def write_arrow(folder: Path, numbers: np.ndarray) -> Path:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 64)})
    path, schema = str(folder / "x.arrow"), table.schema
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table, max_chunksize=40)
    return folder / "x.arrow"


def write_set(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a set of 400 samples of 512 bytes. Returns its path, and the file with the samples."""
    numbers = np.arange(NUM_SAMPLES * 64).reshape(NUM_SAMPLES, 64)
    path = folder / "set"
    if kind == "mds":
        columns: Any = {"x": ("ndarray:int64:64", 512)}
        write_mds(str(path), columns, [[{"x": one.tobytes()} for one in numbers]])
        return path, path / "shard.00000.mds"
    if kind == "litdata":
        samples = [[[one.tobytes()] for one in numbers]]
        write_litdata(str(path), ["bytes"], dict_spec("x"), samples)
        return path, path / "chunk-0-0.bin"
    if kind == "packed":
        penstock.pack([{"x": one} for one in numbers], path)
        return path, next(path.glob("**/*.npy"))
    if kind == "arrow":
        return (write_arrow(folder, numbers),) * 2
    np.save(folder / "x.npy", numbers)
    return folder / "x.npy", folder / "x.npy"


TRUNCATE = """
import json, os, sys
import penstock.errors
from penstock.sources import source_files

source_files.CHECK_PAUSE = 0  # the files of a packed set are compared before each batch

if __name__ == "__main__":
    cases, num_workers = json.loads(sys.argv[1]), int(sys.argv[2])
    for path, victim in cases:
        is_npy = path.endswith(".npy")
        data = penstock.open_tensors(path) if is_npy else penstock.open_dataset(path)
        loader = penstock.DataLoader(data, batch_size=4, num_workers=num_workers)
        batches = iter(loader)
        next(batches)
        os.truncate(victim, 4096)
        try:
            print(json.dumps(f"{victim}: {len(list(batches))} batches"))
        except penstock.errors.PenstockError as error:
            print(json.dumps(str(error)))
"""


def check_truncated(kinds: list[str], folder: Path, num_workers: int) -> None:
    cases = []
    for kind in kinds:
        (folder / kind).mkdir()
        cases.append([str(path) for path in write_set(kind, folder / kind)])
    found = run(TRUNCATE, folder, json.dumps(cases), str(num_workers))
    assert found.returncode == 0, found.stderr
    for (_, victim), line in zip(cases, found.stdout.splitlines(), strict=True):
        assert os.path.basename(victim) in json.loads(line)
        assert "has changed since" in line or "truncated" in line, line


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_truncated_file_is_an_error_and_does_not_end_the_process(
    tmp_path: Path, num_workers: int
) -> None:
    check_truncated(["mds", "litdata", "packed", "npy"], tmp_path, num_workers)


@pytest.mark.formats
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_truncated_arrow_file_does_not_end_the_process(tmp_path: Path, num_workers: int) -> None:
    check_truncated(["arrow"], tmp_path, num_workers)


def test_control_a_map_of_a_truncated_file_ends_the_process(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100_000))
    source = """
import os
import numpy as np
values = np.load("x.npy", mmap_mode="r")
os.truncate("x.npy", 4096)
print(values[-1])
"""
    assert run(source, tmp_path).returncode < 0


# -- permissions -----------------------------------------------------------------------------------

DENIED = """
import json, os, sys
import penstock.errors

cases = json.loads(sys.argv[1])
for path, _, _ in cases:
    penstock.open_dataset(path)  # imports what is needed, and shows that it can be read
for _, denied, _ in cases:
    os.chmod(denied, 0)
if os.getuid() == 0:  # who may read everything
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path, denied, _ in cases:
    try:
        penstock.open_dataset(path)
    except penstock.errors.PenstockError as error:
        print(json.dumps([path, str(error)]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that other users can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for name, folders, _ in os.walk(folder, onerror=None):
        for one in folders:
            os.chmod(os.path.join(name, one), 0o755)
    shutil.rmtree(folder)


def make_denied(root: Path) -> list[tuple[str, str, str]]:
    """Write sets. Returns the path to open, what may not be read, and the advice."""
    found = []
    for name in ("file", "folder", "pattern", "listed"):
        (root / name).mkdir()
        (path,) = write_shards(root / name, [3])
        denied = path if name == "file" else str(root / name)
        given = {"pattern": f"{root}/{name}/*.tar", "listed": str(root / name)}.get(name, path)
        found.append((given, denied, "a+r" if name == "file" else "a+rx"))
    for name in ("index", "shard"):
        write_mds(str(root / name), {"x": ("bytes", None)}, [[{"x": b"1"}]])
        inside = "index.json" if name == "index" else "shard.00000.mds"
        found.append((str(root / name), str(root / name / inside), "a+r"))
    penstock.pack([{"n": n} for n in range(5)], root / "packed")
    found.append((str(root / "packed"), str(root / "packed" / "manifest.json"), "a+r"))
    (root / "images" / "cat").mkdir(parents=True)
    (root / "images" / "dog").mkdir()
    (root / "images" / "dog" / "1.ppm").write_bytes(b"P6 2 1 255 " + bytes(6))
    found.append((str(root / "images"), str(root / "images" / "cat"), "a+rx"))
    return found


def check_denied(cases: list[tuple[str, str, str]], folder: Path) -> None:
    result = run(DENIED, folder, json.dumps(cases))
    assert result.returncode == 0, result.stderr
    errors = dict(json.loads(line) for line in result.stdout.splitlines())
    assert len(errors) == len(cases)
    for path, denied, rights in cases:
        assert "permission denied" in errors[path], path
        assert f"Try: chmod {rights} {denied}, as its owner" in errors[path], path
        assert "truncated" not in errors[path]


def test_a_file_or_folder_without_permission_is_named_with_the_cure(
    tmp_path: Path, open_folder: Path
) -> None:
    check_denied(make_denied(open_folder), tmp_path)


@pytest.mark.formats
def test_tables_without_permission_are_named_with_the_cure(
    tmp_path: Path, open_folder: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"n": [1]}), open_folder / "a.parquet")
    cases = [(str(open_folder / "a.parquet"),) * 2 + ("a+r",)]
    arrow = write_arrow(open_folder, np.arange(128).reshape(2, 64))
    cases.append((str(arrow), str(arrow), "a+r"))
    check_denied(cases, tmp_path)
