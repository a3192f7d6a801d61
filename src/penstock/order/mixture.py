"""``penstock.mix``: one dataset of several sources, drawn in proportion to their weights.

    Mixture        the samples of all sources, one after the other, as one map-style dataset
    MixtureOrder   the order in which a loader takes them: a sampler, like :class:`SeededOrder`

A loader of a mixture uses its order unless a sampler is given. The source at a position is computed
by :mod:`penstock.order.interleave`, which also states and proves how close each source's count is
to its share in every range of positions and on every rank. The sample is then the next one of its
source. Sources are read in passes. Each pass of a shuffled source has its own permutation.

    position -> term -> (source, how many terms of that source before) -> (pass, place) -> index

The global batch decides the base of the sequence and the places of its terms in a batch, so the
order depends on ``batch_size * world_size``. It does not depend on the number of ranks.

A loader imports this module only if the user did.
"""

from __future__ import annotations

import hashlib
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import BadArgument
from penstock.options import check_count, check_max_bad
from penstock.order.base_order import Order
from penstock.order.interleave import MAX_TERM, Interleaving, first_true, slot_terms
from penstock.order.keys import GOLDEN, MASK, MIX_STREAM, make_key, mix64, mix64_many
from penstock.order.permutation import check_index, check_indices
from penstock.order.samplers import BlockOrder, hash_array
from penstock.order.shuffle_many import place_in_shuffle, shuffle_many
from penstock.user_objects import probe

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from penstock.order.base_order import EpochProgress, OrderOptions

Weights = Sequence[Any]
MAX_SOURCES = 1_000_000
FULL_FINGERPRINT = 16
"""Up to this many sources, a state lists each of them. For more, it holds hashes of the lists."""
BLOCK = 1 << 16
"""Number of positions that are put in order at a time, if sources are not shuffled."""
_USAGE = "penstock.mix([(first, 0.7), (second, 0.3)])"


def mix(
    sources: Iterable[tuple[Any, Any]],
    *,
    stop: str = "first",
    length: int | None = None,
    weights_at: Mapping[int, Weights] | None = None,
    names: Sequence[str] | None = None,
    max_bad: float | Sequence[float | None] | None = None,
    num_mixed: int | None = None,
) -> Mixture:
    """Combine datasets into one that a loader draws from in proportion to their weights.

    The share of each source holds in every part of the epoch, and on every rank, up to a few
    samples. A source that is shorter than its share of the epoch is repeated, and each pass over it
    is shuffled anew.

    Args:
        sources: Pairs of a dataset, with ``len()`` and ``dataset[i]``, and its weight: an int, a
            float or a Fraction. Weights need not sum to one. They are converted exactly, and the
            shares are rounded to about 2**-32. A source of weight 0 is not drawn. A source without
            samples must have weight 0.
        stop: When an epoch ends. ``"first"``: before the first source would be repeated. ``"all"``:
            when all samples of all sources have been drawn. Sources of weight 0 do not count.
        length: Number of positions in an epoch, instead of ``stop``. Epochs are then consecutive
            parts of one endless order: each continues the passes where the last one stopped.
        weights_at: Weights from given positions on, ``{10_000: [1, 3]}``. Positions count from the
            start of the epoch or, with ``length``, of epoch 0. Passes continue.
        names: Names of the sources in messages. Default: ``"0"``, ``"1"``, ...
        max_bad: Most bad samples of each source in an epoch: one value for all sources, or a list.
            A count, or a fraction of the source's samples in the epoch. The loader's own
            ``max_bad`` limits the total.
        num_mixed: Shuffle sources that are read in blocks (tar, Parquet, ...) in groups of this
            many blocks, as :class:`penstock.BlockOrder` does. Each sample of a full shuffle would
            read a block.

    Raises:
        BadArgument: A source, a weight or an option is invalid.

    Example:
        >>> import penstock
        >>> mixture = penstock.mix([(range(0, 6), 3), (range(100, 104), 1)])
        >>> loader = penstock.DataLoader(mixture, batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [100, 4, 5, 101]]
    """
    pairs = _read_pairs(sources)
    numbers = [str(number) for number in range(len(pairs))]
    return Mixture(
        [source for source, _ in pairs],
        changes=_read_changes([weight for _, weight in pairs], weights_at),
        stop=_check_stop(stop, length),
        length=None if length is None else check_count("length", length, 1),
        names=numbers if names is None else _check_names(names, len(pairs)),
        max_bad=_check_budgets(max_bad, len(pairs)),
        num_mixed=None if num_mixed is None else check_count("num_mixed", num_mixed, 1),
    )


class Mixture:
    """The samples of several datasets, one dataset after the other. Made by :func:`mix`.

    Indices 0 to ``len(first) - 1`` are those of the first source, the next ones those of the second
    source, as in torch's ConcatDataset. :meth:`locate` converts them.

    Attributes:
        datasets: The sources.
        names: Their names.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        *,
        changes: list[tuple[int, list[Fraction]]],
        stop: str,
        length: int | None,
        names: list[str],
        max_bad: list[float | None],
        num_mixed: int | None,
    ) -> None:
        self.datasets = list(datasets)
        self.names = names
        self.lengths = list(map(_length_of, self.datasets, names))
        self.cumulative_sizes: list[int] = np.cumsum(self.lengths, dtype=np.int64).tolist()
        self.max_bad = max_bad
        self.has_limits = any(limit is not None for limit in max_bad)
        self.num_mixed = num_mixed
        self._changes = changes
        self._stop = stop
        self._num_positions = length
        self._takes_batches = all(callable(probe(one, "__getitems__")) for one in self.datasets)
        for position, weights in changes:
            self._check_weights(weights, f"weights_at[{position}]: " if position else "")

    def _check_weights(self, weights: list[Fraction], where: str) -> None:
        if not any(weights):
            raise BadArgument(f"{where}all weights are 0", remedy=_USAGE)
        for name, length, weight in zip(self.names, self.lengths, weights, strict=True):
            if weight and not length:
                raise BadArgument(
                    f"{where}source {name!r} has weight {float(weight):g}, but no samples",
                    remedy="a weight of 0 for it, or leave it out",
                )

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> Any:
        source, place = self.locate(index)
        return self.datasets[source][place]

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]]:
        """Present only if every source has it, because a loader then sets one seed per batch."""
        if not self._takes_batches:
            raise AttributeError("__getitems__")
        return self._get_many

    def _get_many(self, indices: Sequence[int]) -> list[Any]:
        places: dict[int, list[tuple[int, int]]] = {}
        for row, index in enumerate(indices):
            source, place = self.locate(index)
            places.setdefault(source, []).append((row, place))
        found: list[Any] = [None] * len(indices)
        for source, wanted in places.items():
            samples = self.datasets[source].__getitems__([place for _, place in wanted])
            for (row, _), sample in zip(wanted, samples, strict=True):
                found[row] = sample
        return found

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the source of ``index``, and the index in that source.

        Example:
            >>> import penstock
            >>> mixture = penstock.mix([("abc", 1), ("de", 1)])
            >>> mixture.locate(4), mixture[4]
            ((1, 1), 'e')
        """
        index, length = int(index), self.cumulative_sizes[-1]
        if index < 0:
            index += length
        check_index(index, length)
        source = bisect_right(self.cumulative_sizes, index)
        return source, index - self.cumulative_sizes[source] + self.lengths[source]

    def order(self, *, shuffle: bool = False, **options: Unpack[OrderOptions]) -> MixtureOrder:
        """Return the order of the mixture, as ``sampler=`` of any DataLoader.

        Args:
            shuffle: False reads each source in its own order.
            options: As in :class:`penstock.SeededOrder`. Give the ``batch_size`` of the loader.
        """
        return MixtureOrder(self, shuffle=shuffle, **options)

    def interleaving(self, group: int) -> Interleaving:
        """Return the order of the sources for a global batch of ``group`` samples."""
        return Interleaving(self._changes, group)

    def num_positions(self, sequence: Interleaving) -> int:
        """Return the number of positions in an epoch."""
        if self._num_positions is not None:
            return self._num_positions
        drawn = sequence.parts.any(axis=0)
        lengths = np.array(self.lengths, dtype=np.int64)[drawn]
        if self._stop == "first":
            return first_true(lambda term: bool((sequence.counts(term + 1)[drawn] > lengths).any()))
        found = first_true(lambda term: bool((sequence.counts(term)[drawn] >= lengths).all()))
        if found >= MAX_TERM:
            raise BadArgument(
                'stop="all" never ends: the last weights of some sources are 0, or too small',
                remedy="penstock.mix(..., length=1_000_000)",
            )
        return found

    @property
    def is_endless(self) -> bool:
        """True if epochs are consecutive parts of one order."""
        return self._num_positions is not None

    def fingerprint(self) -> dict[str, Any]:
        """Return what a saved state keeps of the sources, as plain values."""
        lists: dict[str, Any] = {
            "names": self.names,
            "lengths": self.lengths,
            "positions of weights": [term for term, _ in self._changes],
            "weights": [_shares(weights) for _, weights in self._changes],
        }
        contents = list(map(_describe_content, self.datasets))
        if any(contents):
            lists["contents"] = contents
        if len(self.datasets) > FULL_FINGERPRINT or len(self._changes) > FULL_FINGERPRINT:
            lists = {name: _hash(values) for name, values in lists.items()}
        how = {} if self.num_mixed is None else {"num_mixed": self.num_mixed}
        return {"number": len(self.datasets), "stop": self._stop, **how, **lists}

    def __repr__(self) -> str:
        return f"Mixture({len(self.datasets)} sources, {len(self)} samples)"


class MixtureOrder(Order):
    """The order of a mixture: a sampler for any DataLoader. See :meth:`Mixture.order`.

    Example:
        >>> import penstock
        >>> mixture = penstock.mix([("abcdefgh", 3), ("xyz", 1)], length=12)
        >>> "".join(mixture[index] for index in mixture.order())
        'abxcdeyfghza'
        >>> order = mixture.order(shuffle=True, seed=0, batch_size=4)
        >>> "".join(mixture[index] for index in order)
        'fegcydhxahbd'
        >>> order.counts(12)
        {'0': 10, '1': 2}
    """

    def __init__(
        self, mixture: Mixture, *, shuffle: bool = False, **options: Unpack[OrderOptions]
    ) -> None:
        self.shuffle = shuffle
        self.mixture: Mixture = mixture
        batch_size = check_count("batch_size", options.get("batch_size", 1), 1)
        self._group = batch_size * check_count("world_size", options.get("world_size", 1), 1)
        self._sequence = mixture.interleaving(self._group)
        self._lengths = np.array(mixture.lengths, dtype=np.int64)
        self._firsts = np.array(mixture.cumulative_sizes, dtype=np.int64) - self._lengths
        self._has_blocks = np.array(
            [
                mixture.num_mixed is not None and probe(source, "block_starts") is not None
                for source in mixture.datasets
            ]
        )
        self._block_orders: dict[int, tuple[int, BlockOrder]] = {}
        super().__init__(mixture.num_positions(self._sequence), **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        is_endless = self.mixture.is_endless
        self._first_term = self.epoch * self.length if is_endless else 0
        if self._first_term + self.length > MAX_TERM:
            raise BadArgument(
                f"epoch={epoch} of {self.length} positions is beyond position 2**61",
                remedy="epoch=0",
            )
        self._key = make_key(MIX_STREAM, self.seed, 0 if is_endless else self.epoch)

    def _settings(self) -> dict[str, Any]:
        return {
            "shuffle": self.shuffle,
            "sources": self.mixture.fingerprint(),
            "global_batch": self._group,
        }

    def _is_permuted(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which positions are in a complete global batch. Its terms are permuted."""
        return positions < self.length // self._group * self._group

    def _terms(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.length < self._group or self._group == 1:
            return positions + self._first_term
        slots = positions % self._group
        moves = (slot_terms(self._group)[slots] - slots) * self._is_permuted(positions)
        return positions + moves + self._first_term

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = check_indices(positions, self.length).astype(np.int64, copy=False).reshape(-1)
        sources, turns = self._turns(places)
        lengths = self._lengths[sources]
        passes = turns // lengths
        found = turns - passes * lengths
        if self.shuffle:
            found = self._shuffled(sources, passes, found)
        found += self._firsts[sources]
        return found.reshape(np.shape(positions))

    def _shuffled(
        self,
        sources: npt.NDArray[np.int64],
        passes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        keys = mix64_many(np.uint64(self._key) + sources.astype(np.uint64) * np.uint64(GOLDEN))
        keys = mix64_many(keys ^ passes.astype(np.uint64))
        found = shuffle_many(places, self._lengths[sources], keys)
        in_blocks = self._has_blocks[sources]
        for key in np.unique(keys[in_blocks]) if in_blocks.any() else ():
            (chosen,) = np.nonzero(in_blocks & (keys == key))
            order = self._block_order(int(sources[chosen[0]]), int(key))
            found[chosen] = order.at(places[chosen])
        return found

    def _block_order(self, source: int, key: int) -> BlockOrder:
        """Return the order of one pass. Only that of the latest pass of a source is kept."""
        known, order = self._block_orders.get(source, (None, None))
        if order is None or known != key:
            data, num_mixed = self.mixture.datasets[source], self.mixture.num_mixed
            order = BlockOrder(
                data, block_starts=data.block_starts, num_mixed=num_mixed or 1, seed=key
            )
            self._block_orders[source] = key, order
        return order

    def _turns(
        self, places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the sources at several positions, and how many samples of them come before.

        The terms of a batch are permuted, and turns with them. A source that is not shuffled has
        its turns in the order of positions instead.
        """
        sources, turns = self._sequence.draw(self._terms(places))
        (inside,) = np.nonzero(self._is_permuted(places))
        if self.shuffle or self._group == 1 or not len(inside):
            return sources, turns
        batches = places[inside] // self._group
        turns = np.array(turns)
        for some in _split(np.unique(batches), max(1, BLOCK // self._group)):
            chosen = inside[(batches >= some[0]) & (batches <= some[-1])]
            rows = np.searchsorted(some, places[chosen] // self._group)
            starts = some * self._group + self._first_term
            before = _num_before(self._batch_sources(some))[rows, places[chosen] % self._group]
            turns[chosen] = before + self._sequence.turns_at(starts[rows], sources[chosen])
        return sources, turns

    def _batch_sources(self, batches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sources of complete global batches, one row for each batch."""
        places = batches[:, None] * self._group + np.arange(self._group)
        found = self._sequence.sources_at(self._terms(places.reshape(-1)))
        return found.reshape(places.shape)

    def sources_at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the sources at several positions of the epoch."""
        places = np.asarray(positions, dtype=np.int64).reshape(-1)
        return self._sequence.sources_at(self._terms(check_indices(places, self.length)))

    def counts(self, num_positions: int) -> dict[str, int]:
        """Return how many of the epoch's first positions, over all ranks, each source has.

        Exact at the end of a global batch. Within one, the batch is taken in the order of terms.
        """
        last = self._first_term + min(num_positions, self.length)
        found = self._sequence.counts(last) - self._sequence.counts(self._first_term)
        return dict(zip(self.mixture.names, found.tolist(), strict=True))

    def counter(self, state: EpochProgress) -> Callable[[], dict[str, int]]:
        return lambda: self.counts(state.start + state.num_batches * self._group)

    def position_of(self, index: int) -> int:
        """Return the position of the epoch that has ``index``, in the first pass that does.

        Raises:
            BadArgument: The sample does not occur in this epoch.
        """
        source, place = self.mixture.locate(index)
        length = self.mixture.lengths[source]
        first, last = (
            int(self._sequence.counts(self._first_term + end)[source]) for end in (0, self.length)
        )
        for number in (first // length, first // length + 1):
            key = mix64(mix64(self._key + source * GOLDEN) ^ number & MASK)
            inner = self._place_in_pass(source, place, key) if self.shuffle else place
            turn = number * length + inner
            if first <= turn < last:
                return self._position_of_turn(source, turn)
        raise BadArgument(
            f"index={index} (sample {place} of source {self.mixture.names[source]!r}) is not in "
            f"epoch {self.epoch}",
            remedy="another epoch",
        )

    def _place_in_pass(self, source: int, index: int, key: int) -> int:
        length = self.mixture.lengths[source]
        if not self._has_blocks[source]:
            return place_in_shuffle(index, length, key)
        order = self._block_order(source, key)
        return int(np.flatnonzero(order.at(np.arange(length)) == index)[0])

    def _position_of_turn(self, source: int, turn: int) -> int:
        place = self._sequence.find_turn(source, turn) - self._first_term
        first = place // self._group * self._group
        batch = np.arange(first, min(first + self._group, self.length))
        sources, turns = self._turns(batch)
        return int(batch[(sources == source) & (turns == turn)][0])


def _split(values: npt.NDArray[np.int64], size: int) -> Iterator[npt.NDArray[np.int64]]:
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _num_before(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each element, how many equal ones come before it in its row.

    Example:
        >>> _num_before(np.array([[7, 5, 7, 7], [5, 5, 7, 5]])).tolist()
        [[0, 0, 1, 2], [0, 1, 0, 2]]
    """
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    places = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    is_new = np.ones(rows.shape, dtype=bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    starts = np.maximum.accumulate(np.where(is_new, places, 0), axis=1)
    found = np.empty_like(rows)
    np.put_along_axis(found, order, places - starts, axis=1)
    return found


def _read_pairs(sources: Iterable[Any]) -> list[tuple[Any, Any]]:
    pairs = [] if isinstance(sources, (str, bytes, Mapping)) else list(sources)
    if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise BadArgument("sources must be a list of pairs (dataset, weight)", remedy=_USAGE)
    check_count("the number of sources", len(pairs), 1, MAX_SOURCES)
    return [(source, weight) for source, weight in pairs]


def _length_of(source: Any, name: str) -> int:
    if isinstance(source, Mixture):
        raise BadArgument(
            f"source {name!r} is a mixture, whose weights would be lost",
            remedy="one mix() of all sources, with the products of the weights",
        )
    torch = sys.modules.get("torch")
    is_stream = torch is not None and isinstance(source, torch.utils.data.IterableDataset)
    is_indexed = all(hasattr(type(source), method) for method in ("__len__", "__getitem__"))
    if is_stream or not is_indexed:
        raise BadArgument(
            f"source {name!r} is a {type(source).__name__} without len() or source[i]",
            remedy="a map-style dataset, for example penstock.open_dataset(path)",
        )
    return check_count(f"len(source {name!r})", len(source))


def _to_fraction(weight: Any, source: int, where: str = "") -> Fraction:
    """Return a weight as an exact fraction: 0.1 is 3602879701896397 / 2**55, as the float is."""
    try:
        if isinstance(weight, (bool, str)):
            raise TypeError
        found = Fraction(weight if isinstance(weight, (int, float, Fraction)) else float(weight))
    except (TypeError, ValueError, OverflowError):
        found = Fraction(-1)
    if found < 0:
        raise BadArgument(
            f"{where}weight {weight!r} of source {source} must be a finite, non-negative number",
            remedy=_USAGE,
        )
    return found


def _read_changes(
    weights: list[Any], weights_at: Mapping[int, Weights] | None
) -> list[tuple[int, list[Fraction]]]:
    changes = [(0, [_to_fraction(weight, source) for source, weight in enumerate(weights)])]
    if weights_at is not None and not isinstance(weights_at, Mapping):
        raise BadArgument(
            f"weights_at={weights_at!r} must map positions to lists of weights",
            remedy="weights_at={10_000: [1, 3]}",
        )
    given: dict[Any, Any] = dict(weights_at or {})
    for position in given:
        if not hasattr(type(position), "__index__") or not 1 <= position <= MAX_TERM:
            raise BadArgument(
                f"weights_at has the position {position!r}, which must be an integer of at least 1",
                remedy="weights_at={10_000: [1, 3]}. Weights from the start are those of the pairs",
            )
    for position, changed in sorted(given.items()):
        where = f"weights_at[{position}]"
        if not isinstance(changed, Iterable) or isinstance(changed, (str, Mapping)):
            raise BadArgument(
                f"{where} is {changed!r}, and must be a list of weights",
                remedy=f"weights_at={{{position}: [{', '.join('1' * len(weights))}]}}",
            )
        values = list(changed)
        if len(values) != len(weights):
            raise BadArgument(
                f"{where} has {len(values)} weights for {len(weights)} sources",
                remedy="one weight for each source, 0 to leave a source out",
            )
        found = [_to_fraction(one, source, f"{where}: ") for source, one in enumerate(values)]
        changes.append((position, found))
    return changes


def _check_stop(stop: Any, length: Any) -> str:
    BadArgument.unless_one_of("stop", stop, ("first", "all"), "penstock.mix")
    if length is not None and stop != "first":
        raise BadArgument(
            f"stop={stop!r} and length={length} cannot be combined", remedy=f"length={length}"
        )
    return "length" if length is not None else str(stop)


def _check_names(names: Any, num_sources: int) -> list[str]:
    found = [] if isinstance(names, str) else list(names)
    if len(found) != num_sources or len(set(found)) != num_sources:
        raise BadArgument(
            f"names must hold {num_sources} different names, one for each source",
            remedy='names=["web", "books"]',
        )
    return [str(name) for name in found]


def _check_budgets(max_bad: Any, num_sources: int) -> list[float | None]:
    is_one = max_bad is None or not isinstance(max_bad, (list, tuple))
    values = [max_bad] * num_sources if is_one else list(max_bad)
    if len(values) != num_sources:
        raise BadArgument(
            f"max_bad has {len(values)} values for {num_sources} sources",
            remedy="one value for all sources, or one for each",
        )
    return [check_max_bad("max_bad", value) for value in values]


def _describe_content(source: Any) -> str | None:
    """Return what is known of a source's content without reading it.

    That is its own ``fingerprint``, if it has that attribute, or a hash of its blocks.
    """
    own, starts = probe(source, "fingerprint"), probe(source, "block_starts")
    if isinstance(own, str):
        return own
    if not isinstance(starts, np.ndarray) or len(starts) > len(source):  # one sample in each block
        return None
    return hash_array(starts)


def _shares(weights: list[Fraction]) -> list[float]:
    total = sum(weights)
    return [float(weight / total) for weight in weights]


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
