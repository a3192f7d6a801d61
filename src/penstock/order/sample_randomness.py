"""Randomness belongs to the sample: (seed, epoch, position) decides what it draws, nothing else.

Unmodified user code draws the same numbers whichever worker runs it, because before ``dataset[i]``
the global generators are set from a key of the sample's own:

    hash of (seed, epoch, position)      -> NumPy's and torch's seeds
    Philox(key = seed, epoch), counter 78 * position -> the 624 words of Python's Mersenne Twister

Any position can be computed alone. Setting all three costs 8 microseconds, setting torch's alone 2
(16-core x86-64). Datasets that are quicker than that mostly draw nothing, so generators are set
only where it matters:

    strict: set everything, call.          The first samples, and every dataset that draws.
    quiet:  set torch's, call, look whether Python's or NumPy's moved.
    silent: call a run of samples (a batch, or a worker's part of one), look whether any moved.

Did one move that should not have: set everything, load that sample (silent: that run) again, and be
stricter from then on. So a dataset that drew nothing for its first samples and then begins to draw
has one run loaded twice per worker; what the user sees is always the strict result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.order.generator_reads import counting_state_reads, reads, unwatch, watch
from penstock.order.global_generators import numpy_generator, preserved_generators, python_generator
from penstock.order.keys import OWN_STREAM, make_key, mix64
from penstock.order.rng import OUTSIDE, UNKNOWN, SampleRng, here

_MASK = (1 << 64) - 1
_BLOCKS = 78
"""Philox blocks (of four words) per position: 312 words are Python's 624."""
_SEED_RUN = 64
_STATE_RUN = 16
"""Positions computed in one call; 16 states are 40 KB, which stay in the cache."""
NUM_OBSERVED = 16
"""Samples that are loaded strictly before a dataset counts as one that does not draw."""


COLLATE_STREAM = 0x636F6C6C617465
"""Mixed into the seed for a user's collate_fn, which draws by its batch's first position."""


class UnexpectedDraw(Exception):
    """Samples drew although none had before: their run must be loaded again."""


class SampleRandomness:
    """Calls user code so that each sample draws from generators of its own.

    Args:
        seed: The loader's base seed.
        with_torch: False leaves torch's generator alone (the user seeded it in worker_init_fn).
        also_set: Called with 64 bits of the sample's own before each sample, for generators that
            only the dataset knows (:mod:`penstock.order.dataset_generators`). Every sample is
            seeded then.

    Called from: whoever loads samples, in that process or thread, one at a time. Pairs with
    :func:`counting_state_reads`, which should be active meanwhile.

    Example:
        >>> import random
        >>> randomness = SampleRandomness(seed=0)
        >>> first = randomness.call(lambda i: random.random(), 0, position=5)
        >>> other = randomness.call(lambda i: random.random(), 0, position=6)
        >>> first == randomness.call(lambda i: random.random(), 0, position=5) != other
        True
    """

    def __init__(
        self,
        seed: int,
        *,
        with_torch: bool = True,
        also_set: Callable[[int], None] | None = None,
    ) -> None:
        import torch

        self._seed = seed & _MASK
        # The generator's own method: torch.manual_seed also visits every accelerator (25x slower).
        self._seed_torch = torch.default_generator.manual_seed if with_torch else None
        self._python = python_generator()
        self._numpy = numpy_generator()
        can_peek = self._python.is_known and self._numpy.is_known
        if can_peek:
            self._cells = (*self._python.cells(), *self._numpy.cells())
            self._seen = self._peek()
        self._reads_seen = reads.of_globals
        self._num_silent = 0
        self.is_torch_only = self.is_unseeded = False
        self._torch_moved = False
        self._torch_state = torch.default_generator.get_state
        self._set_torch_state = torch.default_generator.set_state
        self._equal = torch.equal
        self._also_set = also_set
        self._draws = not can_peek or also_set is not None
        self._stream_of_rng = SampleRng()
        self._outer: SampleRng | None = None
        self._names_samples = False
        self._reserves: tuple[Any, Any] | None = None
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Turn to another epoch."""
        self._epoch = epoch
        self._seeds: list[tuple[int, int]] = []
        self._first_seed = 0
        self._stream_of_rng.begin(self._seed, epoch)
        self._own_key = make_key(OWN_STREAM, self._seed, epoch & _MASK)
        self._new_stream()

    def snapshot(self, *, is_used: bool = False) -> None:
        """Note where the generators stand now. Called before each run of samples.

        Args:
            is_used: Other user code (a collate_fn) has drawn since, and may have left a normal
                variate in reserve.
        """
        if self._draws:
            return
        if is_used:
            self.set_generators(0)
        self._seen, self._reads_seen = self._peek(), reads.of_globals

    @property
    def needs_seeding(self) -> bool:
        return self._draws

    @property
    def has_drawn(self) -> bool:
        """Has any sample moved or read one of the global generators?"""
        return self._draws or self._torch_moved

    def call(self, function: Callable[[Any], Any], index: Any, position: int) -> Any:
        """``function(index)``, drawing what the sample at ``position`` draws."""
        stream = self._stream_of_rng
        if here.stream is not stream:
            outer, here.stream = here.stream, stream
            if outer is not None and outer.entered != OUTSIDE:  # a loader inside a sample
                try:
                    return self.call(function, index, position)
                finally:
                    here.stream = outer
        stream.entered = position
        try:
            if self.is_torch_only:
                place = position - self._first_seed
                if not 0 <= place < len(self._seeds):
                    self._seeds_at(position)
                    place = 0
                if self._seed_torch is not None:
                    self._seed_torch(self._seeds[place][1])
                try:
                    sample = function(index)
                except Exception:
                    if self._is_untouched():
                        raise
                else:
                    python, numpy, twist = self._cells
                    seen = python.value, numpy.value, twist.value
                    if seen == self._seen and reads.of_globals == self._reads_seen:
                        return sample
                self.is_torch_only, self._draws = False, True
                stream.entered = position
            self.set_generators(position)
            return function(index) if self._draws else self._call_and_learn(function, index)
        finally:
            stream.entered = OUTSIDE

    def _call_and_learn(self, function: Callable[[Any], Any], index: Any) -> Any:
        self._note_generators()
        sample = function(index)
        if not self._is_untouched():
            self._draws = True
        self._torch_moved = self._torch_moved or self._has_torch_moved()
        self._num_silent += 1
        self.is_torch_only = not self._draws and self._num_silent >= NUM_OBSERVED
        self.is_unseeded = self.is_torch_only and not self._torch_moved
        return sample

    def begin_unseeded(self, *, is_shared: bool = False) -> None:
        """Begin a run of samples without seeding. Pairs with :meth:`end_unseeded`.

        Args:
            is_shared: Others draw from them, too, and may have left normal variates in reserve.
        """
        self._note_generators()
        self._reserves = self._reserves_left() if is_shared else None
        stream = self._stream_of_rng
        self._outer, here.stream = here.stream, stream
        stream.entered, self._names_samples = UNKNOWN, stream.was_asked

    def unseeded_samples(
        self, function: Callable[[Any], Any], placed: Iterable[tuple[int, Any]]
    ) -> Iterator[Any]:
        """The samples of a silent run, one by one; ``placed``: positions and indices.

        Called from: between :meth:`begin_unseeded` and :meth:`end_unseeded`.
        """
        if not self._names_samples:
            for _, index in placed:
                yield function(index)
            return
        stream = self._stream_of_rng
        for position, index in placed:
            stream.entered = position  # somebody here asks for rng()
            yield function(index)

    def _note_generators(self) -> None:
        self._reads_seen, self._torch_reads_seen = reads.of_globals, reads.of_torch
        self._seen = self._peek()
        self._seen_torch = self._torch_state()

    def end_unseeded(self) -> None:
        """Check that the samples since :meth:`begin_unseeded` drew nothing.

        Raises:
            UnexpectedDraw: They did. From now on this object is stricter: load the run again.
        """
        self._stream_of_rng.entered = OUTSIDE
        here.stream, self._outer = self._outer, None
        has_kept = self._reserves is None or self._reserves == self._reserves_left()
        if not (self._is_untouched() and has_kept):
            self._draws, self.is_torch_only, self.is_unseeded = True, False, False
        elif self._has_torch_moved():
            self.is_unseeded, self._torch_moved = False, True
        elif self._stream_of_rng.was_asked == self._names_samples:
            return  # rng() was not asked for, or samples were told apart
        raise UnexpectedDraw

    def call_many(
        self, function: Callable[[Any], Any], indices: Sequence[Any], position: int
    ) -> list[Any]:
        """The samples of ``indices``, of which the first is at ``position``."""
        if self.is_unseeded:
            self.begin_unseeded()
            try:
                samples = self._all_of(function, indices, position)
                self.end_unseeded()
                return samples
            except UnexpectedDraw:
                pass
            except Exception:
                try:
                    self.end_unseeded()
                except UnexpectedDraw:
                    pass  # what went wrong may be another thing with the sample's own randomness
                else:
                    raise
        self.snapshot()
        return [self.call(function, index, place) for place, index in enumerate(indices, position)]

    def call_many_preserved(
        self, function: Callable[[Any], Any], indices: Sequence[Any], position: int
    ) -> list[Any]:
        """Like :meth:`run`, and leaves the caller's own generators as they were.

        Called from: the process of the training loop, whose generators are in use.
        """
        if self.is_unseeded:
            samples = self._run_silently_apart(function, indices, position)
            if samples is not None:
                return samples
        with preserved_generators(), counting_state_reads():
            return self.call_many(function, indices, position)

    def _all_of(
        self, function: Callable[[Any], Any], indices: Sequence[Any], position: int
    ) -> list[Any]:
        if self._names_samples:
            return list(self.unseeded_samples(function, enumerate(indices, position)))
        return [function(index) for index in indices]

    def _run_silently_apart(
        self, function: Callable[[Any], Any], indices: Sequence[Any], position: int
    ) -> list[Any] | None:
        """A silent run that saves and looks only once; None if samples drew after all."""
        python, numpy = self._python.save(), self._numpy.save()
        self.begin_unseeded()
        samples = failure = None
        watch()
        try:
            samples = self._all_of(function, indices, position)
        except Exception as error:
            failure = error
        finally:
            unwatch()
        try:
            self.end_unseeded()
        except UnexpectedDraw:
            self._python.restore(python)
            self._numpy.restore(numpy)
            self._set_torch_state(self._seen_torch)
            return None
        self._python.restore_reserve(python)
        self._numpy.restore_reserve(numpy)
        if failure is not None:
            raise failure
        return samples

    def _has_torch_moved(self) -> bool:
        if self._seed_torch is None:
            return False  # torch's generator is the user's own here
        has_read = reads.of_torch != self._torch_reads_seen
        return has_read or not self._equal(self._torch_state(), self._seen_torch)

    def _reserves_left(self) -> tuple[Any, Any]:
        return self._python.reserve(), self._numpy.reserve()

    def _peek(self) -> tuple[int, int, int]:
        python, numpy, twist = self._cells
        return python.value, numpy.value, twist.value

    def _is_untouched(self) -> bool:
        return self._seen == self._peek() and reads.of_globals == self._reads_seen

    def set_generators(self, position: int) -> None:
        """Set all generators to the state of the sample at ``position``."""
        numpy_seed, torch_seed = self._seeds_at(position)
        self._python.write(self._state_at(position))
        np.random.seed(numpy_seed)
        if self._seed_torch is not None:
            self._seed_torch(torch_seed)
        if self._also_set is not None:
            self._also_set(mix64(self._own_key + position))

    # -- keys ------------------------------------------------------------------------------------

    def _seeds_at(self, position: int) -> tuple[int, int]:
        place = position - self._first_seed
        if not 0 <= place < len(self._seeds):
            self._seeds = _hash_seeds(self._seed, self._epoch, position)
            self._first_seed, place = position, 0
        return self._seeds[place]

    def _new_stream(self) -> None:
        key = np.array([self._seed, self._epoch & _MASK], dtype=np.uint64)
        self._stream = np.random.Philox(key=key, counter=0)
        self._states = np.empty((0, 4 * _BLOCKS), dtype=np.uint64)
        self._first_state = self._end_state = 0

    def _state_at(self, position: int) -> Any:
        place = position - self._first_state
        if not 0 <= place < len(self._states):
            if position < self._end_state:
                self._new_stream()
            if position > self._end_state:
                self._stream.advance((position - self._end_state) * _BLOCKS)
            words = self._stream.random_raw(_STATE_RUN * 4 * _BLOCKS)
            self._states = words.reshape(_STATE_RUN, 4 * _BLOCKS)
            self._first_state, place = position, 0
            self._end_state = position + _STATE_RUN
        return self._states[place]


def _hash_seeds(seed: int, epoch: int, position: int) -> list[tuple[int, int]]:
    """(NumPy's, torch's) seed for a run of positions: two splitmix64 outputs per position."""
    key = (seed + 0x9E3779B97F4A7C15 * ((epoch + 1) & _MASK)) & _MASK
    key = (key ^ (key >> 31)) * 0xD6E8FEB86659FD93 & _MASK
    counters = np.arange(2 * position, 2 * (position + _SEED_RUN), dtype=np.uint64)
    words = counters * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    pairs = words.reshape(_SEED_RUN, 2)
    numpy_seeds = (pairs[:, 0] >> np.uint64(32)).tolist()
    torch_seeds = (pairs[:, 1] >> np.uint64(1)).tolist()
    return list(zip(numpy_seeds, torch_seeds, strict=True))


def seed_worker(base_seed: int, worker: int) -> int:
    """Seed this process as PyTorch seeds its worker ``worker``; returns that worker's seed."""
    import torch
    from torch.utils.data._utils.worker import _generate_state  # PyTorch's own NumPy seed

    seed = base_seed + worker
    if seed > _MASK:  # no generator takes more than 64 bits
        seed -= _MASK + 1
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]
    return seed
