"""The parent's book of bad samples: which, how often, and when it is too many."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

from penstock.engine.loading.bad_sample_file import BadSample, append, plain_index
from penstock.engine.loading.bad_samples import MAX_SUBSTITUTES, BadSampleReport
from penstock.errors import BadArgument, TooManyBad

log = logging.getLogger("penstock")

LOGGED = 5
"""Bad samples that are logged one by one; the rest are in the list and the file."""
SEEN_ENOUGH = 100
"""A fraction of an epoch of unknown length is judged from this many samples on."""


class BadSampleLog:
    """Counts bad samples of one loader over its epochs.

    Args:
        max_bad: More than this many (an int) or this part (a float below 1) of one epoch's samples
            are an error; None: any number, as long as something is left.
        path: A file that gets a line of JSON for each.
    """

    def __init__(self, max_bad: float | None = None, path: str | None = None) -> None:
        self.max_bad = _checked_budget(max_bad)
        self.path = path
        self.poison: dict[int | str, Exception] = {}
        """Samples that took down workers, by index: they are not tried again."""
        self._samples: dict[int | str, BadSample] = {}
        self._epoch = -1
        self._positions: list[int] = []

    @property
    def samples(self) -> list[BadSample]:
        """One entry for each bad sample, in the order in which they were found."""
        return list(self._samples.values())

    def positions(self, epoch: int) -> list[int]:
        """Where bad samples stood in this epoch, as far as it was delivered."""
        return list(self._positions) if epoch == self._epoch else []

    def restore(self, epoch: int, positions: list[int], poison: list[Any]) -> None:
        """Take over what a saved state says about an epoch that is to be resumed."""
        self._epoch, self._positions = epoch, list(positions)
        for index in poison:
            self.poison.setdefault(index, RuntimeError("it took down workers in an earlier run"))

    def poisoned(self, index: Any, error: Exception) -> None:
        """A sample took down workers twice."""
        self.poison[plain_index(index)] = error

    def take(self, found: Iterable[BadSampleReport], epoch: int, num_samples: int | None) -> None:
        """Bad samples of a batch that is about to be delivered.

        Args:
            num_samples: The epoch's, where that is known.

        Raises:
            TooManyBad: The budget is spent.
        """
        if epoch != self._epoch:
            self._epoch, self._positions = epoch, []
        before = list(self._positions)
        try:
            for one in found:
                self._note(one, epoch)
                if one.position not in self._positions[-MAX_SUBSTITUTES:]:  # a substitute's: known
                    self._positions.append(one.position)
                self._check(one, num_samples)
        except TooManyBad:
            self._positions = before  # the batch is not delivered
            raise

    def _note(self, one: BadSampleReport, epoch: int) -> None:
        key = plain_index(one.index)
        if one.index is None:  # of an iterable dataset
            key = f"the one at {one.position}"
        before = self._samples.get(key)
        sample = BadSample(
            index=key,
            error=one.error,
            path=one.path,
            count=1 if before is None else before.count + 1,
            epoch=epoch,
            position=one.position,
            end=one.end,
        )
        self._samples[key] = sample
        is_told = one.error.startswith(("WorkerDied", "SampleTimeout"))  # when it was lost
        if before is None and len(self._samples) <= LOGGED and not is_told:
            rest = " (more are in loader.bad_samples)" if len(self._samples) == LOGGED else ""
            where = f" ({one.path})" if one.path else ""
            log.warning("sample %s%s is bad: %s%s", key, where, one.error, rest)
        if self.path is not None:
            try:
                known = {name: value for name, value in vars(sample).items() if name != "time"}
                append(self.path, known)
            except OSError as error:
                log.warning("bad samples are not written to %s any more: %s", self.path, error)
                self.path = None

    def _check(self, last: BadSampleReport, num_samples: int | None) -> None:
        if self.max_bad is None:
            return
        most: float = self.max_bad
        if isinstance(self.max_bad, float):
            whole = num_samples or max(SEEN_ENOUGH, last.position + 1)
            most = math.floor(self.max_bad * whole)
        if len(self._positions) > most:
            raise self._too_many(
                f"{len(self._positions)} bad samples in epoch {self._epoch}, and "
                f"max_bad={self.max_bad} allows {most:.0f}"
            ) from None

    def end_epoch(self, epoch: int, num_batches: int) -> None:
        """An epoch is over.

        Raises:
            TooManyBad: Nothing of it was left.
        """
        if not num_batches and self.positions(epoch):
            raise self._too_many(f"all samples of epoch {epoch} were bad")

    def _too_many(self, what: str) -> TooManyBad:
        worst = self.samples[-3:]
        lines = "".join(
            f"\n  sample {one.index}{f' ({one.path})' if one.path else ''}: {one.error}"
            for one in worst
        )
        return TooManyBad(
            f"{what}; the last:{lines}",
            likely="the same cause each time: a wrong folder, a missing disk, a changed format.",
            remedy=f"penstock doctor {self.path}"
            if self.path
            else 'DataLoader(..., bad_samples_file="bad.jsonl"), then penstock doctor bad.jsonl',
            num_bad=len(self._positions),
            bad_samples=self.samples,
        )


def _checked_budget(max_bad: Any) -> float | None:
    is_count = isinstance(max_bad, int) and not isinstance(max_bad, bool) and max_bad >= 0
    is_part = isinstance(max_bad, float) and 0.0 <= max_bad < 1.0
    if max_bad is None or is_count or is_part:
        return max_bad  # type: ignore[no-any-return]
    raise BadArgument(
        f"max_bad={max_bad!r} is neither a count from 0 up nor a part from 0.0 to below 1.0",
        remedy="DataLoader(..., max_bad=100) or max_bad=0.01",
    )
