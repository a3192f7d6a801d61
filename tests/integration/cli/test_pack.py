"""``penstock pack`` as typed on a command line."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock import Packed
from penstock.errors import MissingExtra
from penstock.images import jpeg_codecs
from support import command_line

DATASET = """
import numpy as np

class Squares:
    def __len__(self):
        return 50
    def __getitem__(self, i):
        if i == 7:
            raise ValueError("torn")
        return {"n": i, "square": np.float32(i * i)}

dataset = Squares()
def make_loader():
    import torch
    return torch.utils.data.DataLoader(dataset)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "pack", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_dataset_of_a_script_is_packed_and_its_bad_sample_listed(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(DATASET)
    # The dataset of a loader, which doctor and bench accept too.
    result = run(tmp_path, "data.py:make_loader", "out", "--on-error", "skip", "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert "49 samples of n, square" in result.stdout
    assert "sample 7 is bad: ValueError: torn" in result.stdout
    packed = Packed(tmp_path / "out")
    assert packed[7]["n"] == 8
    assert packed[7]["square"] == 64.0
    assert result.stderr == ""  # no progress bar without a terminal
    raised = run(tmp_path, "data.py:dataset", "other", "--workers", "2", "--", "--size", "3")
    assert raised.returncode == 2
    assert "sample 7 cannot be loaded: ValueError: torn" in raised.stderr
    remedy = "penstock pack data.py:dataset other --workers 2 --on-error skip -- --size 3 #"
    assert remedy in " ".join(raised.stderr.split())
    assert "Traceback" not in raised.stderr
    skipped = run(
        *(tmp_path, "data.py:dataset", "other", "--workers", "2", "--on-error", "skip"),
        *("--", "--size", "3"),
    )
    assert skipped.returncode == 0, skipped.stderr
    again = run(tmp_path, "data:dataset", "out", "--on-error", "skip")
    assert again.returncode == 2
    assert "AlreadyThere: [F05] " in again.stderr


NONE = """
class Gappy:
    def __len__(self): return 50
    def __getitem__(self, i): return None if i == 31 else i

dataset = Gappy()
"""


def test_a_sample_that_is_none_is_named_with_the_command_that_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text(NONE)
    line = ("pack", "data.py:dataset", "out", "--workers", "0")
    monkeypatch.setattr(sys, "argv", ["penstock", *line])
    refused = " ".join(command_line.invoke(*line).output.split())
    assert "CannotPack: [F03] dataset[31] returned None, which cannot be stored" in refused
    skip = f"penstock {' '.join(line)} --on-error skip"
    assert f"Try: return a value for every index; or {skip} #" in refused
    left_out = command_line.invoke(*line, "--on-error", "skip")
    assert left_out.exit_code == 0, left_out.output
    assert "sample 31 is bad: CannotPack: dataset[31] returned None" in left_out.output


BROKEN = """
import sys

class Broken:
    def __init__(self, fail): self.fail = fail
    def __len__(self): return 50
    def __getitem__(self, i): return self.fail() if i == 31 else i

def read():
    raise OSError("image file is truncated")

unreadable = Broken(read)
ending = Broken(lambda: sys.exit(4))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unreadable", "sample 31 cannot be loaded: OSError: image file is truncated"),
        ("ending", "a sample ended the program with exit code 4"),
    ],
)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_sample_that_cannot_be_read_is_not_taken_for_the_folder(
    workers: str, name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "data.py").write_text(BROKEN)
    result = run(tmp_path, f"data.py:{name}", "out", "--workers", workers)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Try: penstock " in result.stderr
    assert "cannot be written" not in result.stderr


SLOW = """
import time

class Slow:
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        time.sleep(0.01)
        return i

dataset = Slow()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a signal for one process")
def test_ctrl_c_is_reported_once_with_the_command_that_continues(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SLOW)
    command = [sys.executable, "-m", "penstock", "pack", "data.py:dataset", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
        limit_s = time.monotonic() + 240
        while not (tmp_path / "out").exists():  # packing has begun
            assert program.poll() is None
            assert time.monotonic() < limit_s
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=240)
    assert program.returncode == 130
    assert said.count("Interrupted") == 1, said
    assert "continue: penstock pack data.py:dataset out" in said


TRAINS = """
import argparse
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)

if __name__ == "__main__":
    size = parser.parse_args().size
    dataset = [np.full(size, i, np.float32) for i in range(20)]
    open("trained", "w").close()
"""


def test_the_script_gets_its_arguments_and_stops_at_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    result = run(tmp_path, "train.py:dataset", "out", "--workers", "0", "--", "--size", "3")
    assert result.returncode == 0, result.stderr
    assert Packed(tmp_path / "out")[7].tolist() == [7.0, 7.0, 7.0]
    assert not (tmp_path / "trained").exists()
    without = run(tmp_path, "train.py:dataset", "other")
    assert without.returncode == 2
    assert "penstock pack train.py:dataset packed/ -- ARGUMENTS OF THE SCRIPT" in without.stderr


def make_images(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "1.ppm").write_bytes(b"P6 2 1 255 " + bytes(6))


def test_the_classes_are_printed_and_splits_are_noticed(tmp_path: Path) -> None:
    make_images(tmp_path, "flat/cat", "flat/dog", "split/train/cat", "split/val/cat")
    flat = command_line.invoke("pack", str(tmp_path / "flat"), str(tmp_path / "a"))
    assert flat.exit_code == 0, flat.output
    assert "2 images in 2 classes: cat, dog" in flat.output
    assert "one level deeper" not in flat.output
    split = command_line.invoke("pack", str(tmp_path / "split"), str(tmp_path / "b"))
    assert split.exit_code == 0, split.output
    assert "2 images in 2 classes: train, val" in split.output
    assert f"the images lie one level deeper, as in {tmp_path}" in split.output
    assert f"penstock pack {tmp_path / 'split' / 'train'} DST" in split.output


@pytest.mark.parametrize("num_images", [1, 40])
def test_without_a_decoder_the_line_that_installs_one_is_given(
    num_images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(tmp_path, "photos/cat")
    for name in jpeg_codecs.PREFERRED:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(jpeg_codecs, "_chosen", [])
    target = str(tmp_path / "out")
    other = command_line.invoke("pack", str(tmp_path / "photos"), target)
    assert other.exit_code == 0, other.output  # control: a format that is stored unchecked
    header = "ffd8 ffc0 0011 08 0008 0008 03 011100 021100 031100 ffd9"
    for number in range(num_images):
        (tmp_path / "photos" / "cat" / f"{number}.jpg").write_bytes(bytes.fromhex(header))
    result = command_line.invoke("pack", str(tmp_path / "photos"), str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "MissingExtra: [X01] no library that decodes images is installed" in result.output
    assert "pip install" in result.output
    assert not (tmp_path / "new").exists()
    folder = penstock.ImageFolder(tmp_path / "photos")
    with pytest.raises(MissingExtra):  # as without workers, and not CannotTravel
        next(iter(penstock.DataLoader(folder, num_workers=1)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "out"), "neither a folder nor SCRIPT.py:DATASET"),
        (("nosuch_module:x", "out"), "cannot be found"),
        (("empty", "out"), "has no class subfolders"),
        (("empty", "out", "more"), "'empty' is a folder, so no script takes 'more'"),
        (("data.py", "out"), "Try: penstock pack data.py:dataset packed/"),
        (("data.py:dataset", "out", "--quality", "90"), "require a folder of images"),
        (("data.py:dataset", "out", "--on", "mars"), "must be one of here, ray"),
        (("data.py:dataset", "out", "--on", "ray"), 'Try: pip install "ray>=2.9"'),
    ],
)
def test_what_cannot_be_packed_is_said(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "data.py").write_text(DATASET)
    (tmp_path / "empty").mkdir()
    before, path = Path.cwd(), list(sys.path)
    os.chdir(tmp_path)
    try:
        result = command_line.invoke("pack", *arguments)
    finally:
        os.chdir(before)
        sys.path[:] = path
    if "ray" in arguments and importlib.util.find_spec("ray"):
        pytest.skip("ray is installed here")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
