"""What a loader was told about faults, and what it has seen of them: the part of it about that."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from typing import Any

from penstock.engine.loading.bad_sample_file import BadSample
from penstock.engine.loading.bad_samples import MAX_SUBSTITUTES, ON_ERROR, OnError
from penstock.engine.parent.bad_sample_log import BadSampleLog
from penstock.engine.parent.restarts import RestartLimits
from penstock.errors import BadArgument
from penstock.options import check_count
from penstock.order.epoch_state import EpochState
from penstock.order.samplers import SeededOrder


class Forgiving:
    """The fault keywords of a DataLoader, checked, and ``bad_samples``."""

    dataset: Any
    sampler: Any
    batch_sampler: Any
    batch_size: int | None
    _epoch_state: EpochState
    _num_samples: Callable[[], int | None]

    def _settle_faults(
        self,
        on_error: OnError,
        max_bad: float | None,
        bad_samples_file: str | os.PathLike[str] | None,
        max_restarts: int,
        sample_timeout_s: float | None,
    ) -> None:
        if not callable(on_error):
            BadArgument.unless_one_of("on_error", on_error, ON_ERROR)
        self.on_error = on_error
        self.max_bad = max_bad
        self.bad_samples_file = bad_samples_file
        self.max_restarts = check_count("max_restarts", max_restarts, 0, 1_000_000)
        self.sample_timeout_s = _checked_seconds(sample_timeout_s)
        file = None if bad_samples_file is None else os.fspath(bad_samples_file)
        self._bad = BadSampleLog(max_bad, file)
        self.num_restarts = 0
        """Workers that were lost and replaced so far."""

    @property
    def bad_samples(self) -> list[BadSample]:
        """The samples that were left out or replaced so far, in the order they were found.

        Example:
            >>> from penstock import DataLoader
            >>> class Broken:
            ...     def __len__(self):
            ...         return 4
            ...     def __getitem__(self, i):
            ...         if i == 2:
            ...             raise ValueError("truncated")
            ...         return i
            >>> loader = DataLoader(Broken(), batch_size=2, on_error="skip")
            >>> [batch.tolist() for batch in loader]
            [[0, 1], [3]]
            >>> [(bad.index, bad.error) for bad in loader.bad_samples]
            [(2, 'ValueError: truncated')]
        """
        return self._bad.samples

    def _fault_setup(self) -> dict[str, Any]:
        """What the engine is told, by the names in its Setup."""
        is_tolerant = self.on_error != "raise"
        book, epoch_state = (
            self._bad,
            self._epoch_state,
        )  # they outlive the loader of `for x in DataLoader()`
        num_samples = self._num_expected() if is_tolerant else None

        def end_epoch(num_batches: int) -> None:
            if not epoch_state.start:  # of one that was resumed, a part was delivered before
                book.end_epoch(epoch_state.epoch, num_batches)

        return {
            "limits": RestartLimits(
                max_restarts=self.max_restarts,
                sample_timeout_s=self.sample_timeout_s,
                is_tolerant=is_tolerant,
                num_substitutes=MAX_SUBSTITUTES if self.on_error == "replace" else 0,
            ),
            "on_error": self.on_error,
            "num_indices": self._num_substitutes() if self.on_error == "replace" else None,
            "poison": book.poison,
            "on_bad": lambda found: book.take(found, epoch_state.epoch, num_samples),
            "on_poison": book.poisoned,
            "on_restart": weakly(self._count_restart),
            "on_end": end_epoch,
        }

    def _num_substitutes(self) -> int | None:
        """Any sample may stand in for any other only where the sampler takes them all, evenly."""
        from torch.utils.data import RandomSampler, SequentialSampler

        takes_all = type(self.sampler) in (RandomSampler, SequentialSampler, SeededOrder)
        if self.batch_size is None and self.batch_sampler is not None:
            return None  # the user's own batches
        return len(self.dataset) if takes_all else None

    def _count_restart(self) -> None:
        self.num_restarts += 1

    def _num_expected(self) -> int | None:
        if not self._is_iterable():
            return self._num_samples()
        try:  # not len(loader): from then on torch warns of iterable datasets that give more
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    def _is_iterable(self) -> bool:
        raise AssertionError("the loader knows")

    def _bad_in(self, epoch: int, end: int) -> dict[str, list[Any]]:
        positions = self._bad.positions(epoch)
        if not self._is_iterable():  # a courier may be ahead of what was delivered
            positions = [position for position in positions if position < end]
        found: dict[str, list[Any]] = {
            "positions": positions,
            "poison": list(self._bad.poison),
        }
        return {name: values for name, values in found.items() if values}

    def _restore_bad(self, epoch: int, bad: dict[str, list[Any]]) -> None:
        self._bad.restore(epoch, bad.get("positions", []), bad.get("poison", []))


def weakly(method: Any) -> Callable[..., None]:
    """Calls the method while its loader lives: an iterator that the loader holds must not hold it,
    or workers would outlive both until the garbage collector runs."""
    ref = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = ref()
        if alive is not None:
            alive(*arguments)

    return call


def _checked_seconds(seconds: Any) -> float | None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None or (is_number and 0 < seconds < math.inf):
        return seconds  # type: ignore[no-any-return]
    raise BadArgument(
        f"sample_timeout_s={seconds!r} is no number of seconds above 0",
        remedy="DataLoader(..., sample_timeout_s=60), or None for no limit",
    )
