"""Makes a failing program smaller by dropping parts of it, while it still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from support.programs import promises
from support.programs.record import Program

MAX_TRIES = 80

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, max_tries: int = MAX_TRIES) -> Program:
    """Return the smallest failing program found within ``max_tries`` runs.

    Args:
        fails: Runs a program. It may need several tries if a failure depends on timing.
    """
    num_tries = 0
    tried = {program}
    while True:
        for candidate in _smaller(program):
            if candidate in tried:
                continue
            if num_tries >= max_tries:
                return program
            tried.add(candidate)
            num_tries += 1
            if fails(candidate):
                program = candidate
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one part less, the largest steps first."""
    simple = Program()
    for field in dataclasses.fields(program):
        value, default = getattr(program, field.name), field.default
        if value == default:
            continue
        for other in _simpler(value, default):
            candidate = promises.settle(program.having(**{field.name: other}))
            if _weight(candidate) < _weight(program):
                yield candidate
    if program.num_workers != 0 and simple.num_workers == program.num_workers:
        candidate = promises.settle(program.having(num_workers=0))
        if _weight(candidate) < _weight(program):
            yield candidate


def _simpler(value: object, default: object) -> Iterator[object]:
    yield default
    if isinstance(value, tuple):
        for place in range(len(value)):
            yield value[:place] + value[place + 1 :]
        for place, item in enumerate(value):
            if isinstance(item, tuple) and len(item) >= 3 and item[1:3] != (0, 1):
                yield (*value[:place], (item[0], 0, 1, *item[3:]), *value[place + 1 :])
                yield (*value[:place], (item[0], 0, item[2], *item[3:]), *value[place + 1 :])
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (number for number in (value // 2, value - 1) if number > 0)


def _weight(program: Program) -> tuple[int, ...]:
    """Return a measure that decreases with each step, so that shrinking terminates."""
    given = sum(
        getattr(program, field.name) != field.default for field in dataclasses.fields(program)
    )
    parts = sum(len(getattr(program, name)) for name in ("draws", "wraps", "bad", "events"))
    places = sum(event[1] * 100 + event[2] for event in program.events)
    workers = program.num_workers if isinstance(program.num_workers, int) else 9
    numbers = workers + program.epochs + program.keep + (program.batch_size or 5)
    return (given + parts, program.length + program.sample_ms, numbers, places)
