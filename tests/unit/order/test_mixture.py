"""``penstock.mix``: arguments, indices, epochs, states and counters."""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

import penstock
from penstock import DataLoader
from penstock.errors import BadArgument, BadState, TooManyBad

pytestmark = pytest.mark.legacy


class Tagged:
    """Samples (source, index); some can be bad, and reads can be by batch."""

    def __init__(self, name: str, length: int, bad: tuple[int, ...] = ()) -> None:
        self.name, self.length, self.bad = name, length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[str, int]:
        if index in self.bad:
            raise ValueError(f"{self.name} {index} is truncated")
        return self.name, index


class Batched(Tagged):
    def __getitems__(self, indices: list[int]) -> list[tuple[str, int]]:
        return [self[index] for index in indices]


class InBlocks(Tagged):
    @property
    def block_starts(self) -> np.ndarray:
        return np.array([0, 3, 10, 14, 20, 27, 31, 40])


def read(loader: Any) -> list[tuple[str, int]]:
    return [one for batch in loader for one in zip(*batch_lists(batch), strict=True)]


def batch_lists(batch: Any) -> tuple[list[str], list[int]]:
    return list(batch[0]), batch[1].tolist()


PAIR = [(Tagged("a", 30), 3), (Tagged("b", 10), 1)]


def test_a_loader_draws_in_proportion_and_without_shuffling_each_source_in_its_own_order() -> None:
    found = read(DataLoader(penstock.mix(PAIR), batch_size=8))
    for name in "ab":
        own = [index for source, index in found if source == name]
        assert own == list(range(len(own)))
    counts = Counter(source for source, _ in found)
    assert counts["a"] == 30 or counts["b"] == 10
    assert abs(counts["a"] - 3 * counts["b"]) < 8


def test_one_source_is_read_as_without_a_mixture() -> None:
    found = read(DataLoader(penstock.mix([(Tagged("a", 50), 0.1)]), batch_size=8))
    assert found == [("a", index) for index in range(50)]


def test_epochs_are_shuffled_anew_and_are_the_same_for_the_same_seed() -> None:
    loader = DataLoader(penstock.mix(PAIR, stop="all"), batch_size=4, shuffle=True, seed=1)
    first, second = read(loader), read(loader)
    assert first != second
    assert {*first} == {*second} == {("a", i) for i in range(30)} | {("b", i) for i in range(10)}
    again = DataLoader(penstock.mix(PAIR, stop="all"), batch_size=4, shuffle=True, seed=1)
    assert read(again) == first
    again.set_epoch(0)
    assert read(again) == first


def test_epochs_of_a_given_length_continue_the_passes() -> None:
    loader = DataLoader(penstock.mix(PAIR, length=20), batch_size=4, shuffle=True, seed=1)
    seen = Counter(one for _ in range(6) for one in read(loader))
    for name, length in (("a", 30), ("b", 10)):
        counts = [seen[name, index] for index in range(length)]
        assert max(counts) - min(counts) <= 1


def test_a_mixture_is_read_by_index_and_travels() -> None:
    mixture = pickle.loads(pickle.dumps(penstock.mix(PAIR)))
    assert len(mixture) == 40
    assert mixture[0] == ("a", 0)
    assert mixture[30] == mixture[-10] == ("b", 0)
    assert mixture[np.int64(39)] == ("b", 9)
    assert mixture.locate(31) == (1, 1)
    with pytest.raises(IndexError, match="40 is out of range for length 40"):
        mixture[40]
    assert repr(mixture) == "Mixture(2 sources, 40 samples)"


def test_batches_are_read_by_source_if_every_source_can() -> None:
    mixture = penstock.mix([(Batched("a", 5), 1), (Batched("b", 5), 1)])
    assert mixture.__getitems__([7, 0, 9, 1]) == [("b", 2), ("a", 0), ("b", 4), ("a", 1)]
    assert not hasattr(penstock.mix([(Batched("a", 5), 1), (Tagged("b", 5), 1)]), "__getitems__")


def test_sources_of_weight_zero_are_not_drawn_and_may_be_empty() -> None:
    pairs = [(Tagged("a", 5), 0), (Tagged("b", 5), 1), (Tagged("c", 0), 0)]
    assert {name for name, _ in read(DataLoader(penstock.mix(pairs, stop="all")))} == {"b"}


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", None, True, 1j])
def test_weights_that_make_no_sense_are_refused(weight: Any) -> None:
    with pytest.raises(BadArgument, match=r"weight .* of source 1 must be a finite, non-negative"):
        penstock.mix([("abc", 1), ("de", weight)])


def test_any_kind_of_number_is_a_weight() -> None:
    weights = [1, 1.0, Fraction(1), np.float32(1), np.int64(1)]
    orders = [penstock.mix([("abc", one), ("de", 2)]).order() for one in weights]
    assert all(list(order) == list(orders[0]) for order in orders)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": []}, "sources must be a list of pairs"),
        ({"sources": ["abc"]}, "sources must be a list of pairs"),
        ({"sources": {"a": 1}}, "sources must be a list of pairs"),
        ({"sources": [("", 1), ("a", 1)]}, "source '0' has weight 1, but no samples"),
        ({"sources": [("a", 0), ("b", 0.0)]}, "all weights are 0"),
        ({"sources": [(iter([1]), 1)]}, "is a list_iterator without len"),
        ({"sources": [(Stream(), 1)]}, "is a Stream without len"),
        ({"sources": [(penstock.mix([("a", 1)]), 1)]}, "is a mixture, whose weights would be lost"),
        ({"stop": "last"}, r"(?s)stop='last' must be.*Try: penstock.mix\("),
        ({"stop": "all", "length": 5}, "stop='all' and length=5 cannot be combined"),
        ({"length": 0}, "length=0 must be at least 1"),
        ({"weights_at": [1, 2]}, "must map positions to lists of weights"),
        ({"weights_at": {5: [1]}}, re.escape("weights_at[5] has 1 weights for 2 sources")),
        ({"weights_at": {0: [1, 1]}}, "position 0, which must be an integer of at least 1"),
        ({"weights_at": {"x": [1, 1]}}, "position 'x', which must be an integer"),
        ({"weights_at": {5: 3}}, re.escape("weights_at[5] is 3, and must be a list of weights")),
        ({"weights_at": {5: [1, -1]}}, re.escape("weights_at[5]: weight -1 of source 1 must")),
        ({"weights_at": {5: [0, 0]}}, re.escape("weights_at[5]: all weights are 0")),
        ({"names": ["a"]}, "names must hold 2 different names"),
        ({"names": ["a", "a"]}, "names must hold 2 different names"),
        ({"names": "ab"}, "names must hold 2 different names"),
        ({"max_bad": [1]}, "max_bad has 1 values for 2 sources"),
        ({"max_bad": -1}, "max_bad=-1 must be a count"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    arguments = {"sources": [("abc", 1), ("de", 1)], **arguments}
    with pytest.raises(BadArgument, match=message):
        penstock.mix(arguments.pop("sources"), **arguments)


def test_an_epoch_that_never_ends_is_refused() -> None:
    mixture = penstock.mix([("abc", 1), ("de", 1)], stop="all", weights_at={2: [1, 0]})
    with pytest.raises(BadArgument, match='stop="all" never ends'):
        mixture.order()


def test_shuffling_needs_a_seed_and_ranks_without_shuffling_do_not() -> None:
    with pytest.raises(BadArgument, match="shuffle=True needs a seed for a mixture"):
        DataLoader(penstock.mix(PAIR), shuffle=True)
    loaders = [
        DataLoader(penstock.mix(PAIR), batch_size=4, rank=rank, world_size=2) for rank in (0, 1)
    ]
    whole = read(DataLoader(penstock.mix(PAIR), batch_size=8))
    assert sorted(read(loaders[0]) + read(loaders[1])) == sorted(whole)


def test_an_order_is_a_sampler_for_torch_s_loader_too() -> None:
    from torch.utils.data import DataLoader as TorchDataLoader

    mixture = penstock.mix(PAIR)
    order = mixture.order(shuffle=True, seed=3, batch_size=4)
    theirs = TorchDataLoader(mixture, batch_size=4, sampler=order)  # type: ignore[arg-type]
    ours = DataLoader(mixture, batch_size=4, shuffle=True, seed=3)
    assert read(theirs) == read(ours)


def test_epochs_beyond_the_last_position_are_refused() -> None:
    order = penstock.mix(PAIR, length=1 << 40).order()
    order.set_epoch((1 << 21) - 1)
    with pytest.raises(BadArgument, match=r"beyond position 2\*\*61"):
        order.set_epoch(1 << 21)


# -- states ----------------------------------------------------------------------------------------


def loader_of(pairs: Any = PAIR, **how: Any) -> Any:
    return DataLoader(penstock.mix(pairs, **how), batch_size=4, shuffle=True, seed=1)


def test_a_state_resumes_in_the_middle_and_is_small() -> None:
    loader = loader_of(length=100)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state, rest = loader.state_dict(), [batch_lists(batch) for batch in batches]
    assert len(repr(state)) < 500
    other = loader_of(length=100)
    other.load_state_dict(state)
    assert [batch_lists(batch) for batch in other] == rest


@pytest.mark.parametrize(
    ("pairs", "how", "message"),
    [
        ([*PAIR, ("x", 1)], {}, "number of the sources: 2 in the state, 3 here"),
        (
            [(Tagged("a", 31), 3), PAIR[1]],
            {},
            "lengths[0] of the sources: 30 in the state, 31 here",
        ),
        ([PAIR[0], (Tagged("b", 10), 2)], {}, "weights[0] of the sources: [0.75, 0.25] in the"),
        (
            PAIR,
            {"names": ["web", "books"]},
            "names[0] of the sources: '0' in the state, 'web' here",
        ),
        (PAIR, {"weights_at": {9: [1, 1]}}, "positions of weights of the sources: [0] in the"),
        (
            PAIR,
            {"length": None, "stop": "all"},
            "stop of the sources: 'length' in the state, 'all'",
        ),
    ],
)
def test_a_state_of_other_sources_is_refused_by_name(pairs: Any, how: Any, message: str) -> None:
    state = loader_of(length=100).state_dict()
    with pytest.raises(BadState, match=re.escape(message)):
        loader_of(pairs, **{"length": 100, **how}).load_state_dict(state)
    loader_of(length=100).load_state_dict(state)  # the control


def test_sources_may_describe_their_content() -> None:
    def make(content: str) -> Any:
        source = Tagged("a", 30)
        source.fingerprint = content  # type: ignore[attr-defined]
        return loader_of([(source, 3), (InBlocks("b", 40), 1)], length=100)

    state = make("of May").state_dict()
    make("of May").load_state_dict(state)
    with pytest.raises(
        BadState, match=r"contents\[0\] of the sources: 'of May' in the state, 'of J"
    ):
        make("of June").load_state_dict(state)
    other = loader_of([(Tagged("a", 30), 3), (Tagged("b", 40), 1)], length=100)
    with pytest.raises(BadState, match="contents of the sources"):
        other.load_state_dict(state)


def test_weights_in_other_units_are_the_same_weights() -> None:
    state = loader_of(length=100).state_dict()
    loader_of([(Tagged("a", 30), 0.75), (Tagged("b", 10), 0.25)], length=100).load_state_dict(state)


def test_a_state_of_one_dataset_is_refused_by_a_mixture_and_the_other_way_round() -> None:
    plain = DataLoader(Tagged("a", 100), batch_size=4, shuffle=True, seed=1)
    with pytest.raises(BadState, match="SeededOrder in the state, MixtureOrder here"):
        loader_of(length=100).load_state_dict(plain.state_dict())
    with pytest.raises(BadState, match="MixtureOrder in the state, SeededOrder here"):
        plain.load_state_dict(loader_of(length=100).state_dict())


def test_many_sources_leave_a_small_state_that_names_what_differs() -> None:
    pairs = [(range(1 + number), 1 + number % 7) for number in range(1000)]
    state = loader_of(pairs, length=100).state_dict()
    assert len(repr(state)) < 600
    loader_of(pairs, length=100).load_state_dict(state)
    pairs[500] = range(7), pairs[500][1]
    with pytest.raises(BadState, match=r"lengths of the sources: .* in the state"):
        loader_of(pairs, length=100).load_state_dict(state)


# -- bad samples, counters, replay -----------------------------------------------------------------


def test_a_source_has_its_own_limit_of_bad_samples() -> None:
    pairs = [(Tagged("a", 30, bad=(1, 2, 3)), 1), (Tagged("b", 30, bad=(5, 6)), 1)]

    def load(max_bad: Any) -> Any:
        mixture = penstock.mix(pairs, stop="all", names=["web", "books"], max_bad=max_bad)
        loader = DataLoader(mixture, batch_size=4, shuffle=True, seed=0, on_error="skip")
        for _ in loader:
            pass
        return loader

    assert len(load([3, 2]).bad_samples) == 5  # "all" repeats none of them here
    load([3, None])
    with pytest.raises(
        TooManyBad, match=r"2 bad samples of source 'books' in epoch 0, but its max_bad=1"
    ):
        load([None, 1])
    with pytest.raises(TooManyBad, match=r"3 bad samples of source 'web' .* max_bad=0.08 allows 2"):
        load(0.08)


def test_a_limit_without_a_policy_is_warned_about() -> None:
    def load(max_bad: Any, **options: Any) -> None:
        DataLoader(penstock.mix([(range(4), 1), (range(4), 1)], max_bad=max_bad), **options)

    for options in ({}, {"seed": 0, "shuffle": True}):
        with pytest.warns(UserWarning, match="max_bad of the mixture has no effect") as told:
            load([None, 0], **options)
        assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load([None, 0], on_error="skip")
        load(None)


def test_the_limit_counts_bad_samples_from_before_a_resume() -> None:
    pairs = [(Tagged("a", 40, bad=(3, 30)), 1), (Tagged("b", 40), 1)]

    def make(most: int) -> Any:
        mixture = penstock.mix(pairs, length=70, max_bad=[most, 0])
        return DataLoader(mixture, batch_size=5, on_error="skip")

    loader = make(1)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    assert len(state["bad"]["positions"]) == 1
    resumed = make(1)
    resumed.load_state_dict(state)
    with pytest.raises(TooManyBad, match="2 bad samples of source '0'"):
        list(resumed)
    enough = make(2)
    enough.load_state_dict(state)
    list(enough)


def test_statistics_and_timeline_count_the_samples_of_each_source() -> None:
    loader = DataLoader(penstock.mix(PAIR, names=["a", "b"], length=40), batch_size=8)
    seen: Counter[str] = Counter()
    for batch in loader:
        seen.update(batch[0])
        assert loader.metrics().sources == {"a": seen["a"], "b": seen["b"]}
    assert loader.timeline().facts["sources"] == dict(seen)
    plain = DataLoader(Tagged("a", 3))
    list(plain)
    assert plain.metrics().sources is None
    assert "sources" not in plain.timeline().facts


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sample_is_replayed(shuffle: bool) -> None:
    mixture = penstock.mix([(range(30), 3), (range(100, 110), 1)], stop="all")
    loader = DataLoader(mixture, batch_size=8, shuffle=shuffle, seed=4)
    assert penstock.replay(loader, 2, 33) == 103
    short = DataLoader(penstock.mix([(range(30), 3), (range(5), 1)]), batch_size=8, seed=4)
    with pytest.raises(BadArgument, match="sample 29 of source '0'"):
        penstock.replay(short, 0, 29)


def test_sources_in_blocks_are_shuffled_by_groups_of_blocks() -> None:
    pairs = [(InBlocks("a", 40), 1), (Tagged("b", 40), 1)]

    def blocks_of(num_mixed: int | None) -> list[set[int]]:
        mixture = penstock.mix(pairs, length=160, num_mixed=num_mixed)
        loader = DataLoader(mixture, batch_size=8, shuffle=True, seed=2)
        own = [index for name, index in read(loader) if name == "a"]
        for first in (0, 40):  # two passes
            assert len({*own[first : first + 40]}) == len(own[first : first + 40])
        for index in (0, 17, 39, 41):
            assert penstock.replay(loader, 0, index) == mixture[index]
        starts = pairs[0][0].block_starts
        found = (np.searchsorted(starts, own, side="right") - 1).tolist()
        return [{*found[first : first + 6]} for first in range(0, 36, 6)]

    assert max(map(len, blocks_of(1))) <= 3
    assert max(map(len, blocks_of(None))) > 3
    with pytest.raises(BadArgument, match="num_mixed=0"):
        penstock.mix(pairs, num_mixed=0)


def test_ten_thousand_sources_are_mixed() -> None:
    pairs = [(range(number % 50 + 1), number % 13) for number in range(10_000)]
    mixture = penstock.mix(pairs, length=30_000)
    order = mixture.order(shuffle=True, seed=0, batch_size=64, world_size=4)
    drawn = np.bincount(order.sources_at(np.arange(30_000)), minlength=10_000)
    weights = np.arange(10_000) % 13
    assert np.abs(drawn - 30_000 * weights / weights.sum()).max() < 4
    assert drawn[weights == 0].sum() == 0
