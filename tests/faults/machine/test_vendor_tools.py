"""Vendor tools that hang, flood their output, fail or print garbage, as programs on the PATH."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.machine import gpu, gpu_usage, nvidia
from penstock.machine.collect import machine
from penstock.machine.vendor_tools import (
    MAX_OUTPUT_BYTES,
    ToolFailed,
    ToolMissing,
    ToolTimedOut,
    run_tool,
)
from support.leftovers import SETTLE_S

pytestmark = [
    pytest.mark.fault,
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform == "win32", reason="the tools are shell scripts"),
]

LIMIT_S = 0.5
SLEEP = f"sleep 300.{os.getpid()}"
"""An orphan has no parent to find it by, so the command line is unique to this run."""
LONG_S = 60.0
"""Far above the time to kill a tool on a busy machine, far below the run time of the tools."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of PATH, on a machine without NVML and AMD's driver."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def no_library() -> None:
        raise ToolMissing("no NVML")

    monkeypatch.setattr(nvidia, "cards_by_nvml", no_library)
    monkeypatch.setattr(gpu.amd, "cards_by_kfd", list)
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def num_sleepers(settle_s: float = SETTLE_S) -> int:
    """Count the sleeping processes, after those being killed have exited."""
    deadline_s = time.monotonic() + settle_s
    while True:
        commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        num = commands.count(SLEEP.split())
        if num == 0 or time.monotonic() > deadline_s:
            return num
        time.sleep(0.02)


@pytest.mark.parametrize(
    "script",
    [
        SLEEP,
        f"exec {SLEEP}",
        f"trap '' TERM INT HUP; {SLEEP}",
        f"{SLEEP} & {SLEEP} & wait",
        f"echo 'GPU, 1.0'; {SLEEP}",
        f"exec >&-; {SLEEP}",
    ],
)
def test_a_tool_that_hangs_is_killed_with_its_children(path: Path, script: str) -> None:
    install(path, "nvidia-smi", script)
    with pytest.raises(ToolTimedOut, match=r"nvidia-smi did not answer in 0\.5 s"):
        run_tool(["nvidia-smi"], LIMIT_S)
    assert num_sleepers() == 0


def test_control_a_child_that_is_left_would_be_noticed() -> None:
    shell = subprocess.Popen(["sh", "-c", f"{SLEEP} & echo $!"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.wait()
    shell.stdout.close()
    deadline_s = time.monotonic() + 10
    while psutil.Process(pid).cmdline() != SLEEP.split() and time.monotonic() < deadline_s:
        time.sleep(0.01)  # still the shell
    try:
        assert num_sleepers(settle_s=0.2) == 1
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_tool_that_prints_without_end_is_stopped(path: Path) -> None:
    install(path, "nvidia-smi", "exec yes")
    with pytest.raises(ToolFailed, match=f"more than {MAX_OUTPUT_BYTES} bytes"):
        run_tool(["nvidia-smi"], LONG_S)


def test_a_tool_that_fails_and_one_that_cannot_start(path: Path) -> None:
    install(path, "nvidia-smi", "echo something; exit 9")
    with pytest.raises(ToolFailed, match="exit code 9"):
        run_tool(["nvidia-smi"], LONG_S)
    (path / "nvidia-smi").write_text("#!/no/such/shell\n")
    with pytest.raises(ToolFailed, match="could not be started"):
        run_tool(["nvidia-smi"], LONG_S)
    with pytest.raises(ToolMissing, match="no-such-tool is not installed"):
        run_tool(["no-such-tool"], LONG_S)


def test_control_a_tool_that_works_is_heard(path: Path) -> None:
    install(path, "nvidia-smi", "printf 'GPU \\377 one'")
    assert run_tool(["nvidia-smi"], LONG_S) == "GPU \ufffd one"


def test_a_machine_whose_tool_hangs_is_described_without_gpus(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(path, "nvidia-smi", SLEEP)
    monkeypatch.setattr(gpu, "DRIVER_LIMIT_S", LIMIT_S)
    here = machine()
    assert (here.gpus, here.gpus_seen_by) == ((), "nobody")
    assert here.gpu_trouble == "nvidia-smi did not answer in 0.5 s"
    assert here.num_cpus == os.cpu_count()  # other facts are still known


def test_a_machine_whose_tool_prints_rubbish_is_described_without_gpus(path: Path) -> None:
    install(path, "nvidia-smi", "head -c 300 /dev/urandom; echo; echo '<html>'")
    here = machine()
    assert here.gpus == ()
    assert "not the expected table" in here.gpu_trouble


def test_a_watch_is_cut_off_too(path: Path) -> None:
    install(path, "nvidia-smi", "exit 9")  # shadows a real one
    install(path, "rocm-smi", SLEEP)
    seen = gpu_usage.read_gpu_usage(LIMIT_S)
    assert seen.readings == ()
    assert seen.trouble.endswith("; rocm-smi did not answer in 0.5 s")


# A stand-in for torch. The child finds it first because it gets this process's sys.path.


def put_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "torch.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


CARDS = """
from types import SimpleNamespace as S
print("a greeting from an import")
version = S(hip={hip!r})
backends = S()
cuda = S(
    is_available=lambda: True,
    device_count=lambda: 1,
    get_device_properties=lambda index: S(
        name="Card", major=9, minor=0, total_memory=1 << 30, gcnArchName="gfx90a:sramecc+:xnack-"
    ),
)
"""


@pytest.mark.parametrize(
    ("hip", "vendor", "architecture"), [(None, "nvidia", "sm_90"), ("6.2", "amd", "gfx90a")]
)
def test_torch_is_asked_in_a_child(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    vendor: str,
    architecture: str,
) -> None:
    put_torch(tmp_path, monkeypatch, CARDS.format(hip=hip))
    (card,) = gpu.find_torch_gpus(LONG_S).gpus
    assert (card.name, card.vendor, card.architecture) == ("Card", vendor, architecture)
    assert card.memory_bytes == 1 << 30


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("import time; time.sleep(300)", "torch did not list its GPUs within 1 s"),
        ("import os; os.abort()", "failed with exit code"),
        ("raise SystemExit(0)", "printed no list of GPUs"),
    ],
)
def test_a_torch_that_hangs_or_dies_costs_only_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, trouble: str
) -> None:
    put_torch(tmp_path, monkeypatch, source)
    found = gpu.find_torch_gpus(1.0 if "sleep" in source else LONG_S)
    assert found.gpus == ()
    assert trouble in found.trouble
