"""A packing killed at any moment can be resumed, and ends with the same bytes."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Packed, pack
from penstock.errors import AlreadyThere, BadStore
from support import scripts
from support.packed_sets import Mixed, PackServer, digest, pack_server
from support.paths import TESTS

pytestmark = pytest.mark.fault

NUM_KILLS = 10


@pytest.fixture(scope="module")
def server() -> Iterator[PackServer]:
    with pack_server() as found:
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digest of an uninterrupted packing."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    pack(Mixed(), folder, workers=0, shard_bytes=1500)
    return digest(folder)


@pytest.mark.legacy
def test_killed_at_random_moments_a_packing_goes_on_to_the_same_bytes(
    server: PackServer, whole: dict[str, str], tmp_path: Path
) -> None:
    assert server.pack(tmp_path / "warm") == 0
    start = time.perf_counter()
    assert server.pack(tmp_path / "timed") == 0
    full_s = time.perf_counter() - start
    moments = random.Random(9)
    num_killed = 0
    folder = tmp_path / "killed"
    for _ in range(5 * NUM_KILLS):  # some kills come too late, more so on a busy machine
        if num_killed == NUM_KILLS:
            break
        code = server.pack(folder, kill_after_s=moments.uniform(0.0, full_s / 2))
        num_killed += code == -signal.SIGKILL
        if (folder / "manifest.json").exists() and not (folder / "packing.json").exists():
            if code != 0:
                server.pack(folder)  # the kill came when only the lock was left to remove
            assert digest(folder) == whole
            folder = folder.with_name(folder.name + "x")
    assert server.pack(folder) == 0
    assert digest(folder) == whole
    assert num_killed == NUM_KILLS


@pytest.mark.parametrize(("piece_rows", "stride"), [(0, 11), (3, 37)])
def test_killed_before_each_step_a_packing_goes_on_to_the_same_bytes(
    server: PackServer, whole: dict[str, str], tmp_path: Path, piece_rows: int, stride: int
) -> None:
    steps = 0
    for step in range(1, 5000, stride):  # every kind of file call, with a stride
        folder = tmp_path / f"{step}"
        if server.pack(folder, die_at=step, piece_rows=piece_rows) == 0:
            assert digest(folder) == whole
            break
        steps += 1
        with pytest.raises(BadStore) if not (folder / "manifest.json").exists() else _nothing():
            Packed(folder)  # a reader never sees a partial set
        code = server.pack(folder, piece_rows=piece_rows and 5)  # the journal's pieces are kept
        # A packing killed after its last cleanup step is complete, so nothing is overwritten.
        assert code == 0 or (folder / "manifest.json").exists()
        assert digest(folder) == whole, step
    assert steps > 12


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_finished_shards_are_not_written_again(server: PackServer, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    server.pack(folder, die_at=90)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("image-*.npy")}
    records = [path.name for path in folder.glob("shard-*.json")]
    assert before
    assert records
    server.pack(folder)
    done = [f"image-{name[6:11]}.npy" for name in records]
    assert {name: (folder / name).stat().st_mtime_ns for name in done} == {
        name: before[name] for name in done
    }


def test_another_source_does_not_go_on_where_this_one_stopped(
    server: PackServer, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    server.pack(folder, die_at=60)
    (folder / ".packing.lock").unlink()  # a killed process cannot remove it
    before = digest(folder)
    with pytest.raises(AlreadyThere, match="a different unfinished packing"):
        pack(Mixed(61), folder, workers=0, shard_bytes=1500)
    assert digest(folder) == before


FILLS_UP = """
import resource, signal, sys
from pathlib import Path
import numpy as np
import penstock

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
class Growing:
    def __len__(self): return 40
    def __getitem__(self, i): return bytes(100 if i < 30 else 9000)
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, resource.RLIM_INFINITY))
try:
    penstock.pack(Growing(), folder, workers=0, shard_bytes=1000)
except penstock.errors.CannotWrite as error:
    print(error)
finished = {p.name: p.read_bytes() for p in folder.glob("*.npy")}
assert len(finished) >= 4, finished.keys()
assert not list(folder.glob(".part-*"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
packed = penstock.pack(Growing(), folder, workers=0, shard_bytes=1000)
assert all((folder / name).read_bytes() == content for name, content in finished.items())
print(len(packed))
"""


def test_a_disk_that_fills_up_is_named_and_keeps_what_was_finished(tmp_path: Path) -> None:
    """A file size limit simulates the full disk. The same call fails, with a different errno."""
    assert resource.RLIM_INFINITY  # the program sets the limit only for itself
    result = scripts.run(FILLS_UP, tmp_path, str(tmp_path / "set"))
    assert result.returncode == 0, result.stderr
    assert "[F04] " in result.stdout
    assert "finished shards are kept" in result.stdout
    assert result.stdout.splitlines()[-1] == "40"


WORKERS = """
import sys, time
import penstock
from support import packed_sets
class Slow(packed_sets.Mixed):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)
    packed_fingerprint = staticmethod(lambda: "slow")
print("begin", flush=True)
penstock.pack(Slow(300), sys.argv[1], workers=2, shard_bytes=2000)
print("end", flush=True)
"""


def test_killed_with_workers_at_work_a_packing_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKERS)
    environ = {"PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    command = [sys.executable, str(program), str(tmp_path / "set")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "begin\n"
        deadline = time.monotonic() + 200
        while not list((tmp_path / "set").glob("shard-*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [Packed(tmp_path / "set")[i]["label"] for i in (0, 150, 299)] == [0, 150, 299]
    assert not [path for path in (tmp_path / "set").iterdir() if path.name.startswith(".")]


@pytest.mark.legacy
def test_killed_while_it_wrote_its_first_file_a_packing_begins_again(
    server: PackServer, whole: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / ".part-0123abcd-packing.json").write_text('{"half')
    assert server.pack(folder) == 0
    assert digest(folder) == whole
    other = tmp_path / "mine"
    other.mkdir()
    (other / ".part-of-my-own.txt").write_text("kept")  # control: other files are kept
    assert server.pack(other) != 0
    assert (other / ".part-of-my-own.txt").read_text() == "kept"
