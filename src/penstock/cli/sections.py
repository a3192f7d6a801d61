"""Sections of a report: a title and rows of facts, such as the facts about a machine.

Tested by ``tests/unit/cli/test_overview.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from penstock.machine.facts import Machine
from penstock.planning.quantities import count, size


def escape_unprintable() -> None:
    """Escape characters that stdout cannot encode, so an unusual path cannot break a report."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def make_console() -> Console:
    """Return the console for a report."""
    escape_unprintable()
    return Console(highlight=False, emoji=False)


def print_section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a title and its rows, without color in a pipe.

    Lines are not wrapped, so they can be pasted.
    """
    kept = list(rows)
    width = max((len(name) for name, _ in kept), default=0)
    console.print(Text(title, style="bold"), soft_wrap=True)
    for name, value in kept:
        line = Text.assemble(("  " + name.ljust(width) + "  ", "dim"), value)
        console.print(line, soft_wrap=True)
    console.print()


def main_facts(machine: Machine) -> Iterable[tuple[str, str]]:
    """Yield rows for the system, processor, memory, Python and GPUs of a machine.

    Example:
        >>> [name for name, _ in main_facts(Machine(os="linux"))]
        ['system', 'processor', 'memory', 'python', 'GPUs']
    """
    yield "system", ", ".join(filter(None, (machine.os, machine.os_version, machine.architecture)))
    quota = f", quota {machine.cpu_quota:.3g}" if machine.cpu_quota else ""
    usable = f"{machine.usable_cores} of {count(machine.num_cpus, 'core')} usable{quota}"
    yield "processor", ", ".join(filter(None, (machine.cpu_model, usable)))
    yield "memory", _memory(machine)
    yield "python", _software(machine)
    yield "GPUs", _gpus(machine)


def _memory(machine: Machine) -> str:
    texts = [f"{size(machine.available_bytes)} free of {size(machine.memory_bytes)}"]
    if machine.memory_limit_bytes:
        texts.append(f"limit {size(machine.memory_limit_bytes)}")
    if machine.shm_bytes is not None:
        texts.append(f"/dev/shm {size(machine.shm_bytes)}")
    if machine.max_fds is not None:
        texts.append(f"{machine.max_fds:,} open files")
    return ", ".join(texts)


def _threading(machine: Machine) -> str:
    if machine.gil_enabled_by is not None:
        return f" (free-threaded, GIL turned on by {machine.gil_enabled_by})"
    return "" if machine.is_gil_enabled else " (free-threaded, GIL off)"


def _software(machine: Machine) -> str:
    build = machine.torch_build
    if machine.torch_build_version:
        build += f" {machine.torch_build_version}"
    texts = [
        machine.python + _threading(machine),
        f"torch {machine.torch} ({build})" if machine.torch else "no torch",
    ]
    if machine.numpy:
        texts.append(f"NumPy {machine.numpy}")
    return ", ".join(texts)


def _gpus(machine: Machine) -> str:
    cards = []
    for gpu in machine.gpus:
        memory = size(gpu.memory_bytes) if gpu.memory_bytes else None
        facts = ", ".join(filter(None, (gpu.architecture, memory)))
        cards.append(f"{gpu.name} ({facts})" if facts else gpu.name)
    if not cards:
        return "none found" + (f": {machine.gpu_trouble}" if machine.gpu_trouble else "")
    return f"{', '.join(cards)}; found by {machine.gpus_seen_by}"
