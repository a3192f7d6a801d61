"""``penstock run train.py``: somebody's script, unchanged, with our loader under it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cli import USAGE_ERROR
from penstock.cli.run_checks import RunOptions, check_options
from penstock.cli.run_seeds import hash_notes, seed_early, seed_torch
from penstock.errors import BadTrace, PenstockError
from penstock.integrations import script_runner as running

if TYPE_CHECKING:
    from penstock.conv.bypass import Bypass
    from penstock.integrations.patched_loader import PatchReport

_ENGINE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "engine", "")
NESTED = "PENSTOCK_RUN"
"""Set in the environment of a run: programs that it starts report only what they changed."""


def run_to_end(options: RunOptions) -> NoReturn:
    """Run it and exit as it does, or say why it cannot be run."""
    try:
        run(options)
    except PenstockError as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)


def run(options: RunOptions) -> NoReturn:
    """Run it and exit as it does."""
    check_options(options)
    report = _Report()
    if options.conv is not None:
        os.environ["PENSTOCK_CONV"] = options.conv  # programs that the script starts, too
    if options.seed is not None:
        seed_early(options.seed)
    running.when_imported("torch", lambda: report.begin(options), needs=running.ROOMS_WITH_TORCH)
    if options.is_module:
        running.run_module(options.target, options.arguments)
    running.run_file(options.target, options.arguments)


class _Report:
    """What is said at the end."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._tally: PatchReport | None = None
        self._is_nested = False
        self._num_forks = 0
        self._seeded = ""
        self._notes: list[str] = []
        self._bypass: Bypass | None = None
        self._trace: _RunTrace | None = None

    def begin(self, options: RunOptions) -> None:
        """torch is there: patch it, and seed."""
        from penstock.integrations.patch import patch

        if options.conv in ("auto", "on"):
            from penstock.conv.bypass import bypass_convolutions

            self._bypass = bypass_convolutions(options.conv)  # type: ignore[arg-type]
        try:
            if options.trace is not None:
                self._trace = _RunTrace(options.trace)
                options.patch["trace"] = True
            self._tally = patch(seed=options.seed, **options.patch)
        except PenstockError as error:
            print(f"penstock: the script runs without it. {error}", file=sys.stderr)
            return
        if options.seed is not None:
            seed_torch(options.seed)
            self._seeded = f"; seed {options.seed}"
            self._notes = hash_notes(options.seed)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._count_fork)
        self._is_nested = NESTED in os.environ
        os.environ.setdefault(NESTED, str(self._owner))
        atexit.register(self.print)

    def _count_fork(self) -> None:
        """Called in this process after each fork of it, with the forking code on the stack."""
        frame: Any = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
            frame = frame.f_back
        self._num_forks += frame is None

    def _own_processes(self) -> list[str]:
        """What the script does about processes by itself."""
        import multiprocessing

        lines = []
        method = multiprocessing.get_start_method(allow_none=True)
        if method not in (None, multiprocessing.get_all_start_methods()[0]):
            lines.append(
                f"the script has multiprocessing start processes by {method!r}: its own are, "
                "workers come as they would without it"
            )
        if self._num_forks:
            lines.append(
                f"{self._num_forks} process(es) were forked from the script by itself: their "
                "loaders run on the engine too, and are not counted here"
            )
        return lines

    def print(self) -> None:
        """One paragraph on stderr, at the very end."""
        tally = self._tally
        if tally is None or os.getpid() != self._owner:
            return
        if self._is_nested and not tally.num_loaders and self._bypass is None:
            return
        if not tally.num_loaders:
            lines = [f"no DataLoader of torch's was iterated: no loader was changed{self._seeded}"]
            lines += [] if self._trace is None else self._trace.write()
        else:
            loaders = f"{tally.num_loaders} loader{'s' if tally.num_loaders > 1 else ''}"
            lines = [f"{loaders} ran on Penstock's engine{self._seeded}"]
            lines += [f"changed: {line}" for line in dict.fromkeys(tally.changes)]
            if tally.num_restarts:
                lines.append(f"saved: {tally.num_restarts} lost worker(s) were replaced")
            if self._trace is not None:
                lines += self._trace.write()
            if tally.num_bad:
                lines.append(f"saved: {tally.num_bad} bad sample(s) were left out or replaced")
            lines += [
                f"note: {line}" for line in (*tally.notes, *self._notes, *self._own_processes())
            ]
        if self._bypass is not None:
            lines.append(str(self._bypass))
            lines += [f"lost to another library: {name}" for name in self._bypass.check()]
        rank = os.environ.get("RANK")
        name = "penstock" if rank is None else f"penstock (rank {rank})"
        print("\n".join(f"{name}: {line}" for line in lines), file=sys.stderr, flush=True)


class _RunTrace:
    """The timeline of everything that was loaded."""

    def __init__(self, path: str) -> None:
        from penstock.trace.recorder import keep_recorders

        rank = os.environ.get("RANK")
        stem, dot, rest = os.path.basename(path).partition(".")
        name = stem if rank is None else f"{stem}-rank{rank}"
        self._path = os.path.abspath(os.path.join(os.path.dirname(path), name + dot + rest))
        self._recorders = keep_recorders()

    def write(self) -> list[str]:
        """Write it, if anything was loaded; what there is to say."""
        if not self._recorders:
            return []
        from penstock.trace.recorder import merge_records
        from penstock.trace.timeline import Timeline

        timeline = Timeline(merge_records([one.records() for one in self._recorders]))
        try:
            timeline.save(self._path)
        except BadTrace as error:
            return str(error).splitlines()
        return [f"trace: {self._path}", *str(timeline.verdict).splitlines()]
