"""Fault-handling options and counters of a loader: bad samples found, workers replaced.

One ``Faults`` belongs to a loader and is shared with its iterators. It holds neither of them.
The code for bad samples is imported when there is one.

Tested by ``tests/integration/engine/loading/test_bad_samples.py``.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import TooManyBad, warn_user
from penstock.order.epoch_state import EpochState

if TYPE_CHECKING:
    from penstock.engine.loading.bad_sample_file import BadSample
    from penstock.engine.loading.bad_samples import OnError, SampleFailure

log = logging.getLogger("penstock")

LOGGED = 5
"""Number of bad samples that are logged individually. The rest are in the list and the file."""
MAX_CAUSES = 20
"""Number of causes of bad samples that are counted by name."""
SEEN_ENOUGH = 100
"""Minimum number of samples for a fractional ``max_bad`` if the epoch's length is unknown."""


class Faults:
    """Counts the faults of one loader over its epochs and enforces the limits of its options.

    Args:
        options: The loader's validated fault options. See :mod:`penstock.options`.
        epoch_state: Provides the current epoch.
    """

    def __init__(self, options: Mapping[str, Any], epoch_state: EpochState) -> None:
        self.on_error: OnError = options["on_error"]
        self.max_bad: float | None = options["max_bad"]
        if self.max_bad is not None and self.on_error == "raise":
            warn_user(
                f"max_bad={self.max_bad} has no effect, because on_error='raise' stops at the "
                "first bad sample. Try: DataLoader(..., on_error='skip', max_bad=...)"
            )
        path = options["bad_samples_file"]
        self.path = None if path is None else os.fspath(path)
        self.max_restarts: int = options["max_restarts"]
        self.sample_timeout_s: float | None = options["sample_timeout_s"]
        self.num_restarts = self.num_hangs = 0
        self.num_samples: int | None = None
        """Samples per epoch, if known. Set before an epoch starts."""
        self.num_indices: int | None = None
        """Any index below this may replace a bad sample. None: only indices of its batch."""
        self.order: Any = None
        """The Penstock order, if any. The sources of a mixture have their own limits."""
        self._num_by_source: Counter[int] | None = None
        """Bad samples of each source in this epoch. None: not counted yet."""
        self.poison: dict[int | str, Exception] = {}
        """Samples that crashed or hung workers, by index. They are not loaded again."""
        self._epoch_state = epoch_state
        self._samples: dict[int | str, BadSample] = {}
        self._epoch = -1
        self._positions: list[int] = []

    @property
    def is_tolerant(self) -> bool:
        return self.on_error != "raise"

    @property
    def num_substitutes(self) -> int:
        """Maximum number of substitutes for one sample that may crash or hang workers too."""
        from penstock.engine.loading.bad_samples import MAX_SUBSTITUTES

        return MAX_SUBSTITUTES if self.on_error == "replace" else 0

    @property
    def samples(self) -> list[BadSample]:
        """One entry for each bad sample, in the order they were found."""
        return list(self._samples.values())

    def positions(self, epoch: int) -> list[int]:
        """Return the positions of bad samples in the delivered part of this epoch."""
        return list(self._positions) if epoch == self._epoch else []

    def restore(self, epoch: int, positions: list[int], poison: list[Any]) -> None:
        """Restore the saved state of an epoch that is being resumed."""
        self._epoch, self._positions, self._num_by_source = epoch, list(positions), None
        for index in poison:
            self.poison.setdefault(
                index, RuntimeError("it crashed or hung workers in an earlier run")
            )

    def add_poison(self, index: Any, error: Exception) -> None:
        """Add a sample that crashed or hung workers, even when it was loaded in isolation."""
        from penstock.engine.loading.bad_sample_file import plain_index

        self.poison[plain_index(index)] = error

    def count_restart(self, *, is_hang: bool) -> None:
        """Count a replaced worker."""
        self.num_restarts += 1
        self.num_hangs += is_hang

    def counts(self) -> dict[str, Any]:
        """Return the number of restarts, hangs, and bad samples by type of error."""
        causes: Counter[str] = Counter()
        for sample in list(self._samples.values()):
            cause = sample.error.partition(":")[0]
            is_named = cause in causes or len(causes) < MAX_CAUSES
            causes[cause if is_named else "other"] += 1
        return {
            "num_restarts": self.num_restarts,
            "num_hangs": self.num_hangs,
            "bad_samples": dict(causes),
        }

    def record(self, found: Iterable[SampleFailure]) -> None:
        """Count the bad samples of a batch that is about to be delivered.

        Raises:
            TooManyBad: There are more bad samples than ``max_bad`` allows.
        """
        from penstock.engine.loading.bad_samples import MAX_SUBSTITUTES

        epoch = self._epoch_state.epoch
        if epoch != self._epoch:
            self._epoch, self._positions, self._num_by_source = epoch, [], None
        before = list(self._positions)
        try:
            for one in found:
                self._add(one, epoch)
                if one.position not in self._positions[-MAX_SUBSTITUTES:]:  # not a substitute's
                    self._positions.append(one.position)
                    self._check_source(one.position)
                self._check(one)
        except TooManyBad:
            self._positions, self._num_by_source = before, None  # the batch is not delivered
            raise

    def _add(self, one: SampleFailure, epoch: int) -> None:
        from penstock.engine.loading.bad_sample_file import BadSample, append, plain_index

        key = plain_index(one.index)
        if one.index is None:  # iterable datasets have no indices
            key = f"at position {one.position}"
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
        is_told = one.error.startswith(("WorkerDied", "SampleTimeout"))  # already logged
        if before is None and len(self._samples) <= LOGGED and not is_told:
            rest = " (the rest are in loader.bad_samples)" if len(self._samples) == LOGGED else ""
            where = f" ({one.path})" if one.path else ""
            log.warning("sample %s%s is bad: %s%s", key, where, one.error, rest)
        if self.path is not None:
            try:
                known = {name: value for name, value in vars(sample).items() if name != "time"}
                append(self.path, known)
            except OSError as error:
                log.warning("stopped writing bad samples to %s: %s", self.path, error)
                self.path = None

    def _check(self, last: SampleFailure) -> None:
        if self.max_bad is None:
            return
        most: float = self.max_bad
        if isinstance(self.max_bad, float):
            whole = self.num_samples or max(SEEN_ENOUGH, last.position + 1)
            most = math.floor(self.max_bad * whole)
        if len(self._positions) > most:
            raise self._too_many(
                f"{len(self._positions)} bad samples in epoch {self._epoch}, but "
                f"max_bad={self.max_bad} allows {most:.0f}"
            )

    def _check_source(self, position: int) -> None:
        """Check the limit of a bad sample's source, if the dataset is a mixture with limits."""
        mixture = None if self.order is None else self.order.mixture
        if mixture is None or not mixture.has_limits:
            return
        if self._num_by_source is None:
            before = [place % self.order.length for place in self._positions[:-1]]
            self._num_by_source = Counter(self.order.sources_at(before).tolist())
        source = int(self.order.sources_at([position % self.order.length])[0])
        self._num_by_source[source] += 1
        name, limit = mixture.names[source], mixture.max_bad[source]
        most = limit
        if isinstance(limit, float):
            most = math.floor(limit * self.order.counts(self.order.length)[name])
        if most is not None and self._num_by_source[source] > most:
            raise self._too_many(
                f"{self._num_by_source[source]} bad samples of source {name!r} in epoch "
                f"{self._epoch}, but its max_bad={limit} allows {most:.0f}"
            )

    def end_epoch(self, num_batches: int) -> None:
        """Check a finished epoch. A resumed epoch may have delivered batches before.

        Args:
            num_batches: Batches that were delivered or raised an error.

        Raises:
            TooManyBad: All samples of the epoch were bad.
        """
        state = self._epoch_state
        if not num_batches and not state.start and self.positions(state.epoch):
            raise self._too_many(f"all samples of epoch {state.epoch} were bad")

    def _too_many(self, what: str) -> TooManyBad:
        last = [
            f"sample {one.index}{f' ({one.path})' if one.path else ''}: {one.error}"
            for one in self.samples[-3:]
        ]
        error = TooManyBad(
            "\n  ".join([f"{what}; the last ones:", *last]),
            likely="all have the same cause: a wrong folder, a missing disk, a changed format.",
            remedy=f"penstock doctor {self.path}"
            if self.path
            else 'DataLoader(..., bad_samples_file="bad.jsonl"), then penstock doctor bad.jsonl',
            num_bad=len(self._positions),
            bad_samples=self.samples,
        )
        error.__cause__ = RuntimeError(last[-1])  # workers send failures as text
        return error
