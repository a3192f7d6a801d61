"""Runs a loader under several settings and compares the results.

:func:`verify` is the public ``penstock.verify``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import indent
from typing import Any

from penstock.errors import BadArgument
from penstock.options import check_count
from penstock.order.global_generators import preserved_generators
from penstock.verify.causes import Case, find_cause
from penstock.verify.differences import (
    describe,
    describe_move,
    first_difference,
    first_leaf,
    first_sample,
)
from penstock.verify.factory import Factory, factory_of, is_not_taken, taken_by
from penstock.verify.fresh_process import NewProcessFailed, NotPicklable, run_in_new_process
from penstock.verify.hashed_run import CannotDelay, Extent, HashedRun, capture_batch, run_and_hash
from penstock.verify.settings import Setting, list_settings, reason_not_to_spawn
from penstock.verify.verdict import Cause, Difference, Row, Verdict, describe_error

WORKERS = (0, 1, 2, 5)
_NO_WORKERS = (
    "The loader was run only as given, because it does not accept num_workers. "
    "A function def make_loader(num_workers=0) lets more settings be compared."
)


def verify(
    make_loader: Any,
    *,
    epochs: int = 2,
    workers: Sequence[int] = WORKERS,
    max_batches: int | None = None,
    start_methods: Sequence[str] | None = None,
    new_process: bool = True,
    tell: Callable[[str], None] = lambda setting: None,
) -> Verdict:
    """Check whether a loader gives the same bits under every setting.

    Works with Penstock's loader, torch's, or any iterable. Each run seeds Python's, NumPy's and
    torch's generators, makes a loader, and hashes every sample and every batch. The runs differ in
    the number of workers, pool, start method, prefetch and delays. One run is killed and resumed in
    the middle, and one is in a new process. At the first difference, further runs find the likely
    cause.

    Args:
        make_loader: A function that returns a new loader. It is passed those of the arguments
            ``num_workers``, ``pool``, ``multiprocessing_context`` and ``prefetch_factor`` that it
            accepts. Settings that need the others are skipped and listed. It can also be a
            DataLoader like torch's, which is made again from its attributes.
        epochs: Number of epochs to compare.
        workers: Numbers of workers. The first is the reference.
        max_batches: Compare only this many batches of each epoch.
        start_methods: Start methods of worker processes. None: all that this system has. Spawn is
            slow.
        new_process: Also run in a new process with a different hash seed. Takes a few seconds.
        tell: Called with each setting's name before it is run.

    Raises:
        BadArgument: The factory requires other arguments, or the loader gives no batch.

    Example:
        >>> import penstock, random
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 40
        ...     def __getitem__(self, i):
        ...         return i, random.random()
        >>> def make_loader(num_workers=0):
        ...     return penstock.DataLoader(Noisy(), 8, seed=0, num_workers=num_workers)
        >>> bool(penstock.verify(make_loader, workers=(0, 2)))
        True
    """
    check_count("epochs", epochs, 1)
    if not workers:
        raise BadArgument("workers=() leaves nothing to compare", remedy="workers=(0, 2)")
    numbers = [check_count("workers", number) for number in workers]
    factory = factory_of(make_loader)
    takes = taken_by(factory)
    settings = list_settings(
        numbers, takes_workers=takes("num_workers"), start_methods=start_methods
    )
    settings = [setting for setting in settings if new_process or not setting.is_fresh]
    extent = Extent(num_epochs=epochs, max_batches=max_batches)
    return _Comparison(factory, takes, settings, extent, tell).run()


class _Comparison:
    def __init__(
        self,
        factory: Factory,
        takes: Callable[[str], bool],
        settings: list[Setting],
        extent: Extent,
        tell: Callable[[str], None],
    ) -> None:
        self._factory, self._takes, self._extent, self._tell = factory, takes, extent, tell
        self._reference, *self._others = settings
        self._notes: list[str] = []
        with preserved_generators():
            self._loader = factory(**self._reference.arguments)  # for inspection only

    def run(self) -> Verdict:
        """Run all settings, and explain the first that differs."""
        self._tell(self._reference.name)
        expected = self._run(self._reference)
        if not expected.num_batches:
            raise BadArgument(
                "the loader gave no batch, so there is nothing to compare",
                remedy="a factory whose loader has some samples",
            )
        self._extent = replace(self._extent, stops=_stops(expected))
        rows, first = [_row(self._reference, expected, expected)], None
        for setting in self._others:
            self._tell(setting.name)
            row, found = self._try(setting, expected)
            rows.append(row)
            if first is None and found is not None and row.outcome == "differs":
                first = (setting, found)
        difference = None
        if first is not None:
            self._tell("the cause")
            difference = self._explain(expected, *first)
        if not self._takes("num_workers"):
            self._notes.append(_NO_WORKERS)
        return Verdict(rows=tuple(rows), difference=difference, notes=tuple(self._notes))

    def _run(self, setting: Setting, seed: int = 0) -> HashedRun:
        extent = replace(self._extent, seed=seed)
        if setting.is_fresh:
            return run_in_new_process(self._factory, setting, extent)
        return run_and_hash(self._factory, setting, extent)

    def _try(self, setting: Setting, expected: HashedRun) -> tuple[Row, HashedRun | None]:
        outcome, note = "skipped", self._not_offered(setting)
        if not note:
            try:
                found = self._run(setting)
                return _row(setting, found, expected), found
            except (NotPicklable, CannotDelay) as error:
                note = str(error)
            except NewProcessFailed as error:
                outcome, note = "failed", str(error)
                self._notes.append(f"The new process printed:\n{indent(error.printed, '    ')}")
            except Exception as error:
                outcome, note = "failed", describe_error(error)
                if is_not_taken(error):
                    name = str(error).split("'")[1]
                    outcome, note = "skipped", f"the loader does not accept {name}"
        return Row(setting=setting.name, outcome=outcome, note=note), None

    def _not_offered(self, setting: Setting) -> str:
        missing = sorted(name for name in setting.needed if not self._takes(name))
        if missing:
            return f"the loader does not accept {', '.join(missing)}"
        loader = self._loader
        if setting.arguments.get("multiprocessing_context") == "spawn":
            return reason_not_to_spawn(loader)
        if setting.resumed_with is not None:
            if not hasattr(loader, "load_state_dict") or not hasattr(loader, "state_dict"):
                return "the loader has no state_dict"
            if not any(self._extent.stops):
                return "the epoch has only one batch"
        return ""

    def _explain(self, expected: HashedRun, setting: Setting, other: HashedRun) -> Difference:
        place = first_difference(expected, other)
        assert place is not None, "only runs that differ are explained"
        sample = first_sample(expected, other, place)
        field, values = self._find_field(setting, place, sample)
        how, left, right = _describe(expected, other, place, sample, values)
        case = Case(
            reference=self._reference,
            setting=setting,
            one=expected,
            other=other,
            place=place,
            values=values,
            has_own_seed=getattr(self._loader, "seed", None) is not None,
            run=self._run,
            run_in_new_process=lambda again, hash_seed: run_in_new_process(
                self._factory, again, self._extent, hash_seed
            ),
        )
        try:
            cause = find_cause(case)
        except Exception as error:  # the loader may fail when it is run again
            cause = Cause(code="unknown", text=f"finding it failed: {type(error).__name__}")
        epoch, batch = place
        return Difference(
            one=self._reference.name,
            other=setting.name,
            epoch=epoch,
            batch=batch,
            row=sample,
            field=field,
            left=left,
            right=right,
            how=how,
            cause=cause,
        )

    def _find_field(
        self, setting: Setting, place: tuple[int, int], sample: int | None
    ) -> tuple[str, tuple[Any, Any] | None]:
        """Return the field that differs and its two values, from another run of each setting."""
        # A new process cannot return its values, but a run in this process shows the field too.
        settings = (self._reference, setting)
        try:
            found = [capture_batch(self._factory, each, self._extent, place) for each in settings]
        except Exception:
            return "", None
        if any(batch is None for batch in found):
            return "", None
        if sample is not None and all(isinstance(b, list) and sample < len(b) for b in found):
            found = [batch[sample] for batch in found]
        leaf = first_leaf(*found)
        return ("", None) if leaf is None else (leaf[0], (leaf[1], leaf[2]))


def _describe(
    expected: HashedRun,
    other: HashedRun,
    place: tuple[int, int],
    sample: int | None,
    values: tuple[Any, Any] | None,
) -> tuple[str, str, str]:
    """Return (how two runs differ, the first value as text, the second value as text)."""
    epoch, number = place
    counts = [len(run.batches(epoch)) for run in (expected, other)]
    if number >= min(counts):
        return "the number of batches differs", f"{counts[0]} batches", f"{counts[1]} batches"
    moved = describe_move(expected, other, place, sample)
    if moved:
        return moved, "", ""
    if values is None:
        return "different bits, which did not appear again in another run", "", ""
    return describe(*values)


def _row(setting: Setting, found: HashedRun, expected: HashedRun) -> Row:
    return Row(
        setting=setting.name,
        outcome="same" if first_difference(expected, found) is None else "differs",
        digest=found.digest,
        num_batches=found.num_batches,
        num_samples=found.num_samples,
        took_s=found.took_s,
    )


def _stops(expected: HashedRun) -> tuple[int, ...]:
    """Return the number of batches in each epoch after which an interrupted run is killed."""
    draw = random.Random(0)
    lengths = [len(epoch) for epoch in expected.epochs]
    return tuple(draw.randrange(1, length) if length > 1 else 0 for length in lengths)
