"""``penstock top``: the running loaders of this user, live.

Reads programs from outside (:mod:`penstock.cli.live_loaders`) and does not slow them down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import CommandParser, number
from penstock.errors import BadTarget
from penstock.planning.quantities import size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from penstock.cli.live_loaders import LoaderView, WorkerView

MAX_ROWS = 16
"""Workers shown for each loader. The rest are summarised in one line."""
LONG_S = 2.0
"""A worker that loads one sample or part for longer than this is shown with its stack."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_argument(
        "pid",
        nargs="?",
        type=number(int, 1),
        metavar="[PID]",
        help="One program. By default, all programs of this user.",
    )
    parser.add_argument("--once", action="store_true", help="Print once, and exit.")
    parser.add_argument("--json", action="store_true", help="Print JSON once, and exit.")
    parser.add_argument(
        "--stacks",
        action="store_true",
        help=f"Show the Python stack of workers that are busy for more than {LONG_S:g} s.",
    )


def execute(options: argparse.Namespace) -> int:
    """Show the loaders until Ctrl-C, or until the program ends."""
    if sys.platform != "linux":
        raise BadTarget(
            "penstock top reads /proc, which only Linux has",
            remedy="print(loader.metrics()) in the program",
        )
    usage = _Usage()
    loaders = _read(options.pid)
    usage.measure(loaders)
    time.sleep(0.2)  # rates are measured between two reads
    loaders = _read(options.pid)
    usage.measure(loaders)
    if options.json:
        plain = [{**view.to_dict(), "usage": usage.of(view)} for view in loaders]
        if options.stacks:
            for view, values in zip(loaders, plain, strict=True):
                values["stacks"] = dict(_stacks(view))
        sys.stdout.write(json.dumps(plain, indent=2, default=repr) + "\n")
        return 0
    from rich.console import Console

    console = Console()
    if options.once or not console.is_terminal:
        console.print(_draw(loaders, usage, options, console))
        return 0
    return _show_live(options, usage, console)


def _show_live(options: argparse.Namespace, usage: _Usage, console: Console) -> int:
    from rich.live import Live

    last: list[LoaderView] = []
    ended = False
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    last = _read(options.pid) or last
                except BadTarget:
                    ended = True
                    break
                usage.measure(last)
                live.update(_draw(last, usage, options, console), refresh=True)
                time.sleep(1.0)
        except KeyboardInterrupt:
            pass
    console.print(_draw(last, usage, options, console))
    if ended:
        console.print(f"Program {options.pid} has ended.")
    return 0


def _read(pid: int | None) -> list[LoaderView]:
    from penstock.cli.live_loaders import find_programs, read_program

    if pid is None:
        found = []
        for one in sorted(find_programs()):
            try:
                found += read_program(one)
            except OSError:
                continue  # it has ended since
        return found
    try:
        return read_program(pid)
    except PermissionError:
        raise BadTarget(
            f"process {pid} belongs to {_owner(pid)}: penstock top shows your own programs",
            remedy=f"sudo penstock top {pid}",
        ) from None
    except OSError:
        raise BadTarget(f"no process {pid}", remedy="penstock top") from None


def _owner(pid: int) -> str:
    import pwd

    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "a different user"
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"user {uid}"
    return name if uid != os.getuid() else f"{name}, but is protected"


class _Usage:
    """CPU and memory of processes, and bytes that loaders read, between two reads."""

    def __init__(self) -> None:
        self._processes: dict[int, Any] = {}
        self._found: dict[int, tuple[float, int]] = {}
        self._totals: dict[tuple[int, ...], tuple[float, int, int]] = {}
        self._rates: dict[tuple[int, ...], tuple[float, float]] = {}

    def measure(self, loaders: list[LoaderView]) -> None:
        import psutil

        for pid in {pid for view in loaders for pid in _processes(view)}:
            try:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                self._found[pid] = process.cpu_percent(), process.memory_info().rss
            except psutil.Error:
                self._found.pop(pid, None)
        now_s = time.monotonic()
        for key, view in {_processes(view): view for view in loaders}.items():
            total, disk = view.metrics.read_bytes, view.metrics.disk_bytes
            if total is None or disk is None:
                continue
            if key in self._totals:
                last_s, last, last_disk = self._totals[key]
                took_s = max(now_s - last_s, 1e-3)
                self._rates[key] = (total - last) / took_s, (disk - last_disk) / took_s
            self._totals[key] = now_s, total, disk

    def reading(self, view: LoaderView) -> str:
        """Return the bytes that a loader's processes read per second, as text."""
        if _processes(view) not in self._rates:
            return ""
        total, disk = self._rates[_processes(view)]
        return f"; reading {size(total)}/s, {size(disk)}/s from disk"

    def of(self, view: LoaderView) -> dict[int, dict[str, float]]:
        """Return CPU (in percent of a core) and memory of the program and its workers, by pid."""
        return {
            pid: {"cpu_percent": self._found[pid][0], "rss_bytes": self._found[pid][1]}
            for pid in _processes(view)
            if pid in self._found
        }

    def cells(self, pid: int | None) -> tuple[str, str]:
        """Return CPU and memory of a process as text."""
        if pid is None or pid not in self._found:
            return "", ""
        return f"{self._found[pid][0]:.0f}%", size(self._found[pid][1])


def _processes(view: LoaderView) -> tuple[int, ...]:
    """Return the program and its workers on this machine."""
    return view.pid, *(worker.pid for worker in view.workers if worker.pid is not None)


# -- drawing ---------------------------------------------------------------------------------------


def _draw(
    loaders: list[LoaderView], usage: _Usage, options: argparse.Namespace, console: Console
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if not loaders:
        where = "" if options.pid is None else f" in process {options.pid}"
        return Text(
            f"No running loader{where}. A loader is shown once it has run for a second, unless "
            "trace=False or PENSTOCK_TRACE=0."
        )
    room = MAX_ROWS
    if not options.once and console.is_terminal:
        num_others = 10 if console.width >= 120 else 14  # lines of a loader besides its workers
        room = console.height // len(loaders) - num_others
        if room < min(3, max(len(view.workers) for view in loaders)) and not options.stacks:
            return _overview(loaders, usage, console.height - 2)
    parts: list[RenderableType] = []
    for view in loaders:
        parts += [Text(line, style=style) for line, style in _lines(view, usage, console.width)]
        if view.workers:
            parts.append(_worker_table(view, usage, min(max(1, room), MAX_ROWS)))
        for name, stack in _stacks(view) if options.stacks else ():
            parts += [Text(f"{name}:", style="bold"), Text(stack)]
        parts.append(Text(""))
    return Group(*parts[:-1])


def _lines(view: LoaderView, usage: _Usage, width: int) -> Iterator[tuple[str, str]]:
    metrics, facts = view.metrics, view.facts
    rank = "" if view.rank is None else f" rank {view.rank}"
    title = f"{view.pid}{rank}  {facts.get('dataset')}, batch size {facts.get('batch_size')}"
    left = width - len(title) - 4
    yield f"{title}  {_cut(view.program, left)}" if left > 10 else title, "bold"
    if view.is_stopped:
        yield "The program is stopped (Ctrl-Z or SIGSTOP). Continue it: fg, or kill -CONT", "yellow"
    cpu, memory = usage.cells(view.pid)
    yield (
        f"{metrics.samples_per_s:,.0f} samples/s, {metrics.batches_per_s:,.1f} batches/s; waiting "
        f"{metrics.wait_share:.0%}, step {metrics.step_share:.0%}; {metrics.num_ready} ready",
        "",
    )
    times = [(name, getattr(metrics, name)) for name in ("load", "wait", "step")]
    shown = "; ".join(
        f"{name} {_ms(t.p50_s)}/{_ms(t.p95_s)}/{_ms(t.p99_s)}" for name, t in times if t.p99_s
    )
    if shown:
        yield f"p50/p95/p99 in ms: {shown}", ""
    num_bad = sum(metrics.bad_samples.values())
    line = f"{metrics.num_batches:,} batches; {metrics.num_restarts} restarts "
    line += f"({metrics.num_hangs} hung), {num_bad} bad samples{usage.reading(view)}"
    yield f"{line}; ring {size(view.ring_bytes)}; main {cpu} CPU, {memory}", ""
    if view.waiting_s is not None:
        yield f"The loop has been waiting for a batch for {view.waiting_s:.0f} s.", "red"
    elif view.idle_s > 2:
        yield f"The last batch was delivered {view.idle_s:.0f} s ago.", "yellow"
    yield metrics.verdict.sentence, ""
    if metrics.verdict.remedy:
        yield f"Try: {metrics.verdict.remedy}", "green"


def _overview(loaders: list[LoaderView], usage: _Usage, room: int) -> Table:
    """Return one line for each loader, where the window has no room for more."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("pid", "rank", "dataset", "samples/s", "waiting", "workers", "CPU", "bottleneck"):
        is_text = name in ("dataset", "bottleneck")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for view in loaders[:room]:
        state = view.metrics.verdict.cause
        if view.is_stopped:
            state = "stopped"
        elif view.waiting_s is not None:
            state = f"waiting for {view.waiting_s:.0f} s"
        cells = (f"{view.metrics.samples_per_s:,.0f}", f"{view.metrics.wait_share:.0%}")
        more = (str(len(view.workers)), usage.cells(view.pid)[0], state)
        dataset = str(view.facts.get("dataset"))
        table.add_row(str(view.pid), view.rank or "", dataset, *cells, *more)
    if len(loaders) > room:
        table.add_row("", "", f"and {len(loaders) - room} more", *[""] * 5)
    return table


def _worker_table(view: LoaderView, usage: _Usage, room: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "pid", "state", "sample", "for", "CPU", "memory", "restarts"):
        table.add_column(name, justify="left" if name in ("state", "sample") else "right")
    workers = sorted(view.workers, key=lambda worker: -worker.busy_s)
    for worker in sorted(workers[:room], key=lambda worker: worker.number):
        busy = f"{worker.busy_s:.1f} s" if worker.busy_s else ""
        cells = (worker.state, _sample(worker), busy, *usage.cells(worker.pid))
        is_odd = worker.state in ("lost", "stopped") or worker.busy_s > LONG_S
        pid = "remote" if worker.pid is None else str(worker.pid)
        row = (str(worker.number), pid, *cells, str(worker.num_restarts or ""))
        table.add_row(*row, style="yellow" if is_odd else None)
    if len(workers) > room:
        table.add_row("", "", f"and {len(workers) - room} more", *[""] * 5)
    return table


def _sample(worker: WorkerView) -> str:
    if worker.sample is not None:
        return worker.sample
    return "" if worker.position is None else f"position {worker.position}"


def _stacks(view: LoaderView) -> Iterator[tuple[str, str]]:
    """Yield the stacks of the workers that have been busy for long."""
    from penstock.engine.parent.stacks import take_stack

    for worker in view.workers:
        if worker.busy_s > LONG_S and worker.pid not in (view.pid, None):
            name = f"worker {worker.number} (pid {worker.pid}), {worker.busy_s:.0f} s"
            yield name, take_stack(worker.pid, worker.stack_fd)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}"
