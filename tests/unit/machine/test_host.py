"""Host facts: usable cores under any kind of cgroup, the processor, and limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.machine import host, vendor_tools
from penstock.machine.host import can_start_python, cpu_model, is_gil_enabled, usable_cores

pytestmark = pytest.mark.legacy

MANY = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow many cores by affinity, so that the cgroup is the limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MANY)), raising=False)


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("100001 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", MANY),
        ("max\n", MANY),
        ("6400000 100000", MANY),
        ("9900000 100000", MANY),
        ("rubbish\n", MANY),
        ("", MANY),
        ("x y z\n", MANY),
        ("200000 0\n", MANY),
        ("-1 100000\n", MANY),
    ],
)
def test_cgroup_v2(tmp_path: Path, text: str, cores: int) -> None:
    assert usable_cores(cgroup(tmp_path, cpu_dot_max=text)) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("300000", "100000", 3),
        ("250000", "100000", 3),
        ("10000", "100000", 1),
        ("-1", "100000", MANY),
        ("0", "100000", MANY),
        ("100000", "0", MANY),
        ("rubbish", "100000", MANY),
        ("", "", MANY),
    ],
)
def test_cgroup_v1(tmp_path: Path, quota: str, period: str, cores: int) -> None:
    folder = cgroup(tmp_path, cpu__cpu_dot_cfs_quota_us=quota, cpu__cpu_dot_cfs_period_us=period)
    assert usable_cores(folder) == cores


def test_v2_is_asked_before_v1(tmp_path: Path) -> None:
    folder = cgroup(
        tmp_path,
        cpu_dot_max="100000 100000",
        cpu__cpu_dot_cfs_quota_us="500000",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    assert usable_cores(folder) == 1


def test_without_a_cgroup_affinity_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path / "missing") == MANY
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores(tmp_path / "missing") == 2


def test_a_file_that_may_not_be_read_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").mkdir()  # reading it raises OSError
    assert usable_cores(tmp_path) == MANY


def test_without_affinity_the_count_of_cores_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


def test_a_frozen_application_cannot_start_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_start_python()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_start_python()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "")
    assert not can_start_python()


def test_the_gil_is_on_unless_python_says_that_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert is_gil_enabled()
    for is_on in (True, False):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda is_on=is_on: is_on, raising=False)
        assert is_gil_enabled() == is_on


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
processor\t: 1
model name\t: another
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
RASPBERRY = "processor\t: 0\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 3800.000000MHz\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
@pytest.mark.parametrize(
    ("text", "model"),
    [
        (X86, "Intel(R) Xeon(R) Processor"),
        (GRAVITON, "Neoverse-V1"),
        (GRAVITON.replace("0xd40", "0xfff"), "Arm core 0xfff"),
        (GRAVITON.replace("0x41", "0x99"), "0x99 core 0xd40"),
        (RASPBERRY, "Raspberry Pi 4 Model B Rev 1.4"),
        (POWER, "POWER9, altivec supported"),
        ("", ""),
        ("rubbish without a colon\n: : :\n", ""),
        ("model name\t:\n", ""),
    ],
)
def test_the_processor(tmp_path: Path, text: str, model: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == model


def test_a_host_without_resource_or_shm_has_unknown_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_resource", None)  # as on Windows
    assert host.max_fds() is None
    assert host.shm_bytes(str(tmp_path / "missing")) is None


def test_windows_names_its_processor_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", "Intel64 Family 6")
    monkeypatch.setenv("PROCESSOR_ARCHITECTURE", "AMD64")
    monkeypatch.delenv("PROCESSOR_ARCHITEW6432", raising=False)
    monkeypatch.setitem(sys.modules, "winreg", None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert cpu_model() == "Intel64 Family 6"
    assert host.architecture() == "AMD64"


def test_macos_asks_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        vendor_tools, "run_tool", lambda command, limit_s: asked.append(command) or "Apple M2\n"
    )
    assert cpu_model() == "Apple M2"
    assert asked[0][-1] == "machdep.cpu.brand_string"


def test_the_peak_is_in_kib_although_macos_reports_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(ru_maxrss=2048)
    resource = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setattr(host, "_resource", resource)
    for platform, expected in (("linux", 2048), ("darwin", 2)):
        monkeypatch.setattr(sys, "platform", platform)
        assert host.peak_kb() == expected


def fail(*_: object, **__: object) -> None:
    raise FileNotFoundError("/proc/meminfo")


def test_memory_is_known_or_unknown_without_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", fail)  # other systems
    total, available = host.memory_bytes(tmp_path / "missing")
    assert total >= available >= 0
    monkeypatch.setattr(os, "sysconf", fail, raising=False)
    assert host.memory_bytes(tmp_path / "missing") == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  5 kB\n", (8 << 10, 5 << 10)),
        ("MemTotal:  8 kB\nMemAvailable:  9 kB\n", (8 << 10, 8 << 10)),  # some containers
    ],
)
def test_memory_is_read_from_the_kernel(
    tmp_path: Path, text: str, expected: tuple[int, int]
) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert host.memory_bytes(tmp_path / "meminfo") == expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("text", ["", "MemTotal: 8 kB\n", "MemTotal: x kB\nMemAvailable: 5 kB\n"])
def test_an_incomplete_file_of_the_kernel_is_not_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert host.memory_bytes(tmp_path / "meminfo")[0] > 8 << 10  # asked elsewhere


def test_memory_is_what_psutil_reads() -> None:
    import psutil

    assert host.memory_bytes()[0] == psutil.virtual_memory().total
    resident = psutil.Process().memory_info().rss
    assert 0.5 * resident < host.resident_bytes() < 2 * resident


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_linux_without_proc_is_told_from_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.has_proc()
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert not host.has_proc()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_computing_time_of_a_process_grows_with_its_work() -> None:
    before_s = host.busy_s_of(os.getpid())
    if before_s is None:
        pytest.skip("this kernel does not count it")
    while (now_s := host.busy_s_of(os.getpid()) or 0.0) < before_s + 0.05:
        sum(range(1_000))
    assert now_s > before_s
    assert host.busy_s_of(2**30) is None  # no such process
