"""``penstock run train.py``: runs an unchanged script with Penstock behind its DataLoaders.

Options before the script belong to Penstock. The script's name and everything after it belong to
the script. This module does not import torch. When the script imports it, torch's DataLoader is
patched.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cli.parser import CommandParser, add_loader_options, number, one_of, percent
from penstock.cli.run_seeds import hash_notes, restart_with_hash_seed, seed_early, seed_torch
from penstock.errors import BadArgument, BadTrace, PenstockError
from penstock.options import PatchOptions, RunDefaults, options_of, run_defaults

if TYPE_CHECKING:
    from penstock.conv.bypass import Bypass
    from penstock.integrations.patched_loader import PatchReport
    from penstock.trace.timeline import Timeline

WAITED = 3
"""Exit status of a script that succeeded but waited for batches longer than allowed."""
NESTED = "PENSTOCK_RUN"
"""Environment variable set during a run, so that nested programs report only their changes."""
_OPTIONS = [option.name for option in options_of(PatchOptions).values() if option.flag]


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.epilog = f"Exit status: that of the script, or {WAITED} after --max-wait."
    parser.unknown_option_hint = "Options of the script go after its name"
    parser.add_argument(
        "script",
        nargs=argparse.PARSER,  # one argument, and everything after it
        metavar="SCRIPT [ARGUMENTS]...",
        help="A script (or a module, with -m) and its arguments.",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="Run a module, like python -m."
    )
    add_loader_options(parser, *_OPTIONS)
    parser.add_value(
        "--conv",
        "auto|on|off",
        one_of("auto", "on", "off"),
        "Bypass the GPU's convolution library: only where it is broken (auto), or always (on).",
    )
    parser.add_value(
        "--max-wait",
        "N%",
        percent,
        f"Exit with status {WAITED} if the loop waits for batches for more than this share of its "
        "time, beyond the noise.",
    )
    parser.add_value(
        "--metrics-port",
        "N",
        number(int, 0, 65535),
        "Serve the metrics of the loaders for Prometheus. Each rank of a machine takes the next "
        "free port. 0: any free port.",
    )


def execute(options: argparse.Namespace) -> NoReturn:
    """Run the script and exit with its exit status."""
    if options.seed is not None:
        restart_with_hash_seed(options.seed)
        seed_early(options.seed)
    from penstock.integrations import script_runner  # after a possible restart of Python

    patch_options = {name: getattr(options, name) for name in _OPTIONS}
    if options.bad_samples_file is not None:
        patch_options["bad_samples_file"] = _writable(options.bad_samples_file)
    trace = None
    if options.trace is not None:
        trace = os.path.abspath(options.trace.file)
    if trace is not None or options.max_wait is not None:
        patch_options["trace"] = True  # all loaders are written to one file at the end
    if options.metrics_port is not None:
        from penstock.trace.prometheus import check_client

        check_client()
    if options.conv is not None:
        os.environ["PENSTOCK_CONV"] = options.conv  # also for programs that the script starts
    run = _PatchedRun()
    script_runner.when_imported(
        "torch",
        lambda: run.patch_torch(
            patch_options,
            conv=options.conv,
            trace=trace,
            max_wait=options.max_wait,
            metrics_port=options.metrics_port,
        ),
        needs=script_runner.PACKAGES_WITH_TORCH,
    )
    script, *arguments = options.script[options.script[0] == "--" :]
    try:
        if options.is_module:
            script_runner.run_module(script, arguments)
        script_runner.run_file(script, arguments)
    except SystemExit as end:
        if end.code in (None, 0) and run.has_waited():
            sys.exit(WAITED)
        raise


def _writable(file: str) -> str:
    """Return the absolute path, because the script may change the working directory."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(folder):
        raise BadArgument(
            f"--bad-samples-file: folder {folder!r} does not exist", remedy=f"mkdir -p {folder}"
        )
    return os.path.abspath(file)


class _PatchedRun:
    """Patches torch after the script imports it, and prints a report at exit."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._report: PatchReport | None = None
        self._is_nested = False
        self._forks: list[None] = []
        self._seeded = ""
        self._notes: list[str] = []
        self._given: list[str] = []
        self._bypass: Bypass | None = None
        self._trace: _RunTrace | None = None

    def patch_torch(
        self,
        patch_options: dict[str, Any],
        *,
        conv: str | None,
        trace: str | None,
        max_wait: float | None = None,
        metrics_port: int | None = None,
    ) -> None:
        """Patch and seed torch. Called right after torch is imported.

        Args:
            patch_options: Options of :func:`penstock.patch`.
            conv: Mode of :func:`penstock.conv.bypass_convolutions`. If None, ``PENSTOCK_CONV``
                applies.
            trace: File for the timeline of all loaders.
            max_wait: Largest share of the time that the script may wait for batches.
            metrics_port: First port of the endpoint for Prometheus, or None for no endpoint.
        """
        from penstock.integrations.patch import patch

        if conv in ("auto", "on"):
            from penstock.conv.bypass import bypass_convolutions

            self._bypass = bypass_convolutions(conv)  # type: ignore[arg-type]
        try:
            if trace is not None or max_wait is not None:
                self._trace = _RunTrace(trace, max_wait)
            self._report = patch(**patch_options)
            self._give_defaults(patch_options)
        except PenstockError as error:
            print(f"penstock: the script runs without Penstock. {error}", file=sys.stderr)
            return
        if metrics_port is not None:
            from penstock.trace.recorder import when_made

            # Not before the first loader: a fork server is forked from a process without threads.
            when_made(functools.partial(_serve_metrics, metrics_port))
        seed = patch_options["seed"]
        if seed is not None:
            seed_torch(seed)
            self._seeded = f"; seed {seed}"
            self._notes = hash_notes(seed)
        if hasattr(os, "register_at_fork"):
            # This hook runs no Python code, because a Ctrl-C during it would be lost.
            os.register_at_fork(after_in_parent=functools.partial(self._forks.append, None))
        self._is_nested = NESTED in os.environ
        os.environ.setdefault(NESTED, str(self._owner))
        atexit.register(self.print)

    def _give_defaults(self, patch_options: dict[str, Any]) -> None:
        """Give the options of the command to loaders of the script that are Penstock's own."""
        known = options_of(PatchOptions)
        self._given = [name for name in _OPTIONS if patch_options[name] != known[name].default]
        named = [name for name in self._given if name in RunDefaults.NAMES]
        run_defaults.values = {name: patch_options[name] for name in named}
        run_defaults.num_loaders = 0

    def _own_loaders(self) -> list[str]:
        """Return notes about loaders of the script that are Penstock's own."""
        if not run_defaults.num_loaders:
            return []
        known, lines = options_of(PatchOptions), []
        applied = [known[name].flag for name in run_defaults.values]
        if applied:
            flags = ", ".join(applied)
            lines = [f"{flags}: also for penstock.DataLoader in the script, unless it sets it"]
        others = {*self._given} - {*run_defaults.values, "seed", "trace"}
        if others:
            flags = ", ".join(known[name].flag for name in _OPTIONS if name in others)
            lines.append(f"{flags}: not for penstock.DataLoader in the script, which sets its own")
        return lines

    def _own_processes(self) -> list[str]:
        """Return notes about the start method and the processes of the script."""
        import multiprocessing

        from penstock.engine.parent.forked_child import ForkedChild
        from penstock.engine.parent.launcher import Launcher

        lines = []
        method = multiprocessing.get_start_method(allow_none=True)
        if method not in (None, multiprocessing.get_all_start_methods()[0]):
            lines.append(
                f"the script sets multiprocessing's start method to {method!r}. It applies to the "
                "script's processes, not to Penstock's workers"
            )
        num_forks = len(self._forks) - Launcher.num_forks - ForkedChild.num_forks
        if num_forks > 0:
            lines.append(
                f"the script forked {num_forks} process(es). Their loaders also run on Penstock's "
                "engine, but are not counted here"
            )
        return lines

    def has_waited(self) -> bool:
        """Return True if the script waited for batches longer than allowed. Called at its end."""
        is_own = self._trace is not None and os.getpid() == self._owner
        return is_own and self._trace.check_wait()  # type: ignore[union-attr]

    def print(self) -> None:
        """Print the report to stderr. Called at exit."""
        from penstock.integrations.fastai import explain_unreached

        report = self._report
        if report is None or os.getpid() != self._owner:
            return
        if self._is_nested and not report.num_loaders and self._bypass is None:
            return
        if not report.num_loaders:
            what = "no DataLoader was iterated"
            if run_defaults.num_loaders:
                what = "the script uses Penstock's DataLoader itself"
            change = "" if run_defaults.values else ", so nothing was changed"
            lines = [f"{what}{change}{self._seeded}"]
            lines += [f"note: {line}" for line in self._own_loaders()]
            lines += [f"note: {line}" for line in explain_unreached()]
            lines += [] if self._trace is None else self._trace.write()
        else:
            loaders = f"{report.num_loaders} loader{'s' if report.num_loaders > 1 else ''}"
            lines = [f"{loaders} ran on Penstock's engine{self._seeded}"]
            lines += [f"changed: {line}" for line in dict.fromkeys(report.changes)]
            if report.num_restarts:
                lines.append(f"recovered: {report.num_restarts} lost worker(s) were replaced")
            if self._trace is not None:
                lines += self._trace.write()
            if report.num_bad:
                lines.append(f"recovered: {report.num_bad} bad sample(s) were skipped or replaced")
            lines += [
                f"note: {line}"
                for line in (
                    *report.notes,
                    *self._notes,
                    *self._own_loaders(),
                    *self._own_processes(),
                )
            ]
        if self._bypass is not None:
            lines.append(str(self._bypass))
            lines += [f"overridden by another library: {name}" for name in self._bypass.check()]
        _print(lines)


def _serve_metrics(port: int) -> None:
    """Serve the metrics of all loaders, and print the address."""
    from penstock.trace.prometheus import serve_metrics

    try:
        text = f"metrics: {serve_metrics(port=port).url}"
    except BadArgument as error:
        text = f"--metrics-port: {error}"
    _print([text])


def _print(lines: list[str]) -> None:
    rank = os.environ.get("RANK")
    name = "penstock" if rank is None else f"penstock (rank {rank})"
    print("\n".join(f"{name}: {line}" for line in lines), file=sys.stderr, flush=True)


class _RunTrace:
    """The timeline of all loaders of the run.

    Args:
        path: File to write, or None.
        max_wait: Largest allowed share of waiting, or None.
    """

    def __init__(self, path: str | None, max_wait: float | None) -> None:
        from penstock.trace.recorder import keep_recorders

        self._path = None if path is None else _path_of_rank(path)
        self._max_wait = max_wait
        self._recorders = keep_recorders()
        self._lines: list[str] = []

    def _timeline(self) -> Timeline:
        from penstock.trace.recorder import merge_records
        from penstock.trace.timeline import Timeline

        return Timeline(merge_records([one.records() for one in self._recorders]))

    def check_wait(self) -> bool:
        """Return True if the loop waited longer than allowed, beyond the noise."""
        if self._max_wait is None:
            return False
        from penstock.trace.regression import MIN_BATCHES, is_busy, measure_wait

        timeline = self._timeline()
        wait = measure_wait(timeline.model)
        if wait is None:
            self._lines = [f"--max-wait was not checked: fewer than {MIN_BATCHES} batches"]
            return False
        text = f"waited for batches {wait.value:.1%} of the time (noise: {wait.noise:.1%})"
        is_above = wait.value - wait.noise > self._max_wait
        word = "above" if is_above else "within"
        if is_above and is_busy(timeline.model):
            why = "other programs used the cores, so this says little about the script"
            self._lines = [f"{text}. --max-wait was not checked: {why}"]
            return False
        self._lines = [f"{text}, {word} --max-wait {self._max_wait:.1%}"]
        if is_above and self._path is None:
            self._lines += str(timeline.verdict).splitlines()
        return is_above

    def write(self) -> list[str]:
        """Write the trace if anything was loaded. Returns the lines for the report."""
        if not self._recorders or self._path is None:
            return self._lines
        timeline = self._timeline()
        try:
            timeline.save(self._path)
        except BadTrace as error:
            return [*self._lines, *str(error).splitlines()]
        return [*self._lines, f"trace: {self._path}", *str(timeline.verdict).splitlines()]


def _path_of_rank(path: str) -> str:
    rank = os.environ.get("RANK")
    stem, dot, rest = os.path.basename(path).partition(".")
    name = stem if rank is None else f"{stem}-rank{rank}"
    return os.path.abspath(os.path.join(os.path.dirname(path), name + dot + rest))
