"""Compares a program with its references and describes the differences.

samples    torch's own loader without workers, over the same dataset and indices, if nothing
           is drawn
bits       Penstock's loader without workers, without deaths and without resuming
the loop   its draws equal those around torch's loader, and batches it holds do not change
the end    no process, descriptor, segment, mapping or thread is left
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils.data import default_collate, default_convert

from support import leftovers
from support.programs import parts, promises, running
from support.programs.record import Program

MAX_PROBLEMS = 5
MAX_LINE = 600


def check(program: Program) -> list[str]:
    """Run this program and return the list of problems."""
    before = leftovers.look()
    problems = _list_problems(program)
    left = leftovers.wait_until_clean(before)
    problems += [f"left behind: {text}" for text in left]
    return [text[:MAX_LINE] for text in problems]


def _list_problems(program: Program) -> list[str]:
    problems: list[str] = []
    try:
        for problem in itertools.islice(_differences(program), MAX_PROBLEMS):
            problems.append(problem)  # noqa: PERF402 (keeps the problems found before an exception)
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-3:])
        problems.append(f"raised {type(error).__name__}: {error}: {text}")
    return problems


def _differences(program: Program) -> Iterator[str]:
    actual = running.run(program)
    yield from actual.problems
    if program.source == "iterable":
        yield from _compare_stream(program, actual)
    else:
        yield from _compare_bits(program, actual)
        yield from _compare_with_torch(program)
    if promises.draws_differ(program):
        yield from _find_repeated_draws(program)


def without_workers(program: Program) -> Program:
    """Return the same loop without workers, deaths, resuming or forks by the user."""
    return program.having(
        # torch accepts persistent workers only if there are workers.
        num_workers=1 if program.persistent_workers else 0,
        pool="inline" if program.persistent_workers else "auto",
        start_method=None,
        prefetch_factor=None,
        in_order=True,
        worker_init="",
        sample_ms=0,
        events=program.events_of("break"),
    )


def _without_draws(program: Program) -> Program:
    collate = "list" if program.collate in ("draws", "held") else program.collate
    return program.having(draws=(), collate=collate)


def _compare_bits(program: Program, actual: running.Run) -> Iterator[str]:
    """Compare with a run without workers, or with a second run if workers own the generators."""
    if promises.belongs_to_worker(program) and program.draws:
        reference, name = running.run(program), "the same run again"
    else:
        reference, name = running.run(without_workers(program)), "no workers"
    yield from _compare(actual, reference, name, in_order=program.in_order)
    if promises.keeps_user_generators(program):
        yield from _compare_drawn(actual, reference, name)


def _compare_with_torch(program: Program) -> Iterator[str]:
    if not promises.has_torch_reference(program):
        return
    # torch draws one base seed for all epochs of persistent workers, and none without workers.
    plain = without_workers(program.having(persistent_workers=False))
    if not promises.belongs_to_worker(program):
        plain = _without_draws(plain)
    ours = running.run(plain)
    theirs = running.run(plain, running.make_torchs)
    yield from _compare(ours, theirs, "torch's loader", in_order=True)
    yield from _compare_drawn(ours, theirs, "torch's loader")


def _compare(
    run: running.Run, reference: running.Run, name: str, *, in_order: bool
) -> Iterator[str]:
    pairs = itertools.zip_longest(run.epochs, reference.epochs, fillvalue=())
    for epoch, (batches, others) in enumerate(pairs):
        if not in_order:
            if Counter(batches) != Counter(others):
                missing = list((Counter(others) - Counter(batches)).elements())[:2]
                extra = list((Counter(batches) - Counter(others)).elements())[:2]
                yield f"epoch {epoch}: other batches than {name}: {extra} and not {missing}"
            continue
        if len(batches) != len(others):
            yield f"epoch {epoch}: {len(batches)} batches, {name}: {len(others)}"
        for number, (batch, other) in enumerate(zip(batches, others)):  # noqa: B905
            if batch != other:
                yield f"epoch {epoch}, batch {number}: {batch}, {name}: {other}"
                break


def _compare_drawn(run: running.Run, reference: running.Run, name: str) -> Iterator[str]:
    if run.drawn == reference.drawn:
        return
    for number, (mine, other) in enumerate(zip(run.drawn, reference.drawn)):  # noqa: B905
        if mine != other:
            yield f"the loop's own draw {number}: {mine}, {name}: {other}"
            return
    yield f"the loop drew {len(run.drawn)} times, {name}: {len(reference.drawn)}"


# -- iterable datasets -----------------------------------------------------------------------------


def _compare_stream(program: Program, actual: running.Run) -> Iterator[str]:
    """Compare streams: each worker has its own part, and batches alternate between workers."""
    if program.draws:
        again = running.run(program)
        yield from _compare(actual, again, "the same run again", in_order=program.in_order)
        return
    if program.pool == "thread":  # "An iterable dataset gets one thread" (docs/compatibility.md)
        counts: tuple[int, ...] = (1,)
    elif program.num_workers == "auto":
        counts = tuple(range(1, 33))
    else:
        counts = (max(1, int(program.num_workers)),)
    found: list[str] = []
    for num_workers in counts:
        expected = _expect_stream(program, num_workers)
        found = list(_compare(actual, expected, f"{num_workers} parts", in_order=program.in_order))
        if not found:
            return
    yield from found


def _expect_stream(program: Program, num_workers: int) -> running.Run:
    made = parts.Made(program)
    collate = parts.make_collate(program.collate)
    size = program.batch_size
    if collate is None:
        collate = default_collate if size else default_convert
    queues = []
    for worker in range(num_workers):
        samples = [made[index] for index in range(worker, len(made), num_workers)]
        if size is None:
            queues.append([collate(sample) for sample in samples])
            continue
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        if program.drop_last:
            groups = [group for group in groups if len(group) == size]
        queues.append([collate(group) for group in groups])
    rounds = itertools.zip_longest(*queues, fillvalue=_NOTHING)
    batches = [
        running.describe(batch) for turn in rounds for batch in turn if batch is not _NOTHING
    ]
    breaks = {event[1]: event[2] for event in program.events_of("break")}
    epochs = []
    for epoch in range(program.epochs):
        until = breaks.get(epoch, len(batches))
        epochs.append(batches[: until if until <= len(batches) else len(batches)])
    return running.Run(epochs=epochs)


_NOTHING: Any = object()


# -- draws of samples ------------------------------------------------------------------------------


def _find_repeated_draws(program: Program) -> Iterator[str]:
    """Find samples with equal draws, which a comparison with an equally wrong reference misses."""
    simple = without_workers(program).having(form="int", collate="list", wraps=(), events=())
    simple = promises.settle(simple)
    dataset = parts.make_dataset(simple, None)  # type: ignore[arg-type]
    loader = running.make_ours(simple, dataset)
    drawn: list[list[int]] = []
    for _ in range(max(2, simple.epochs)):
        for batch in loader:
            samples = [batch] if simple.batch_size is None else batch
            drawn += [[int(number) for number in sample[1]] for sample in samples]
    for name, column in zip(simple.draws, zip(*drawn)):  # noqa: B905
        if len(set(column)) < len(column):
            yield f"{len(column) - len(set(column))} of {len(column)} samples repeat a draw: {name}"
