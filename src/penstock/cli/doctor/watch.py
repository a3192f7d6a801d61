"""``penstock doctor --watch``: shows GPU usage once a second.

On a terminal it updates a table. In a pipe it prints a line per GPU and second.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.machine.gpu_reading import GpuReading
from penstock.machine.gpu_usage import GpuUsage, read_gpu_usage
from penstock.planning.quantities import size

LIMIT_S = 2.0
INTERVAL_S = 1.0
MAX_SILENCE = 5
"""Stop after this many consecutive attempts without a reading."""


def run_watch(*, as_json: bool, ask: Callable[[float], GpuUsage] = read_gpu_usage) -> int:
    """Show the GPUs until Ctrl-C. Returns the exit code.

    Args:
        ask: Reads the GPU usage, given a time limit in seconds.
    """
    first = ask(LIMIT_S)
    if not first.readings:
        print(f"Nothing to watch: {first.trouble}.", file=sys.stderr)
        return 1
    console = Console()
    try:
        if console.is_terminal and not as_json:
            with Live(_table(first), console=console, auto_refresh=False) as live:
                return _follow(first, ask, lambda seen: live.update(_table(seen), refresh=True))
        return _follow(first, ask, _print_json if as_json else _print_lines)
    except KeyboardInterrupt:
        return 0  # the usual way to stop


def _follow(
    seen: GpuUsage, ask: Callable[[float], GpuUsage], show: Callable[[GpuUsage], None]
) -> int:
    silence = 0
    while True:
        start_s = time.monotonic()
        show(seen)
        silence = 0 if seen.readings else silence + 1
        if silence >= MAX_SILENCE:
            print(f"No reading after {MAX_SILENCE} attempts: {seen.trouble}.", file=sys.stderr)
            return 1
        time.sleep(max(0.0, INTERVAL_S - (time.monotonic() - start_s)))
        seen = ask(LIMIT_S)


def _table(seen: GpuUsage) -> Table:
    table = Table("GPU", "use", "temperature", "memory", "power", caption=seen.trouble or None)
    for reading in seen.readings:
        table.add_row(f"{reading.index} {reading.name}", *_cells(reading))
    return table


def _cells(reading: GpuReading) -> tuple[str, str, str, str]:
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    return (
        _amount(reading.use_percent, "%"),
        _amount(reading.temperature_c, "°C"),
        "-" if used is None else size(used) + (f" of {size(total)}" if total else ""),
        _amount(reading.power_w, "W"),
    )


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"


def _print_lines(seen: GpuUsage) -> None:
    now = time.strftime("%H:%M:%S")
    for reading in seen.readings:
        use, temperature, memory, power = _cells(reading)
        print(f"{now}  GPU {reading.index}  {use}  {temperature}  {memory}  {power}", flush=True)
    if not seen.readings:
        print(f"{now}  {seen.trouble}", flush=True)


def _print_json(seen: GpuUsage) -> None:
    print(json.dumps({"time_s": round(time.time(), 3), **asdict(seen)}), flush=True)
