"""Per-sample randomness: what a sample draws depends only on (seed, epoch, position).

Unmodified user code draws the same numbers in any worker, because the global generators are set
from the sample's own key before each ``dataset[i]``:

    hash of (seed, epoch, position)      -> NumPy's and torch's seeds
    TwisterWords (Philox) of the same    -> the 624 words of Python's Mersenne Twister

Any position can be computed directly. Setting all three takes 8 microseconds, setting only torch's
takes 2 (16-core x86-64). Datasets for which this matters rarely draw random numbers. So generators
are set only where needed, in one of three modes. A generator that was drawn from has *moved*.

    seeded      set everything, call. The first samples, and every dataset that draws.
    torch only  set torch's, call, check that Python's and NumPy's have not moved.
    unseeded    call a run of samples (a batch, or a worker's part of one), check that none moved.

If a generator moved, everything is set and that sample (unseeded: that run) is loaded again, and
this object stays in the slower mode. A dataset that starts to draw only after its first samples
therefore loads one run twice per worker. The user always gets the seeded result.

Generators that the dataset holds are also set for each sample, except for the first sample that
this object loads. A dataset that draws a permutation on first use and keeps it must draw the same
permutation in every worker, as it does with PyTorch's DataLoader. The first sample therefore finds
these generators in the state in which the user left them. If it draws from one of them, it is
loaded again with its own randomness, and what the dataset stored is kept. The same applies to
Python's and NumPy's generators if worker_init_fn set them. A dataset that continues to store values
while it draws, or stores values drawn from a global generator, is reported in ``notes``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.errors import NoStopIteration
from penstock.order.dataset_generators import (
    Contents,
    DatasetGenerators,
    NamedGenerators,
    changed_paths,
    describe_search_limit,
)
from penstock.order.global_generators import (
    KeptStates,
    NumpyGenerator,
    UnimportedNumpy,
    numpy_generator,
    numpy_generator_if_imported,
    preserved_generators,
    python_generator,
    restore_generators,
    save_generators,
    state_reads,
    torch_generator,
    watching_state_reads,
)
from penstock.order.keys import (
    COLLATE_STREAM,
    DATASET_STREAM,
    GOLDEN,
    MASK,
    make_key,
    mix64,
    splitmix64,
)
from penstock.order.rng import OUTSIDE, UNKNOWN, SampleRng, active
from penstock.order.twister_words import TwisterWords

_SEED_RUN = 64
"""Positions computed in one call."""
NUM_OBSERVED = 16
"""Samples that are loaded seeded before a dataset is treated as one that does not draw."""
NUM_WATCHED_AFTER_NEW = 256
"""Samples that are searched for new generators after one that created a generator."""

Function = Callable[[Any], Any]


_KEEPS_DRAWS = (
    "{path} changed while a sample drew from a generator of the dataset. If drawn numbers are "
    "stored there, they differ between workers. Draw them in __init__, or from a generator seeded "
    "with the index: numpy.random.default_rng([seed, index])"
)
_KEEPS_GLOBAL_DRAWS = (
    "{path} changed while a sample drew from a global generator. If drawn numbers are stored "
    "there, they differ between workers, as with PyTorch's DataLoader. Draw them in __init__"
)
_MADE_IN_COLLATE = (
    "collate_fn created a generator in its first call and could not be called again: the numbers "
    "drawn for that batch depend on which worker loads it. Create the generator before the loader "
    "is used"
)
_MADE_LATE = (
    "{generator} was created after the first samples: the numbers they drew from it depend on "
    "which worker loaded them. Create it in __init__"
)
_UNREPEATABLE = (
    "a sample that was loaded twice with the same seeds differed: it draws from an unseeded "
    "generator that it creates, from one that Penstock cannot find, or from the operating system. "
    "Use penstock.rng() instead of numpy.random.default_rng(), or pass a seed to it"
)


class UnexpectedDraw(Exception):
    """Samples of an unseeded run drew random numbers for the first time. Load the run again."""


class SampleRandomness:
    """Calls user code so that each sample draws its own random numbers.

    Args:
        seed: The loader's base seed.
        with_torch: False does not set torch's generator (the user seeded it in worker_init_fn).
        dataset_generators: Generators that the dataset holds. They are also set for each sample. If
            there are any, every sample is seeded.
        keeps_first: True if the dataset's generators are not set before the first call.
        init_states: The states of Python's and NumPy's generators after worker_init_fn, if it set
            them. They are restored for the first call.
        checks_repeats: Load the first sample twice if the code creates generators, and compare.
        waits_for_numpy: Do not import ``numpy.random`` for samples that seem to draw nothing. A
            sample that imports it is loaded again.

    Attributes:
        notes, warnings: For the user; see :meth:`take_messages`.

    Called by the loading code (workers, threads, or the training process), one sample at a time in
    that process or thread. :func:`watching_state_reads` should be active during these calls.

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
        dataset_generators: DatasetGenerators | None = None,
        keeps_first: bool = True,
        init_states: bytes | None = None,
        checks_repeats: bool = False,
        waits_for_numpy: bool = False,
    ) -> None:
        import torch

        self._seed = seed & MASK
        self._torch = torch.default_generator
        # The generator's own method. torch.manual_seed also seeds every accelerator (25x slower).
        self._seed_torch = self._torch.manual_seed if with_torch else None
        self._torch_marks = torch_generator().marks
        self._python = python_generator()
        self._own = dataset_generators
        waits_for_numpy = waits_for_numpy and not (self._own is not None and self._own.may_draw)
        self._numpy: NumpyGenerator | UnimportedNumpy = (
            numpy_generator_if_imported() if waits_for_numpy else numpy_generator()
        )
        self._set_own = dataset_generators.set if dataset_generators else None
        self._is_first = dataset_generators is not None
        self._num_watched = NUM_OBSERVED
        self._num_compared = 0
        self._keeps_first, self._checks_repeats = keeps_first, checks_repeats
        self._init_states = init_states
        self._has_noted = False
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._can_peek = self._python.is_known and self._numpy.is_known
        if self._can_peek:
            self._find_cells()
        self._seen_reads = state_reads.of_globals
        self.needs_seeding = not self._can_peek or self._set_own is not None
        """True if Python's and NumPy's generators must be set for every sample."""
        self.is_torch_only = self.is_unseeded = False
        self._num_observed = 0
        self._has_drawn_torch = False
        self._rng = SampleRng()
        self._outer_rng: SampleRng | None = None
        self._tracks_positions = False
        self._cached_normals: tuple[Any, Any] | None = None
        self.begin(0)

    def _find_cells(self) -> None:
        self._cells = (*self._python.cells(), *self._numpy.cells())
        self._seen = self._peek()
        self._callers = KeptStates()

    def _notice_numpy(self) -> bool:
        """Return True if ``numpy.random`` was imported since this object was created."""
        if isinstance(self._numpy, NumpyGenerator) or not self._numpy.value:
            return False
        self._numpy = numpy_generator()
        self._can_peek = self._numpy.is_known
        if self._can_peek:
            self._find_cells()
        else:
            self.needs_seeding, self.is_torch_only, self.is_unseeded = True, False, False
        return True

    def begin(self, epoch: int) -> None:
        """Switch to a different epoch."""
        self._find_late_generators()
        self._epoch = epoch
        self._seeds: list[tuple[int, int]] = []
        self._first_seed = 0
        self._rng.begin(self._seed, epoch)
        self._own_key = make_key(DATASET_STREAM, self._seed, epoch & MASK)
        self._words = TwisterWords(self._seed, epoch)

    def snapshot(self, *, is_used: bool = False) -> None:
        """Record the current state of the generators. Called before each run of samples.

        Args:
            is_used: True if other user code (a collate_fn) has drawn since, and may have left a
                cached normal variate.
        """
        self._notice_numpy()
        if self.needs_seeding:
            return
        if is_used:
            self.set_generators(0)
        self._seen, self._seen_reads = self._peek(), state_reads.of_globals

    @property
    def has_drawn(self) -> bool:
        """True if any sample moved or read one of the global generators."""
        return self.needs_seeding or self._has_drawn_torch

    def skip_observation(self) -> None:
        """Treat the dataset as one that does not draw, until it does.

        Called by a cache, whose samples were observed before, possibly in another process.
        """
        if not self.has_drawn:
            self.is_torch_only = self.is_unseeded = True
            self._rng.was_asked = True  # positions are always given

    # -- one sample ------------------------------------------------------------------------------

    def call(self, function: Function, index: Any, position: int) -> Any:
        """Return ``function(index)``, called with the randomness of the sample at ``position``."""
        rng = self._rng
        if active.rng is not rng:
            outer, active.rng = active.rng, rng
            if outer is not None and outer.position != OUTSIDE:  # a loader inside a sample
                try:
                    return self.call(function, index, position)
                finally:
                    active.rng = outer
        rng.position = position
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
                    if seen == self._seen and state_reads.of_globals == self._seen_reads:
                        return sample
                self.is_torch_only, self.needs_seeding = False, True
                rng.position = position
            if self._is_first:
                return self._call_first(function, index, position)
            self.set_generators(position)
            if self._num_watched < NUM_OBSERVED:
                return self._watch(function, index, position)
            return self._call_seeded(function, index, position)
        finally:
            rng.position = OUTSIDE

    def _call_seeded(self, function: Function, index: Any, position: int) -> Any:
        return function(index) if self.needs_seeding else self._observe(function, index, position)

    def _observe(self, function: Function, index: Any, position: int) -> Any:
        """Call it with generators set, and check whether it draws."""
        self._snapshot_all()
        try:
            sample = function(index)
        except Exception:
            if not self._notice_numpy():
                raise
            return self._call_after_import(function, index, position)
        if self._notice_numpy():
            return self._call_after_import(function, index, position)
        self.needs_seeding = not self._is_untouched()
        self._has_drawn_torch = self._has_drawn_torch or self._has_torch_moved()
        self._num_observed += 1
        self.is_torch_only = not self.needs_seeding and self._num_observed >= NUM_OBSERVED
        self.is_unseeded = self.is_torch_only and not self._has_drawn_torch
        return sample

    def _call_after_import(self, function: Function, index: Any, position: int) -> Any:
        """Load a sample that imported ``numpy.random`` again, with its generator set."""
        self._rng.position = position
        self.set_generators(position)
        return self._call_seeded(function, index, position)

    def _call_first(self, function: Function, index: Any, position: int) -> Any:
        """Load the first sample, without setting the dataset's generators before."""
        own = self._own
        assert own is not None
        self._is_first = False
        states, data = own.save(), own.contents(only_data=True) if self._keeps_first else {}
        if self._keeps_first:
            self._set_own = own.set_unreadable
        self.set_generators(position)
        if self._init_states is not None:
            restore_generators(self._init_states)
        before, had_numpy = (self._global_states(), self._torch_marks()), self._numpy.is_imported
        try:
            sample = self._call_seeded(function, index, position)
        except Exception:
            if not self._must_repeat(own, states, before[0]):
                raise
            sample = self._call_again(function, index, position)
        else:
            has_numpy = self._numpy.is_imported is had_numpy  # importing it draws nothing
            if self._keeps_first and has_numpy and self._has_drawn_since(*before):
                self._note_changes(_KEEPS_GLOBAL_DRAWS, data, own.contents(only_data=True))
            if self._must_repeat(own, states, before[0]):
                try:
                    sample = self._call_again(function, index, position)
                except Exception:
                    if self._keeps_first:
                        raise
                    self.warnings.append(_MADE_IN_COLLATE)  # collate_fn modified its samples
        if self._checks_repeats and own.makes_generators:
            self._check_repeat(function, index, position, sample)
        return sample

    def _must_repeat(self, own: DatasetGenerators, states: list[Any], before: Any) -> bool:
        """Return True if the first sample created a generator, or drew from one not set for it."""
        has_moved = self._keeps_first and (own.save() != states or bool(own and own.reads_states))
        has_made = bool(own.search())
        self._set_own = own.set if own else None
        self._num_watched = 0 if own or own.makes_generators else NUM_OBSERVED
        if has_made or (own and own.makes_generators):  # more of them, in an earlier epoch
            self._watch_longer()
        self.needs_seeding = self.needs_seeding or bool(own)
        has_drawn = self._init_states is not None and self._global_states() != before
        return has_moved or has_made or has_drawn

    def _has_drawn_since(self, before: Any, torch_before: Any) -> bool:
        """Return True if a global generator moved."""
        has_moved = self._torch_marks() != torch_before
        return has_moved or bool(self._global_states() != before)

    def _global_states(self) -> Any:
        """Return a value that differs after Python's or NumPy's generator was drawn from.

        worker_init_fn may leave cached normal variates, which only the complete states show.
        """
        return self._peek() if self._can_peek and not self._init_states else save_generators()

    def _note_changes(self, note: str, before: Contents, after: Contents) -> None:
        changed = changed_paths(before, after)
        if changed:
            self._has_noted = True
            self.notes.append(note.format(path=changed[0]))

    def _call_again(self, function: Function, index: Any, position: int) -> Any:
        self._rng.position = position
        self.set_generators(position)
        return function(index)

    def _check_repeat(self, function: Function, index: Any, position: int, sample: Any) -> None:
        """Warn if loading the sample again with the same generators gives a different sample."""
        from penstock.order.sample_bytes import bytes_of

        try:
            first, second = bytes_of(sample), bytes_of(self._call_again(function, index, position))
        except Exception:
            return  # the samples cannot be compared
        if first != second:
            self.warnings.append(_UNREPEATABLE)

    def _watch(self, function: Function, index: Any, position: int) -> Any:
        """Load one of the first samples. Checks for new generators, and values stored by draws."""
        own = self._own
        assert own is not None
        self._num_watched += 1
        compares = bool(own) and not self._has_noted and self._num_compared < NUM_OBSERVED
        self._num_compared += compares
        before, states = own.contents() if compares else {}, own.save()
        sample = self._call_seeded(function, index, position)
        if compares and own.save() != states:
            self._note_changes(_KEEPS_DRAWS, before, own.contents())
        if own.makes_generators and self._keeps_first and own.search():
            self._set_own, self.needs_seeding = own.set, True
            self.is_torch_only = self.is_unseeded = False
            self._watch_longer()
            return self._call_again(function, index, position)
        if self._has_noted and not own.makes_generators:
            self._num_watched = NUM_OBSERVED
        return sample

    def _watch_longer(self) -> None:
        """Watch more samples after one that created a generator: later ones may create more."""
        self._num_watched = NUM_OBSERVED - NUM_WATCHED_AFTER_NEW

    def _find_late_generators(self) -> None:
        """Search for generators that samples created after the first ones were watched."""
        own = self._own
        if own is None or self._is_first or not own.makes_generators:
            return
        late = own.search()
        if late:
            self._set_own, self.needs_seeding = own.set, True
            self.is_torch_only = self.is_unseeded = False
            self.warnings += [_MADE_LATE.format(generator=one) for one in late]

    def set_generators(self, position: int) -> None:
        """Set all generators to the state of the sample at ``position``."""
        numpy_seed, torch_seed = self._seeds_at(position)
        self._python.write(self._words.at(position))
        if self.needs_seeding or self._numpy.is_imported:
            np.random.seed(numpy_seed)
        if self._seed_torch is not None:
            self._seed_torch(torch_seed)
        if self._set_own is not None:
            self._set_own(mix64(self._own_key + position))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the caller's generators at the end of the block: global and the dataset's.

        Called in the training process, whose generators are in use.
        """
        with self.preserved_own(), preserved_generators(), watching_state_reads():
            yield

    @contextmanager
    def preserved_own(self) -> Iterator[None]:
        """Restore the dataset's generators at the end of the block."""
        states = self._own.save() if self._own else []
        try:
            yield
        finally:
            if self._own and states:
                self._own.restore(states)

    def take_messages(self) -> tuple[list[str], list[str]]:
        """Return the warnings and notes for the user since the last call."""
        messages = self.warnings, self.notes
        self.warnings, self.notes = [], []
        return messages

    # -- many samples ----------------------------------------------------------------------------

    def call_many(self, function: Function, indices: Sequence[Any], position: int) -> list[Any]:
        """Load the samples of ``indices``. The first one is at ``position``."""
        if self.is_unseeded:
            try:
                return self._call_unseeded(function, indices, position)
            except UnexpectedDraw:
                pass
        self.snapshot()
        samples = []
        for place, index in enumerate(indices, position):
            samples.append(self.call(function, index, place))
            if self.is_unseeded and len(samples) < len(indices):  # since this sample
                rest = indices[len(samples) :]
                return samples + self.call_many(function, rest, place + 1)
        return samples

    def call_many_preserved(
        self, function: Function, indices: Sequence[Any], position: int
    ) -> list[Any]:
        """Like :meth:`call_many`, but restores the caller's generators.

        Called in the training process, whose generators are in use.
        """
        self._notice_numpy()
        if self.is_unseeded:
            self._callers.keep()
            has_moved = False
            state_reads.start()
            try:
                return self._call_unseeded(function, indices, position)
            except UnexpectedDraw:
                has_moved = True
            finally:
                state_reads.stop()
                self._callers.restore(has_moved=has_moved)
        with self.preserved():
            return self.call_many(function, indices, position)

    def _call_unseeded(
        self, function: Function, indices: Sequence[Any], position: int
    ) -> list[Any]:
        self.begin_unseeded()
        try:
            if self._tracks_positions:
                samples = list(self.unseeded_samples(function, enumerate(indices, position)))
            else:
                samples = [function(index) for index in indices]
        except Exception:
            self.end_unseeded()  # with its own randomness, the sample may succeed
            raise
        self.end_unseeded()
        return samples

    def begin_unseeded(self, *, is_shared: bool = False) -> None:
        """Begin a run of samples without seeding. Pairs with :meth:`end_unseeded`.

        Called only while ``is_unseeded``.

        Args:
            is_shared: True if other code also draws from the generators, and may have left cached
                normals.
        """
        self._notice_numpy()
        self._snapshot_all()
        self._cached_normals = self._get_cached_normals() if is_shared else None
        rng = self._rng
        self._outer_rng, active.rng = active.rng, rng
        rng.position, self._tracks_positions = UNKNOWN, rng.was_asked
        rng.is_shared = is_shared

    def unseeded_samples(
        self, function: Function, placed: Iterable[tuple[int, Any]]
    ) -> Iterator[Any]:
        """Yield the samples of an unseeded run. ``placed`` holds positions and indices.

        Called between :meth:`begin_unseeded` and :meth:`end_unseeded`.
        """
        with NoStopIteration("dataset[i]"):
            if not self._tracks_positions:
                for _, index in placed:
                    yield function(index)
                return
            rng = self._rng
            for position, index in placed:
                rng.position = position  # the dataset calls rng()
                yield function(index)

    def end_unseeded(self) -> None:
        """Check that the samples since :meth:`begin_unseeded` drew nothing.

        Raises:
            UnexpectedDraw: They drew. Seeding is now on. Load the run again.
        """
        rng, reads = self._rng, state_reads
        rng.position, rng.is_shared = OUTSIDE, False
        active.rng, self._outer_rng = self._outer_rng, None
        normals = self._cached_normals
        has_kept = normals is None or normals == self._get_cached_normals()
        python, numpy, twist = self._cells
        if (
            (python.value, numpy.value, twist.value) == self._seen
            and self._torch_marks() == self._seen_torch
            and reads.of_globals is self._seen_reads
            and reads.of_torch is self._seen_torch_reads
            and has_kept
            and rng.was_asked == self._tracks_positions
        ):
            return  # most runs
        if not (self._is_untouched() and has_kept):
            self.needs_seeding, self.is_torch_only, self.is_unseeded = True, False, False
        elif self._has_torch_moved():
            self.is_unseeded, self._has_drawn_torch = False, True
        elif self._rng.was_asked == self._tracks_positions:
            return  # rng() was not called, or positions were known
        raise UnexpectedDraw

    # -- checks whether generators moved ---------------------------------------------------------

    def _snapshot_all(self) -> None:
        self._seen_reads, self._seen_torch_reads = state_reads.of_globals, state_reads.of_torch
        python, numpy, twist = self._cells
        self._seen = python.value, numpy.value, twist.value
        self._seen_torch = self._torch_marks()

    def _has_torch_moved(self) -> bool:
        if self._seed_torch is None:
            return False  # torch's generator is managed by the user
        if state_reads.of_torch != self._seen_torch_reads:
            return True
        return self._torch_marks() != self._seen_torch

    def _get_cached_normals(self) -> tuple[Any, Any]:
        return self._python.cached_normal(), self._numpy.cached_normal()

    def _peek(self) -> tuple[int, int, int]:
        python, numpy, twist = self._cells
        return python.value, numpy.value, twist.value

    def _is_untouched(self) -> bool:
        return self._seen == self._peek() and state_reads.of_globals == self._seen_reads

    # -- keys ------------------------------------------------------------------------------------

    def _seeds_at(self, position: int) -> tuple[int, int]:
        place = position - self._first_seed
        if not 0 <= place < len(self._seeds):
            self._seeds = _hash_seeds(self._seed, self._epoch, position)
            self._first_seed, place = position, 0
        return self._seeds[place]


def make_randomness(
    seed: int,
    dataset: Any,
    collate_fn: Any,
    *,
    with_torch: bool = True,
    is_worker: bool = False,
    checks_repeats: bool = False,
    states: Mapping[str, Any] | None = None,
    names: NamedGenerators | None = None,
    init_states: bytes | None = None,
    waits_for_numpy: bool = False,
) -> tuple[SampleRandomness, SampleRandomness]:
    """Return the randomness of samples, and that of batches in ``collate_fn`` (None: torch's own).

    In ``collate_fn`` the state of the generators is a function of (seed, epoch, position of the
    batch's first sample). Called only once, because it may modify its samples.

    Args:
        states, names: See :class:`DatasetGenerators`.
        init_states, waits_for_numpy: See :class:`SampleRandomness`.
    """
    own = DatasetGenerators(dataset, is_worker=is_worker, states=states, names=names)
    samples = SampleRandomness(
        seed,
        with_torch=with_torch,
        dataset_generators=own,
        init_states=init_states,
        checks_repeats=checks_repeats,
        waits_for_numpy=waits_for_numpy,
    )
    of_collate = None
    if collate_fn is not None:
        of_collate = DatasetGenerators(
            collate_fn, path="collate_fn", is_worker=is_worker, states=states, names=names
        )
    batches = SampleRandomness(
        seed ^ COLLATE_STREAM,
        with_torch=with_torch,
        dataset_generators=of_collate,
        keeps_first=False,
        waits_for_numpy=waits_for_numpy and collate_fn is None,
    )
    for generators in (own, of_collate):
        if generators is not None:
            samples.warnings += [
                f"{one}: its draws depend on which worker loads the sample"
                for one in generators.found
                if not one.can_be_set
            ]
            if not generators.is_complete:
                samples.notes.append(describe_search_limit(generators.path))
    return samples, batches


def _hash_seeds(seed: int, epoch: int, position: int) -> list[tuple[int, int]]:
    """Return (NumPy seed, torch seed) for a run of positions: two splitmix64 outputs each."""
    key = (seed + GOLDEN * ((epoch + 1) & MASK)) & MASK
    key = (key ^ (key >> 31)) * 0xD6E8FEB86659FD93 & MASK
    counters = np.arange(2 * position, 2 * (position + _SEED_RUN), dtype=np.uint64)
    pairs = splitmix64((key - GOLDEN) & MASK, counters).reshape(_SEED_RUN, 2)
    numpy_seeds = (pairs[:, 0] >> np.uint64(32)).tolist()
    torch_seeds = (pairs[:, 1] >> np.uint64(1)).tolist()
    return list(zip(numpy_seeds, torch_seeds, strict=True))


def seed_worker(base_seed: int, worker: int, *, waits_for_numpy: bool = False) -> int:
    """Seed this process as PyTorch seeds its worker ``worker``. Returns that worker's seed.

    Args:
        waits_for_numpy: Do not import ``numpy.random``. See :class:`SampleRandomness`.
    """
    import torch
    from torch.utils.data._utils.worker import _generate_state  # PyTorch's own NumPy seed

    seed = base_seed + worker
    if seed > MASK:  # generators take at most 64 bits
        seed -= MASK + 1
    random.seed(seed)
    torch.manual_seed(seed)
    if not waits_for_numpy or "numpy.random" in sys.modules:
        np.random.seed(_generate_state(base_seed, worker))  # type: ignore[no-untyped-call]
    return seed
