"""The bad-sample policy: a bad sample is an error, left out, or replaced.

    load(index) raises (or kills workers, or returns None under the default collate)
        "skip"      the batch is shorter by one
        "replace"   another sample stands in its row: a function of (seed, epoch, position, attempt)
        a function  on_error(index, error) says: a sample to use, None to leave it out, or it raises

Whatever is done, every other sample stays in its place and draws what it would have drawn. The
ordinary way of loading knows nothing of this: a part of a batch in which something went wrong is
loaded again from its start, one sample at a time, by :class:`BadSamplePolicy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

from penstock.engine.loading.bad_sample_file import plain_index
from penstock.engine.loading.sample_path import find_path
from penstock.engine.pickling.exceptions import safe_text
from penstock.errors import NoStopIteration, NoSubstitute, PenstockError
from penstock.order.keys import BAD_STREAM, GOLDEN, make_key, mix64

MAX_SUBSTITUTES = 16
"""Substitutes tried for one sample. Where half of a dataset is bad, 16 in a row are bad once in
65,000 samples."""
MAX_IN_A_ROW = 1000
"""An iterable dataset that raises this often in a row raises for ever."""

OnError = str | Callable[[Any, Exception], Any]
Call = Callable[[Callable[[Any], Any], Any, int], Any]
"""``call(function, index, position)``: user code, with the randomness of that position."""
Load = Callable[[Any, int], Any]
"""``load(index, position)``: one sample with its own randomness."""


class SampleFailure(NamedTuple):
    """One failure to load a sample, as a worker reports it."""

    index: Any
    position: int
    path: str | None
    error: str
    end: str
    """What was done: "skip" or "replace"."""


PoisonRows = tuple[tuple[int, Exception], ...]
"""Rows that are not to be loaded, and why. A row that is there more than once has lost workers to
its substitutes, too: the first of those are passed over."""


def poison_among(poison: Mapping[int | str, Exception], indices: Iterable[Any]) -> PoisonRows:
    """Which of these samples are known to take down workers; by their place in ``indices``."""
    if not poison:
        return ()
    keys = enumerate(map(plain_index, indices))
    return tuple((row, poison[key]) for row, key in keys if key in poison)


class EmptySample(ValueError):
    """``dataset[i]`` is None, of which the default collate can make nothing."""


class BadSamplePolicy:
    """Loads samples one by one and does with bad ones as the user said.

    Args:
        num_indices: Substitutes are any of the dataset's this many samples; None: only others of
            the same batch, because the sampler leaves some out or has reasons for its batches.
        none_is_bad: Does None count as bad?
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
        """What was bad since this was last emptied."""

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
        """The samples at these positions; bad ones are left out or replaced.

        Args:
            placed: Positions and indices.
            epoch: As randomness counts.
            batch: All indices of the batch.
            poison_rows: Those that must not be loaded.
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
        """What the user's function says: one sample, or none."""
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
        """The first of the other samples that can be loaded, with the position of the bad one."""
        num_tried = 0
        for other in others:
            if _is_same(other, index):
                continue
            num_tried += 1
            try:
                return load(other, position)
            except Exception as another:
                self._note(other, position, another, "replace")
        what = f"sample {index!r} is bad, and nothing can stand in its place"
        likely = "the dataset has no other sample."
        if num_tried:
            what = f"sample {index!r} is bad, and so were {num_tried} others in its place"
            likely = "most of the dataset cannot be read: a missing disk, a wrong folder."
        elif self.num_indices is None:
            likely = (
                "there is no other sample in its batch, and with this sampler substitutes come "
                "from there only."
            )
        raise NoSubstitute(
            what,
            likely=likely,
            remedy=f"dataset[{index!r}] alone, in this process; or DataLoader(..., "
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
        """The next sample of an iterable dataset, or none if it was bad and shall be left out.

        A generator that raised has ended: going on would lose its rest silently, so it raises.
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
