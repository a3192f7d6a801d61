"""Mixtures: every source has its share in every prefix, on every rank, and is read pass by pass."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import penstock
from penstock.order import interleave, mixture
from penstock.order.interleave import count_bound, num_runs

pytestmark = pytest.mark.legacy

WEIGHTS = st.one_of(
    st.integers(0, 50),
    st.floats(0, 1e3, allow_subnormal=False),
    st.fractions(0, 10, max_denominator=1000),
)
SEEDS = st.integers(-(1 << 63), (1 << 64) - 1)


@st.composite
def sources(draw: Any) -> list[tuple[range, Any]]:
    found = draw(st.lists(st.tuples(st.integers(1, 60), WEIGHTS), min_size=1, max_size=7))
    assume(any(weight for _, weight in found))
    return [(range(length), weight) for length, weight in found]


def worst_excess(order: Any, *, start: int = 0) -> float:
    """Return the largest error of a source's count in a prefix of the rank, minus its bound."""
    sequence, group = order._sequence, order._group
    rows = group // order.world_size
    rest = order.starting_at(start)
    places = np.array([rest.global_position(place) for place in range(len(rest))], dtype=np.int64)
    drawn = order.sources_at(places % order.length)
    first = order.rank * rows
    shares = sequence.parts[0] / sequence.unit
    worst = -np.inf
    counts = np.zeros(len(shares))
    for place, source in enumerate(drawn.tolist(), 1):
        counts[source] += 1
        num_batches, more = divmod(place, rows)
        in_all = num_runs(first, first + rows, group)
        in_last = num_runs(first, first + more, group, in_one_batch=True)
        bound = in_all * count_bound(num_batches * rows, sequence.base)
        bound += in_last * count_bound(more, sequence.base)
        is_tail = start + (num_batches + (more > 0)) * group > order.length
        bound += count_bound(rows, sequence.base) if is_tail else 0
        worst = max(worst, float(np.abs(counts - shares * place).max()) - bound)
    return worst


@settings(max_examples=40)
@given(
    sources(),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 400),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_each_source_has_its_share_in_every_prefix_of_every_rank(
    pairs: Any, world_size: int, rows: int, length: int, num_done: int, epoch: int
) -> None:
    mix = penstock.mix(pairs, length=length)
    start = min(num_done, length // (rows * world_size)) * rows * world_size
    for rank in range(world_size):
        order = mix.order(batch_size=rows, rank=rank, world_size=world_size, epoch=epoch)
        assert worst_excess(order, start=start) <= 1e-6


@settings(max_examples=40)
@given(sources(), st.integers(1, 64), st.integers(1, 2000), st.integers(0, 1000))
def test_and_on_the_whole_after_every_batch(
    pairs: Any, group: int, length: int, epoch: int
) -> None:
    order = penstock.mix(pairs, length=length).order(batch_size=group, epoch=epoch)
    shares = order._sequence.parts[0] / order._sequence.unit
    drawn = order.sources_at(np.arange(length))
    counts = np.cumsum(drawn[:, None] == np.arange(len(shares)), axis=0)
    for last in range(group, length + 1, group):
        bound = count_bound(last, order._sequence.base)
        assert np.abs(counts[last - 1] - last * shares).max() <= bound + 1e-6
    assert list(order.counts(length).values()) == counts[-1].tolist()


def test_alternation_gives_each_of_two_ranks_one_source() -> None:
    """The control of the bound: what mix() must not do, and what it does instead."""
    alternating = np.arange(200) % 2
    assert set(alternating[0::2]) == {0}
    order = penstock.mix([(range(100), 1), (range(100), 1)], length=200).order(world_size=2)
    drawn = order.sources_at([order.global_position(place) for place in range(len(order))])
    assert abs((drawn == 0).sum() - 50) <= count_bound(100, 3)
    assert abs((alternating[0::2] == 0).sum() - 50) > count_bound(100, 3)


def test_a_base_that_divides_the_global_batch_breaks_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mix = penstock.mix([(range(9), 1), (range(9), 1)], length=400)
    assert worst_excess(mix.order(batch_size=1, world_size=4)) <= 0
    monkeypatch.setattr(interleave, "prime_not_dividing", lambda group: 2)
    assert worst_excess(mix.order(batch_size=1, world_size=4)) > 20


def test_batches_in_the_order_of_terms_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = penstock.mix([(range(9), 1), (range(9), 242)], length=242 * 122)
    assert worst_excess(mix.order(batch_size=121, world_size=2)) <= 0
    monkeypatch.setattr(mixture, "slot_terms", np.arange)
    assert worst_excess(mix.order(batch_size=121, world_size=2)) > 10


def indices_of(order: Any, start: int = 0) -> list[int]:
    return list(order.starting_at(start))


@settings(max_examples=50)
@given(
    sources(),
    st.sampled_from(["first", "all", "length"]),
    st.integers(1, 300),
    st.integers(1, 12),
    SEEDS,
    st.integers(0, 50),
    st.booleans(),
)
def test_a_source_is_read_pass_by_pass(
    pairs: Any, stop: str, length: int, rows: int, seed: int, epoch: int, shuffle: bool
) -> None:
    """In one epoch, or in consecutive ones if they are parts of one order."""
    how: dict[str, Any] = {"length": length} if stop == "length" else {"stop": stop}
    mix = penstock.mix(pairs, **how)
    order = mix.order(shuffle=shuffle, seed=seed, batch_size=rows, epoch=epoch)
    assume(order.length < 20_000)
    found = indices_of(order)
    if stop == "length":  # from the start of the run
        found = []
        for one in range(min(epoch, 4) + 1):
            order.set_epoch(one)
            found += indices_of(order)
    seen = Counter(found)
    for source, (data, weight) in enumerate(pairs):
        first = mix.cumulative_sizes[source] - len(data)
        counts = [seen.pop(first + place, 0) for place in range(len(data))]
        assert max(counts) - min(counts) <= 1  # none twice before all of the source's samples
        assert weight or not any(counts)
        if stop == "first":
            assert max(counts) <= 1
        if stop == "all" and weight:
            assert min(counts) >= 1
        if not shuffle:
            own = [index - first for index in found if first <= index < first + len(data)]
            assert own == [turn % len(data) for turn in range(len(own))]
    assert not seen


@settings(max_examples=30)
@given(
    sources(),
    st.integers(1, 300),
    st.sampled_from([(1, 2), (2, 3), (3, 1), (4, 3), (6, 2)]),
    st.integers(1, 3),
    st.integers(0, 60),
    SEEDS,
    st.booleans(),
)
def test_a_run_resumes_on_another_number_of_ranks(
    pairs: Any,
    length: int,
    ranks: tuple[int, int],
    multiple: int,
    num_done: int,
    seed: int,
    shuffle: bool,
) -> None:
    """No sample is lost or doubled, and global batches and positions are the same."""
    group = 12 * multiple
    mix = penstock.mix(pairs, length=length)
    start = min(num_done * group, length // group * group)

    def batches(world_size: int, first: int, last: int) -> list[tuple[int, int]]:
        found = []
        for rank in range(world_size):
            order = mix.order(
                shuffle=shuffle,
                seed=seed,
                batch_size=group // world_size,
                rank=rank,
                world_size=world_size,
            )
            rest = order.starting_at(first)
            positions = [rest.global_position(place) for place in range(len(rest))]
            own = list(zip(positions, rest, strict=True))
            found += [one for one in own if one[0] < last]
        return sorted(found)

    one, other = ranks
    expected = batches(1, 0, length)
    assert [position for position, _ in expected] == list(range(length))
    assert batches(one, 0, start) + batches(other, start, length) == expected


@settings(max_examples=20)
@given(sources(), st.integers(1, 500), st.integers(1, 40), SEEDS, st.booleans(), st.data())
def test_one_position_is_what_many_at_once_say_and_leads_back(
    pairs: Any, length: int, rows: int, seed: int, shuffle: bool, data: Any
) -> None:
    order = penstock.mix(pairs, length=length).order(shuffle=shuffle, seed=seed, batch_size=rows)
    order.set_epoch(data.draw(st.integers(0, 1 << 40)))
    many = order.at(np.arange(length)).tolist()
    for position in data.draw(st.lists(st.integers(0, length - 1), max_size=5)):
        assert order.index_at(position) == many[position]
        assert many[order.position_of(many[position])] == many[position]
    assert sum(order.counts(length).values()) == length
    named = Counter(order.sources_at(np.arange(length)).tolist())
    assert {str(one): named.get(one, 0) for one in range(len(pairs))} == order.counts(length)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=5),
    st.dictionaries(st.integers(1, 400), st.lists(WEIGHTS, min_size=5, max_size=5), max_size=4),
    st.integers(1, 12),
    SEEDS,
)
def test_weights_change_without_repeating_a_sample(
    lengths: list[int], changes: dict[int, Any], rows: int, seed: int
) -> None:
    at = {position: values[: len(lengths)] for position, values in changes.items()}
    assume(all(any(values) for values in at.values()))
    pairs = [(range(length), 1) for length in lengths]
    mix = penstock.mix(pairs, weights_at=at, length=500)
    order = mix.order(shuffle=True, seed=seed, batch_size=rows)
    found = order.at(np.arange(500))
    for source, length in enumerate(lengths):
        first = mix.cumulative_sizes[source] - length
        counts = np.bincount(found, minlength=len(mix))[first : first + length]
        assert counts.max() - counts.min() <= 1
    starts = [0, *sorted(at), 500]
    bound = count_bound(500, order._sequence.base)
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        if start < end <= 500:
            shares = order._sequence.parts[number] / order._sequence.unit
            drawn = order._sequence.counts(end) - order._sequence.counts(start)
            assert np.abs(drawn - (end - start) * shares).max() <= bound


@settings(max_examples=50)
@given(st.lists(WEIGHTS, min_size=1, max_size=200), st.sampled_from([2**32, 3**20, 7**11]))
@example([3, 16.0, 16.0, 6e-193], 2**32)
def test_shares_are_within_a_unit_of_the_exact_ones(weights: list[Any], unit: int) -> None:
    assume(any(weights))
    exact = [Fraction(weight) for weight in weights]
    parts = interleave.to_parts(exact, unit)
    assert sum(parts) == unit
    num_raised = 0
    for part, weight in zip(parts, exact, strict=True):
        share = unit * weight / sum(exact)
        assert (part > 0) == (weight > 0)
        num_raised += part == 1 and share < 1
        is_giver = part >= max(parts) - 1  # equal shares give up units in turn
        assert abs(part - share) <= 1 or is_giver
    assert max(parts) >= unit * max(exact) / sum(exact) - 1 - num_raised
