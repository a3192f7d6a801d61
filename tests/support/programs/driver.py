"""Runs many programs in a child process that can hang or die, and reports the failures.

The child reads one program per line and replies with one line of JSON that lists the problems. It
exits, with the stacks of its threads on standard error, when a program takes longer than
:data:`LIMIT_S`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.paths import TESTS
from support.programs import record
from support.programs.record import Program
from support.programs.shrinking import MAX_TRIES, shrink

LIMIT_S = 240.0
"""A program takes well under a second. With spawned workers it takes some seconds."""
PROGRAMS_PER_CHILD = 40
MAX_TRIES_OF_HANGS = 8


# -- the child -------------------------------------------------------------------------------------


def serve(limit_s: float = LIMIT_S) -> None:
    """Check programs until standard input ends."""
    import gc
    import logging

    from support.programs.checking import check

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of user code is not a reply
    warnings.simplefilter("ignore")
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # exclude torch's objects from the many collections
    for line in sys.stdin:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        problems = check(record.parse(line))
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(problems) + "\n")
        answers.flush()


class Child:
    """A process that checks programs in sequence."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        given = os.environ.get("PYTHONPATH")
        paths = [str(TESTS), str(TESTS.parent / "src"), *([given] if given else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.programs", "--serve", str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "NO_ALBUMENTATIONS_UPDATE": "1",
            },
        )
        self.num_checked = 0

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self, program: Program) -> list[str]:
        """Return the problems of a program. A hang or death of the child is a problem."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.num_checked += 1
        try:
            self._process.stdin.write(f"{program!r}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            problems: list[str] = json.loads(answer)
            return problems
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        if "Timeout (" in said:
            return [f"hangs: {said[said.rindex('Timeout (') :][:3000]}"]
        return [f"ended the process with status {status}: {said[-3000:]}"]

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


# -- the parent ------------------------------------------------------------------------------------


@dataclass
class Found:
    """A failing program, as drawn and after shrinking."""

    number: int
    drawn: Program
    smallest: Program
    problems: list[str]

    def __str__(self) -> str:
        lines = [f"program {self.number}:", f"  {self.smallest!r}"]
        lines += [f"    {text}" for text in self.problems]
        if self.smallest != self.drawn:
            lines.append(f"  drawn as {self.drawn!r}")
        return "\n".join(lines)


@dataclass
class Report:
    """Results of a session."""

    seed: int
    num_programs: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        events = ", ".join(f"{count} {name}" for name, count in sorted(self.parts.items()))
        return (
            f"{self.num_programs} random programs in {self.seconds / 60:.1f} minutes, seed "
            f"{self.seed} ({events}): {self.num_failed} differ"
        )


class Session:
    """Draws programs from a seed, checks them, and shrinks those that fail.

    Args:
        num_shrunk: How many failures of one kind are shrunk.
    """

    def __init__(self, seed: int, *, num_shrunk: int = 1) -> None:
        self.report = Report(seed)
        self._num_shrunk = num_shrunk
        self._child: Child | None = None
        self._kinds: Counter[str] = Counter()

    def programs(self, *, allows_spawn: bool) -> Iterator[tuple[int, Program]]:
        number = 0
        while True:
            chance = random.Random(f"{self.report.seed} {number}")
            yield number, record.draw_program(chance, allows_spawn=allows_spawn)
            number += 1

    def check(self, program: Program) -> list[str]:
        if self._child is None or self._child.num_checked >= PROGRAMS_PER_CHILD:
            self.close()
        if self._child is None:
            self._child = Child()
        problems = self._child.check(program)
        if problems:
            self.close()  # a failure can leave something behind
        return problems

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def run(
        self, *, count: int | None = None, minutes: float | None = None, allows_spawn: bool = True
    ) -> Iterator[Found]:
        """Check this many programs, or run for this long. Yields each failure when it is found."""
        start = time.monotonic()
        try:
            for number, program in self.programs(allows_spawn=allows_spawn):
                spent = time.monotonic() - start
                if number == count or (minutes is not None and spent > minutes * 60):
                    return
                problems = self.check(program)
                self._count(program)
                if problems:
                    yield self._follow(number, program, problems)
                self.report.seconds = time.monotonic() - start
        finally:
            self.close()

    def _count(self, program: Program) -> None:
        self.report.num_programs += 1
        self.report.parts.update(event[0] for event in program.events)

    def _follow(self, number: int, program: Program, problems: list[str]) -> Found:
        self.report.num_failed += 1
        kind = kind_of(problems)
        self._kinds[kind] += 1
        smallest = program
        if self._kinds[kind] <= self._num_shrunk:
            last = {program: problems}

            def fails(candidate: Program) -> bool:
                found = self.check(candidate)
                if found and kind_of(found) == kind:
                    last[candidate] = found
                    return True
                return False

            # Each program that hangs takes the full time limit.
            is_slow = kind.startswith("hangs")
            smallest = shrink(program, fails, MAX_TRIES_OF_HANGS if is_slow else MAX_TRIES)
            problems = last[smallest]
        found = Found(number, program, smallest, problems)
        self.report.found.append(found)
        return found


def kind_of(problems: list[str]) -> str:
    """Return the kind of a problem. Problems of one kind have the same first words."""
    words = re.sub(r"[\d.]+", "#", problems[0].split(":")[0])
    reference = "torch" if "torch's loader" in problems[0] else ""
    return f"{words} {reference}".strip()
