"""Runs a loader under one setting after the other, and says whether its stream is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.errors import BadArgument
from penstock.options import check_count
from penstock.order.global_generators import preserved_generators
from penstock.verify.causes import Case, find_cause
from penstock.verify.differences import (
    describe,
    describe_move,
    first_leaf,
    first_place,
    first_row,
)
from penstock.verify.factory import factory_of
from penstock.verify.fresh_process import CannotLeave, record_afresh
from penstock.verify.runs import CannotDelay, Extent, Record, capture, record
from penstock.verify.settings import (
    Factory,
    Setting,
    is_not_taken,
    list_settings,
    reason_not_to_spawn,
    taken_by,
)
from penstock.verify.verdict import Cause, Difference, Row, Verdict

WORKERS = (0, 1, 2, 5)


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
    """Does a loader give the same bits whatever loads them? Any loader: ours, torch's, an iterable.

    Each run seeds Python's, NumPy's and torch's generators anew, makes a loader, and hashes every
    sample and every batch. The runs differ in the number of workers, pool, start method, prefetch,
    delays, in being killed and resumed half way, and in the process. At the first difference,
    further runs find the likely cause.

    Args:
        make_loader: A function that makes a new loader. Of the arguments ``num_workers``, ``pool``,
            ``multiprocessing_context`` and ``prefetch_factor``, it is given those that it takes;
            the settings that need others are skipped, and listed as such. Or a DataLoader like
            torch's, which is made again from its attributes.
        epochs: How many are compared.
        workers: Numbers of workers, of which the first is the reference.
        max_batches: Compare only so many of each epoch.
        start_methods: Of worker processes; None: all that this system has. Spawn is slow.
        new_process: Also in a new process with another hash seed; takes a few seconds.
        tell: Called with each setting's name before it is run.

    Raises:
        BadArgument: The factory needs other arguments, or the loader gives nothing.

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
    return _Trial(factory, takes, settings, extent, tell).run()


class _Trial:
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
        with preserved_generators():
            self._loader = factory(**self._reference.arguments)  # to look at, not to run

    def run(self) -> Verdict:
        """Run all settings; explain the first that differs."""
        self._tell(self._reference.name)
        whole = self._run(self._reference)
        if not whole.num_batches:
            raise BadArgument(
                "the loader gave no batch: there is nothing to compare",
                remedy="a factory whose loader has some samples",
            )
        self._extent = replace(self._extent, stops=_stops(whole))
        rows, first = [_row(self._reference, whole, whole)], None
        for setting in self._others:
            self._tell(setting.name)
            row, found = self._try(setting, whole)
            rows.append(row)
            if first is None and found is not None and row.outcome == "differs":
                first = (setting, found)
        difference = None
        if first is not None:
            self._tell("the cause")
            difference = self._explain(whole, *first)
        notes = () if self._takes("num_workers") else (_NO_WORKERS,)
        return Verdict(rows=tuple(rows), difference=difference, notes=notes)

    def _run(self, setting: Setting, seed: int = 0) -> Record:
        extent = replace(self._extent, seed=seed)
        if setting.is_fresh:
            return record_afresh(self._factory, setting, extent)
        return record(self._factory, setting, extent)

    def _try(self, setting: Setting, whole: Record) -> tuple[Row, Record | None]:
        reason = self._not_offered(setting)
        if reason:
            return Row(setting=setting.name, outcome="skipped", note=reason), None
        try:
            found = self._run(setting)
        except (CannotLeave, CannotDelay) as error:
            return Row(setting=setting.name, outcome="skipped", note=str(error)), None
        except Exception as error:
            outcome = "skipped" if is_not_taken(error) else "failed"
            text = (str(error).strip().splitlines() or [""])[0]
            note = f"{type(error).__name__}: {text}"
            return Row(setting=setting.name, outcome=outcome, note=note), None
        return _row(setting, found, whole), found

    def _not_offered(self, setting: Setting) -> str:
        missing = sorted(name for name in setting.needed if not self._takes(name))
        if missing:
            return f"make_loader does not take {', '.join(missing)}"
        loader = self._loader
        if setting.arguments.get("multiprocessing_context") == "spawn":
            return reason_not_to_spawn(loader)
        if setting.resumed_with is not None:
            if not hasattr(loader, "load_state_dict") or not hasattr(loader, "state_dict"):
                return "the loader has no state_dict"
            if not any(self._extent.stops):
                return "the epoch has one batch"
        return ""

    def _explain(self, whole: Record, setting: Setting, other: Record) -> Difference:
        place = first_place(whole, other)
        assert place is not None, "only records that differ are explained"
        row = first_row(whole, other, place)
        field, values = self._values(setting, place, row)
        how, left, right = self._describe(whole, other, place, row, values)
        case = Case(
            reference=self._reference,
            setting=setting,
            one=whole,
            other=other,
            place=place,
            values=values,
            has_own_seed=getattr(self._loader, "seed", None) is not None,
            run=self._run,
            run_afresh=lambda again, hash_seed: record_afresh(
                self._factory, again, self._extent, hash_seed
            ),
        )
        try:
            cause = find_cause(case)
        except Exception as error:  # the loader may fail when it is run once more
            cause = Cause(code="unknown", text=f"looking for it failed: {type(error).__name__}")
        epoch, batch = place
        return Difference(
            one=self._reference.name,
            other=setting.name,
            epoch=epoch,
            batch=batch,
            row=row,
            field=field,
            left=left,
            right=right,
            how=how,
            cause=cause,
        )

    def _values(
        self, setting: Setting, place: tuple[int, int], row: int | None
    ) -> tuple[str, tuple[Any, Any] | None]:
        """The field that differs and its values, from one more run of each."""
        catch = partial(capture, self._factory, extent=self._extent, place=place)
        # A new process cannot hand its values back; this one shows the field all the same.
        try:
            found = [catch(self._reference), catch(setting)]
        except Exception:
            return "", None
        if any(batch is None for batch in found):
            return "", None
        if row is not None and all(isinstance(b, list) and row < len(b) for b in found):
            found = [batch[row] for batch in found]
        leaf = first_leaf(*found)
        return ("", None) if leaf is None else (leaf[0], (leaf[1], leaf[2]))

    def _describe(
        self,
        whole: Record,
        other: Record,
        place: tuple[int, int],
        row: int | None,
        values: tuple[Any, Any] | None,
    ) -> tuple[str, str, str]:
        epoch, number = place
        counts = [
            len(record.epochs[epoch]) if epoch < len(record.epochs) else 0
            for record in (whole, other)
        ]
        if number >= min(counts):
            return "the epoch ends", f"{counts[0]} batches", f"{counts[1]} batches"
        moved = describe_move(whole, other, place, row)
        if moved:
            return moved, "", ""
        if values is None:
            return "other bits, which were not seen again", "", ""
        return describe(*values)


_NO_WORKERS = (
    "make_loader does not take num_workers: the loader was run as it is. "
    "def make_loader(num_workers=0) shows more."
)


def _row(setting: Setting, found: Record, whole: Record) -> Row:
    return Row(
        setting=setting.name,
        outcome="same" if first_place(whole, found) is None else "differs",
        digest=found.digest,
        num_batches=found.num_batches,
        num_samples=found.num_samples,
        took_s=found.took_s,
    )


def _stops(whole: Record) -> tuple[int, ...]:
    """After how many batches of each epoch an interrupted run dies: somewhere in the middle."""
    draw = random.Random(0)
    return tuple(draw.randrange(1, len(epoch)) if len(epoch) > 1 else 0 for epoch in whole.epochs)
