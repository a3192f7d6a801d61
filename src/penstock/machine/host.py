"""Facts about the operating system, the processor and the memory, and this process's limits."""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.machine.cgroup import MEMBERSHIP, MOUNT, cpu_quota, memory_left_bytes
from penstock.machine.kernel_files import parse_count, read_fields, read_text

_resource: Any = None
with suppress(ImportError):  # not on Windows
    _resource = importlib.import_module("resource")

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_SHM = "/dev/shm"
_TOOL_LIMIT_S = 2.0

# Arm processors report the vendor and the core as numbers. This table has the cores found in
# training machines. lscpu has the full table.
_ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0xc0", "0xac3"): "Ampere-1",
}
_ARM_MAKERS = {
    "0x41": "Arm",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}


def os_version() -> str:
    """Return the version of the operating system, in its usual form.

    Example:
        >>> isinstance(os_version(), str)
        True
    """
    if sys.platform == "win32":
        # Not platform.version(), which queries WMI from Python 3.12 on. That can take seconds.
        version = sys.getwindowsversion()
        return f"{version.major}.{version.minor}.{version.build}"
    if sys.platform == "darwin":
        return platform.mac_ver()[0]
    kernel = os.uname().release
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, kernel {kernel}"
    except (OSError, KeyError):  # a container without a distribution
        return f"kernel {kernel}"


def architecture() -> str:
    """Return the processor's instruction set: ``"x86_64"``, ``"aarch64"``, ``"arm64"``."""
    if sys.platform == "win32":
        # The first variable is set for a 32-bit Python on a 64-bit Windows.
        native = os.environ.get("PROCESSOR_ARCHITEW6432")
        return native or os.environ.get("PROCESSOR_ARCHITECTURE", "")
    return os.uname().machine


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the processor, or ``""`` if unknown.

    Example:
        >>> isinstance(cpu_model(), str)
        True
    """
    if sys.platform == "win32":
        return _windows_cpu_model()
    if sys.platform == "darwin":
        from penstock.machine.vendor_tools import run_tool

        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return run_tool(command, _TOOL_LIMIT_S).strip()
    return _linux_cpu_model(cpuinfo.read_text(encoding="utf-8", errors="replace"))


def _windows_cpu_model() -> str:
    if sys.platform == "win32":  # for the type checker: winreg exists nowhere else
        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            import winreg

            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except (ImportError, OSError):
            pass
    return os.environ.get("PROCESSOR_IDENTIFIER", "")


def _linux_cpu_model(text: str) -> str:
    """Return the processor model from ``/proc/cpuinfo``. The keys depend on the architecture."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())  # the first core represents all
    for name in ("model name", "cpu"):  # x86; POWER
        if found.get(name):
            return found[name]
    maker, part = found.get("CPU implementer", ""), found.get("CPU part", "")
    core = _ARM_CORES.get((maker, part))
    if core:
        return core
    if part:
        return f"{_ARM_MAKERS.get(maker, maker)} core {part}"
    return found.get("Model") or found.get("Hardware") or ""  # small boards


def num_affine_cpus() -> int | None:
    """Return the number of cores this process can run on, or None if unknown.

    In a Ray task or actor, these are at most the CPUs that Ray gave it.
    """
    if hasattr(os, "sched_getaffinity"):
        num_cpus = len(os.sched_getaffinity(0))
        if "ray" not in sys.modules:
            return num_cpus
        from penstock.machine.ray_resources import num_task_cpus

        return min(num_cpus, num_task_cpus() or num_cpus)
    if sys.platform == "win32":
        import psutil

        return len(psutil.Process().cpu_affinity() or ()) or None
    return None


def usable_cores(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the number of cores this process can use, given affinity and cgroup quota. At least 1.

    Example:
        >>> usable_cores() >= 1
        True
    """
    cores = num_affine_cpus() or os.cpu_count() or 1
    quota = cpu_quota(mount, membership)
    return max(1, min(cores, -int(-quota // 1)) if quota else cores)


def memory_bytes(meminfo: Path = _MEMINFO) -> tuple[int, int]:
    """Return the total and the available memory of this computer. 0 means unknown.

    Example:
        >>> total, available = memory_bytes()
        >>> total >= available > 0
        True
    """
    if sys.platform == "linux":  # not psutil, whose import takes 10 ms
        lines = [line for line in read_text(meminfo).splitlines() if line.startswith("Mem")]
        fields = (line.partition(":") for line in lines)
        found = {name: parse_count(value.removesuffix("kB")) for name, _, value in fields}
        total, available = found.get("MemTotal"), found.get("MemAvailable")
        if total and available:
            return total * 1024, min(total, available) * 1024
    else:
        import psutil

        with suppress(psutil.Error, OSError):
            memory = psutil.virtual_memory()
            return int(memory.total), int(memory.available)
    return _sysconf_bytes("SC_PHYS_PAGES"), _sysconf_bytes("SC_AVPHYS_PAGES")


def resident_bytes() -> int:
    """Return the resident memory of this process. 0 means unknown.

    Example:
        >>> resident_bytes() >= 0
        True
    """
    if sys.platform != "linux":
        import psutil

        with suppress(psutil.Error, OSError):
            return int(psutil.Process().memory_info().rss)
        return 0
    pages = parse_count(read_text(_STATM).partition(" ")[2].partition(" ")[0])
    return (pages or 0) * mmap.PAGESIZE


def num_major_faults() -> int:
    """Return the number of page faults of this process that read a disk. 0 if unknown.

    Example:
        >>> num_major_faults() >= 0
        True
    """
    if _resource is None:
        return 0
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_majflt)


def free_memory_bytes() -> int:
    """Return the memory available now, limited by what a container has left. 0 means unknown.

    Example:
        >>> free_memory_bytes() >= 0
        True
    """
    _, available = memory_bytes()
    left = memory_left_bytes()
    return available if left is None else min(available or left, left)


def _sysconf_bytes(name: str) -> int:
    try:
        return max(0, os.sysconf(name) * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return 0


def has_proc() -> bool:
    """Return True if Linux has ``/proc``. Always True on other systems.

    Chroots and some build sandboxes lack it. Threads and other processes are then not visible.
    """
    return sys.platform != "linux" or os.path.exists("/proc/self/task")


def is_library_file(fd: int) -> bool:
    """Return True if a descriptor is a shared library that is open for reading (Linux only).

    libffi keeps its own file open where it was built to. It maps pages of it for new callbacks.
    """
    import fcntl

    name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    is_readonly = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return is_readonly and re.search(r"\.so(\.\d+)*$", name) is not None


def shm_bytes(folder: str = _SHM) -> int | None:
    """Return the size of ``/dev/shm``, or None if it does not exist."""
    if sys.platform == "win32":
        return None
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_frsize * size.f_blocks


def max_fds() -> int | None:
    """Return the limit on open file descriptors of this process, or None without a limit."""
    if _resource is None:
        return None
    soft, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return None if soft == _resource.RLIM_INFINITY else int(soft)


def is_frozen() -> bool:
    """Return True if this application is frozen into one program (PyInstaller, cx_Freeze)."""
    return bool(getattr(sys, "frozen", False))


def can_start_python() -> bool:
    """Return True if there is an interpreter to start. A frozen application has none."""
    return bool(sys.executable) and not is_frozen()


def is_gil_enabled() -> bool:
    """Return True if a lock lets only one thread of this process run Python code at a time.

    Example:
        >>> isinstance(is_gil_enabled(), bool)
        True
    """
    ask = getattr(sys, "_is_gil_enabled", None)  # since Python 3.13
    return ask is None or bool(ask())


def peak_kb() -> int:
    """Return the peak memory of this process in KiB, or 0 if unknown.

    Example:
        >>> peak_kb() >= 0
        True
    """
    if _resource is None:
        return 0
    peak: int = _resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def queued_s() -> float:
    """Return the seconds that this thread was runnable but waited for a core, or 0 if unknown.

    Example:
        >>> queued_s() >= 0
        True
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def busy_s_of(pid: int) -> float | None:
    """Return the seconds that a process computed, or its first thread waited for a core.

    None means unknown: it has ended, or the system does not say.

    Example:
        >>> import os
        >>> known = busy_s_of(os.getpid())
        >>> known is None or known > 0
        True
    """
    try:
        computed_ns, queued_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_bytes().split())
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        num_ticks = int(fields[11]) + int(fields[12])  # all threads, in hundredths of a second
        computed_s = max(computed_ns * 1e-9, num_ticks / os.sysconf("SC_CLK_TCK"))
        return computed_s + queued_ns * 1e-9
    except (OSError, ValueError, IndexError):
        return None


def io_bytes(pid: int) -> tuple[int, int] | None:
    """Return how much a process has read from files, and how much of that from a disk.

    None means unknown. The first number includes files in the page cache and on the network.

    Example:
        >>> import os
        >>> counted = io_bytes(os.getpid())
        >>> counted is None or counted[0] > 0
        True
    """
    if sys.platform != "linux":
        return None
    found = read_fields(Path(f"/proc/{pid}/io"))
    total, disk = (parse_count(found.get(name, "")) for name in ("rchar", "read_bytes"))
    return None if total is None or disk is None else (total, disk)
