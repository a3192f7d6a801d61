"""Loaders work without ``/proc``, as in a chroot or a build sandbox, with some facts unknown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, tempfile
import torch
import penstock
from penstock import DataLoader

class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return index

class Deadly(Data):
    def __init__(self, mark): self.mark = mark
    def __getitem__(self, index):
        if index == 5 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

def numbers(loader):
    return torch.cat([batch.reshape(-1) for batch in loader]).tolist()

assert not os.path.exists("/proc/self")
whole = list(range(8))
for options in ({}, {"multiprocessing_context": "fork"}, {"pool": "thread"}):
    loader = DataLoader(Data(), batch_size=2, num_workers=2, **options)
    assert numbers(loader) == whole, options
    print(loader.plan.start_method)
folder = tempfile.mkdtemp()
deadly = Deadly(folder + "/mark")
loader = DataLoader(deadly, batch_size=2, num_workers=1, trace=folder + "/t.json")
print(numbers(loader) == whole)
loader.close()
assert str(penstock.Timeline.load(folder + "/t.json").verdict)
assert numbers(DataLoader(Data(), batch_size=2, num_workers="auto")) == whole
penstock.pack(Data(), folder + "/packed")
for dataset in (penstock.Packed(folder + "/packed"), penstock.cached(Data(), "ram")):
    assert numbers(DataLoader(dataset, batch_size=2)) == whole
facts = penstock.machine()
assert facts.has_proc is False
print("done")
"""


def without_proc(program: Path) -> list[str] | None:
    """Command that runs a program without ``/proc``, or None where that is not allowed."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return None
    for flags in (["-m"], ["-rm"]):
        begin = ["unshare", *flags, "sh", "-c"]
        hide = "mount -t tmpfs none /proc && "
        if (
            subprocess.run([*begin, f"{hide} true"], capture_output=True, timeout=240).returncode
            == 0
        ):
            return [*begin, f'{hide} exec "{sys.executable}" "{program}"']
    return None


def test_loaders_of_every_kind_load_without_proc(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = without_proc(program)
    if command is None:
        pytest.skip("this user may not hide /proc from a program")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "spawn (rule: without /proc, it is unknown whether a process is safe to fork)"
    )
    assert lines[1].startswith("fork (asked")
    assert lines[-2:] == ["True", "done"]


def test_the_program_needs_the_loss_of_proc() -> None:
    """Control: with ``/proc``, the program fails at its first line."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; assert not os.path.exists('/proc/self')"],
        capture_output=True,
        timeout=240,
    )
    assert (done.returncode != 0) == (sys.platform == "linux")
