"""The bad-sample policy: raise an error, skip the sample, or replace it.

    load(index) raises (or crashes workers, or returns None with the default collate)
        "skip"      the batch is shorter by one
        "replace"   a substitute, chosen as a function of (seed, epoch, position, attempt)
        a function  on_error(index, error) returns a sample to use or None to skip, or it raises

All other samples keep their position and their random numbers. The normal loading code does not
handle bad samples. If a part of a batch fails, :class:`BadSamplePolicy` loads the part again from
its start, one sample at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

from penstock.engine.loading.bad_sample_file import plain_index
from penstock.engine.loading.fetch import PassOver
from penstock.engine.loading.sample_path import find_path
from penstock.engine.pickling.exceptions import safe_text
from penstock.errors import NoStopIteration, NoSubstitute, PenstockError, SharedDraw
from penstock.order.keys import BAD_STREAM, GOLDEN, make_key, mix64

MAX_SUBSTITUTES = 16
"""Maximum number of substitutes for one sample. If half of a dataset is bad, all 16 are bad for one
sample in 65,000."""
MAX_IN_A_ROW = 1000
"""An iterable dataset with more consecutive errors than this is assumed to raise forever."""

_NOT_THE_SAMPLE = (PassOver, SharedDraw)
"""Raised while a sample loads, for another reason. SharedDraw means that the code is wrong."""

OnError = str | Callable[[Any, Exception], Any]
Call = Callable[[Callable[[Any], Any], Any, int], Any]
"""``call(function, index, position)`` calls user code with the randomness of that position."""
Load = Callable[[Any, int], Any]
"""``load(index, position)`` loads one sample with its own randomness."""


class SampleFailure(NamedTuple):
    """One failure to load a sample, as a worker reports it."""

    index: Any
    position: int
    path: str | None
    error: str
    end: str
    """The action taken: "skip" or "replace"."""


PoisonRows = tuple[tuple[int, Exception], ...]
"""Rows that must not be loaded, and why. If a row is listed more than once, its first substitutes
crashed or hung workers too and are not loaded either."""


def poison_among(poison: Mapping[int | str, Exception], indices: Iterable[Any]) -> PoisonRows:
    """Return the poison among ``indices``: rows of samples known to crash or hang workers."""
    if not poison:
        return ()
    keys = enumerate(map(plain_index, indices))
    return tuple((row, poison[key]) for row, key in keys if key in poison)


class EmptySample(ValueError):
    """``dataset[i]`` is None, which the default collate does not support."""


class BadSamplePolicy:
    """Loads samples one by one and applies the user's ``on_error`` to bad ones.

    Args:
        num_indices: Substitutes are chosen from this many samples of the dataset. If None, they are
            chosen from the same batch, because the sampler may exclude samples or group them.
        none_is_bad: Whether None counts as a bad sample.
    """

    def __init__(
        self,
        on_error: OnError,
        dataset: Any,
        *,
        seed: int,
        num_indices: int | None,
        none_is_bad: bool,
    ) -> None:
        self._on_error = on_error
        self._dataset = dataset
        self._seed = seed
        self.num_indices = num_indices
        self._none_is_bad = none_is_bad
        self._num_in_a_row = 0
        self.found: list[SampleFailure] = []
        """Failures since the list was last cleared."""

    @property
    def needs_whole_batch(self) -> bool:
        return self._on_error == "replace" and self.num_indices is None

    def samples(
        self,
        call: Call,
        get: Callable[[Any], Any],
        placed: Iterator[tuple[int, Any]],
        epoch: int,
        batch: Sequence[Any],
        poison_rows: PoisonRows = (),
    ) -> list[Any]:
        """Return the samples at these positions. Bad ones are skipped or replaced.

        Args:
            placed: Positions and indices.
            epoch: The epoch used to compute randomness.
            batch: All indices of the batch.
            poison_rows: Rows that must not be loaded.
        """

        def load(index: Any, position: int) -> Any:
            return self._checked(call(get, index, position), index)

        self.found = []
        taken = []
        why, num_losses = dict(reversed(poison_rows)), Counter(row for row, _ in poison_rows)
        for row, (position, index) in enumerate(placed):
            error = why.get(row)
            if error is None:
                try:
                    taken.append(load(index, position))
                    continue
                except _NOT_THE_SAMPLE:
                    raise
                except Exception as raised:
                    error = raised
            if callable(self._on_error):
                taken += self._ask(call, index, position, error)
                continue
            if self._on_error == "raise":
                raise error
            self._note(index, position, error, str(self._on_error))
            if self._on_error == "replace":
                attempts = range(max(0, num_losses[row] - 1), MAX_SUBSTITUTES)
                others = (self._substitute(position, epoch, batch, one) for one in attempts)
                taken.append(self._load_first(load, others, index, position, error))
        return taken

    def _checked(self, sample: Any, index: Any) -> Any:
        if sample is None and self._none_is_bad:
            name = "the next sample" if index is None else f"dataset[{index!r}]"
            raise EmptySample(f"{name} is None")
        return sample

    def _ask(self, call: Call, index: Any, position: int, error: Exception) -> list[Any]:
        """Call the user's ``on_error``. Return a list with its sample, or an empty list."""
        assert callable(self._on_error)
        on_error = self._on_error

        def ask(one: Any) -> Any:
            with NoStopIteration("on_error"):
                return on_error(one, error)

        sample = call(ask, index, position)
        self._note(index, position, error, "skip" if sample is None else "replace")
        return [] if sample is None else [sample]

    def _load_first(
        self, load: Load, others: Iterable[Any], index: Any, position: int, error: Exception
    ) -> Any:
        """Load the first substitute that works, with the position of the bad sample."""
        num_tried = 0
        for other in others:
            if _is_same(other, index):
                continue
            num_tried += 1
            try:
                return load(other, position)
            except _NOT_THE_SAMPLE:
                raise
            except Exception as another:
                self._note(other, position, another, "replace")
        what = f"sample {index!r} is bad, and there is no substitute for it"
        likely = "the dataset has no other sample"
        if num_tried:
            what = f"sample {index!r} is bad, and all {num_tried} substitutes are bad too"
            likely = (
                "most of the dataset cannot be read (a missing disk or a wrong folder, for example)"
            )
        elif self.num_indices is None:
            likely = (
                "its batch contains no other sample, and with this sampler substitutes are chosen "
                "only from the same batch"
            )
        raise NoSubstitute(
            what,
            likely=likely,
            remedy=f"dataset[{index!r}] in this process to see the error, or DataLoader(..., "
            'on_error="skip")',
            sample_index=index,
        ) from error

    def _substitute(self, position: int, epoch: int, batch: Sequence[Any], attempt: int) -> Any:
        key = make_key(BAD_STREAM, self._seed, epoch)
        word = mix64(key + GOLDEN * (position * MAX_SUBSTITUTES + attempt + 1))
        if self.num_indices is not None:
            return word % self.num_indices
        return batch[word % len(batch)]

    def _note(self, index: Any, position: int, error: Exception, end: str) -> None:
        if isinstance(error, PenstockError):
            text = error.what.partition("\n")[0]
        else:
            text = safe_text(error)
        path = find_path(self._dataset, index, error) if index is not None else None
        text = f"{type(error).__name__}: {text[:500]}"
        self.found.append(SampleFailure(index, position, path, text, end))

    def next_of(self, stream: Iterator[Any], position: int) -> list[Any]:
        """Return the next sample of an iterable dataset, or an empty list to skip a bad one.

        A generator ends when it raises. The error is raised again, because continuing would
        silently lose the remaining samples.
        """
        while True:
            try:
                sample = self._checked(next(stream), None)
                self._num_in_a_row = 0
                return [sample]
            except StopIteration:
                raise
            except Exception as error:
                self._num_in_a_row += 1
                is_ended = isinstance(stream, GeneratorType) and not isinstance(error, EmptySample)
                if is_ended or self._num_in_a_row > MAX_IN_A_ROW:
                    raise
                last = error
            if callable(self._on_error):
                return self._ask(lambda on_error, index, _: on_error(index), None, position, last)
            self._note(None, position, last, str(self._on_error))
            if self._on_error == "skip":
                return []


def _is_same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:
        return False
