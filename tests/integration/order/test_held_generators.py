"""Generators held by user code give the same bits in any worker, wherever they are stored."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset

from penstock import DataLoader

pytestmark = pytest.mark.legacy

NUM_SAMPLES = 40
WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
    "2 threads": {"num_workers": 2, "pool": "thread"},
}

module_rng = np.random.default_rng(0)


def draw_from_module() -> float:
    return float(module_rng.random())


def draw_through_another() -> float:
    return draw_from_module()


class Noise:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self) -> float:
        return float(self.rng.random())


module_noise = Noise()


@functools.lru_cache(maxsize=1)
def cached_rng() -> np.random.Generator:
    return np.random.default_rng(0)


class Base(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES


class BehindAFunction(Base):
    def __getitem__(self, index: int) -> float:
        return draw_through_another()


class InAModuleObject(Base):
    def __getitem__(self, index: int) -> float:
        return module_noise()


class MadeOnFirstUse(Base):
    rng: Any = None

    def __getitem__(self, index: int) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return float(self.rng.random())


class MadeByALaterSample(Base):
    rng: Any = None

    def __getitem__(self, index: int) -> float:
        if self.rng is None and index % 4:
            return index / 100  # no draw
        self.rng = self.rng or np.random.default_rng(0)
        return float(self.rng.random()) if not index % 4 else index / 100


class BehindACache(Base):
    def __getitem__(self, index: int) -> float:
        return float(cached_rng().random())


class InAClassBody(Base):
    noise = Noise()

    def __getitem__(self, index: int) -> float:
        return self.noise()


class InManyAttributes(Base):
    def __init__(self) -> None:
        for number in range(70):
            setattr(self, f"attribute_{number}", [number])
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


class InALongList(Base):
    def __init__(self) -> None:
        self.generators = [random.Random(0) for _ in range(70)]

    def __getitem__(self, index: int) -> float:
        return self.generators[-1].random()


class InAnIterator(Base):
    def __init__(self) -> None:
        rng = random.Random(0)
        self.numbers = map(lambda _: rng.random(), itertools.repeat(0))  # noqa: C417

    def __getitem__(self, index: int) -> float:
        return next(self.numbers)


class ByAStaticMethod(Base):
    @staticmethod
    def draw() -> float:
        return draw_from_module()

    def __getitem__(self, index: int) -> float:
        return self.draw()


class OneSample(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


def joined() -> Any:
    return ConcatDataset([OneSample(number) for number in range(70)])


DATASETS = {
    "behind a function": BehindAFunction,
    "in an object of the module": InAModuleObject,
    "made on first use": MadeOnFirstUse,
    "made by a later sample": MadeByALaterSample,
    "behind a cache": BehindACache,
    "in a class body": InAClassBody,
    "the 71st attribute": InManyAttributes,
    "the 70th of a list": InALongList,
    "in one of 70 datasets": joined,
    "in an iterator's function": InAnIterator,
    "by a static method": ByAStaticMethod,
}


def two_epochs(dataset: Any, **options: Any) -> list[Any]:
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=0, **options)
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("name", DATASETS)
def test_samples_draw_the_same_wherever_the_generator_lies(name: str) -> None:
    inline = two_epochs(DATASETS[name](), **WAYS["inline"])
    epochs = inline[: len(inline) // 2], inline[len(inline) // 2 :]
    assert sorted(itertools.chain(*epochs[0])) != sorted(itertools.chain(*epochs[1]))  # control
    for way in ("1 worker", "2 workers", "2 threads"):
        if name == "in an iterator's function" and way != "2 threads":
            continue  # it cannot be sent to a process
        assert two_epochs(DATASETS[name](), **WAYS[way]) == inline, way


MODULE = """
import numpy

RNG = numpy.random.default_rng()
kept = None

def noise():
    return float(RNG.random())

def place(index, length):
    global kept
    if kept is None:
        kept = RNG.permutation(length)
    return int(kept[index])
"""


class ByAModule(Base):
    def __init__(self, module: Any) -> None:
        self.module = module

    def __getitem__(self, index: int) -> Any:
        return self.module.place(index, NUM_SAMPLES) + self.module.noise() / 2


@pytest.mark.parametrize("way", WAYS)
def test_an_unseeded_generator_of_a_module_is_as_the_user_left_it_in_every_worker(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock_test_augmentations.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("penstock_test_augmentations")
    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    state = module.RNG.bit_generator.state
    expected = module.RNG.permutation(NUM_SAMPLES).tolist()
    module.RNG.bit_generator.state = state
    batches = list(DataLoader(ByAModule(module), batch_size=4, seed=0, **WAYS[way]))
    assert [int(value) for batch in batches for value in batch] == expected
    assert len({float(value) % 1 for batch in batches for value in batch}) == NUM_SAMPLES


def test_control_without_randomness_per_sample_the_bits_depend_on_the_workers() -> None:
    options = {"randomness": "worker"}
    one = two_epochs(InManyAttributes(), num_workers=1, **options)
    assert one != two_epochs(InManyAttributes(), num_workers=2, **options)


class Adding:
    """A collate_fn with its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.tensor(samples, dtype=torch.float64) + self.rng.random()


class MakingOnFirstUse:
    rng: Any = None

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return torch.tensor(samples, dtype=torch.float64) + self.rng.random()


def adding_by_module(samples: list[Any]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float64) + draw_from_module()


@pytest.mark.parametrize("make", [Adding, MakingOnFirstUse, lambda: adding_by_module])
def test_a_collate_fn_draws_the_same_in_any_worker(make: Any) -> None:
    runs = {
        way: two_epochs(list(range(NUM_SAMPLES)), collate_fn=make(), **options)
        for way, options in WAYS.items()
    }
    assert runs["1 worker"] == runs["2 workers"] == runs["2 threads"] == runs["inline"]
    offsets = {batch[0] % 1 for batch in runs["inline"]}
    assert len(offsets) == len(runs["inline"])  # control: each batch draws


# -- values that are drawn once and kept -----------------------------------------------------------


# -- generators whose path differs between processes -----------------------------------------------


def in_a_local_class() -> Any:
    class Local(Base):
        rng = np.random.default_rng(0)

        def __getitem__(self, index: int, other: Any = random.Random(1)) -> float:  # noqa: B008
            return float(self.rng.random()) + other.random()

    return Local()


class UnderTwoNames(Base):
    zebra = antelope = np.random.default_rng(0)

    def __getitem__(self, index: int) -> float:
        return float(self.zebra.random())


def with_same_named_classes() -> Any:
    def make(seed: int) -> Any:
        class Transform:
            rng = random.Random(seed)

            def __call__(self) -> float:
                return self.rng.random()

        return Transform()

    class Two(Base):
        transforms = make(1), make(2)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([transform() for transform in self.transforms])

    return Two()


class MadeByKey(Base):
    """Holds more generators than the limit for searching a container item by item."""

    def __init__(self) -> None:
        self.made: dict[int, random.Random] = {}

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return self.made.setdefault(index % 70, random.Random(index % 70)).random()


@functools.lru_cache
def rng_of(key: int) -> np.random.Generator:
    return np.random.default_rng(key)


class InABoundedCache(Base):
    def __getitem__(self, index: int) -> float:
        return float(rng_of(index % 3).random())


class Restored(Base):
    """Draws, then restores the generator's state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> float:
        state = self.rng.bit_generator.state
        drawn = float(self.rng.random())
        self.rng.bit_generator.state = state
        return drawn


class Meta(type):
    rng = random.Random(0)


class ByMetaclass(Base, metaclass=type("Combined", (Meta, type(Base)), {})):
    def __getitem__(self, index: int) -> float:
        return type(type(self)).rng.random()


thread_local = threading.local()


class InAThreadLocal(Base):
    def __getitem__(self, index: int) -> float:
        if not hasattr(thread_local, "rng"):
            thread_local.rng = random.Random(5)
        return thread_local.rng.random()


ELSEWHERE = {
    "thread local": InAThreadLocal,
    "local class": in_a_local_class,
    "two names": UnderTwoNames,
    "same names": with_same_named_classes,
    "made by key": MadeByKey,
    "bounded cache": InABoundedCache,
    "restored": Restored,
    "metaclass": ByMetaclass,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_numbers_do_not_depend_on_the_path_in_a_process(name: str) -> None:
    runs = {}
    for way, options in WAYS.items():
        rng_of.cache_clear()
        runs[way] = two_epochs(ELSEWHERE[name](), **options)
    assert runs["1 worker"] == runs["2 workers"] == runs["2 threads"] == runs["inline"]
    epochs = runs["inline"][: len(runs["inline"]) // 2], runs["inline"][len(runs["inline"]) // 2 :]
    assert epochs[0] != epochs[1]  # control: each epoch draws


def test_two_generators_of_one_name_draw_different_numbers() -> None:
    dataset = with_same_named_classes()
    for batch in DataLoader(dataset, batch_size=4, seed=0):
        assert (batch[:, 0] != batch[:, 1]).all()


class Kept(Base):
    """Draws on first use from a generator with a fixed seed, and keeps the result."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(42)
        self.kept: Any = None

    def draw(self) -> Any:
        return self.rng.permutation(NUM_SAMPLES)

    def __getitem__(self, index: int) -> Any:
        if self.kept is None:
            self.kept = self.draw()
        return int(self.kept[index])


class KeptSplit(Kept):
    def draw(self) -> Any:
        return np.sort(self.rng.choice(1000, NUM_SAMPLES, replace=False))


class KeptFolds(Kept):
    def draw(self) -> Any:
        return self.rng.integers(5, size=NUM_SAMPLES)


class KeptVocabulary(Kept):
    def draw(self) -> Any:
        words = [f"word {number}" for number in range(NUM_SAMPLES)]
        order = self.rng.permutation(NUM_SAMPLES).tolist()
        return dict(enumerate(int(words[place].split()[1]) for place in order))


class KeptBalance(Kept):
    def draw(self) -> Any:
        by_class = [self.rng.choice(NUM_SAMPLES, 8) for _ in range(5)]
        return np.concatenate(by_class)


class KeptInADict(Base):
    def __init__(self) -> None:
        self.rng, self.cache = random.Random(1), {}

    def __getitem__(self, index: int) -> int:
        if "order" not in self.cache:
            order = list(range(NUM_SAMPLES))
            self.rng.shuffle(order)
            self.cache["order"] = order
        return int(self.cache["order"][index])


class KeptInAnArray(Base):
    def __init__(self) -> None:
        self.rng, self.table = random.Random(3), torch.full((NUM_SAMPLES,), -1)

    def __getitem__(self, index: int) -> int:
        if self.table[0] < 0:
            self.table[:] = torch.tensor(self.rng.sample(range(NUM_SAMPLES), NUM_SAMPLES))
        return int(self.table[index])


class KeptWithJitter(Kept):
    """Also draws from the same generator for each sample, before and after."""

    def __getitem__(self, index: int) -> Any:
        self.rng.random()
        place = super().__getitem__(index)
        return place + float(self.rng.random()) / 2


KEPT = (
    *(Kept, KeptSplit, KeptFolds, KeptVocabulary, KeptBalance),
    *(KeptInADict, KeptInAnArray, KeptWithJitter),
)


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_drawn_on_first_use_is_equal_in_every_worker(kind: Any) -> None:
    torch_s = torch.utils.data.DataLoader(kind(), batch_size=4)  # without workers, so only one copy
    expected = [int(value) for batch in torch_s for value in batch]
    for way, options in WAYS.items():
        batches = list(DataLoader(kind(), batch_size=4, seed=0, **options))
        assert [int(value) for batch in batches for value in batch] == expected, way


def test_the_bits_around_kept_state_are_the_sample_s_own() -> None:
    runs = [two_epochs(KeptWithJitter(), **options) for options in WAYS.values()]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("way", ["inline", "2 threads"])
def test_the_user_s_generators_are_left_as_they_were(way: str) -> None:
    dataset, expected = InManyAttributes(), np.random.default_rng(0).random()
    two_epochs(dataset, **WAYS[way])
    assert dataset.rng.random() == expected
    dataset[0]
    assert dataset.rng.random() != expected  # control: a draw advances it


class KeepingMore(Base):
    """Keeps a drawn number for each sample, different in each worker."""

    def __init__(self) -> None:
        self.rng, self.cache = np.random.default_rng(0), {}

    def __getitem__(self, index: int) -> float:
        if index not in self.cache:
            self.cache[index] = self.rng.random(3)
        return float(self.cache[index][0])


@pytest.mark.parametrize("way", WAYS)
def test_draws_that_are_kept_later_are_named_in_the_plan(way: str) -> None:
    loader = DataLoader(KeepingMore(), batch_size=4, seed=0, **WAYS[way])
    list(loader)
    assert any("dataset.cache changed while" in note for note in loader.plan.notes)
    calm = DataLoader(InManyAttributes(), batch_size=4, seed=0, **WAYS[way])
    list(calm)
    assert not any("changed while" in note for note in calm.plan.notes)  # control


class KeptFromGlobals(Kept):
    """Draws on first use from NumPy's global generator."""

    def draw(self) -> Any:
        return np.random.permutation(NUM_SAMPLES)


class OpenedOnFirstUse(Base):
    file: Any = None

    def __getitem__(self, index: int) -> float:
        self.file = self.file or Path(__file__).open()  # noqa: SIM115
        return float(np.random.rand())


@pytest.mark.parametrize("way", WAYS)
def test_kept_draws_of_global_generators_are_named_in_the_plan(way: str) -> None:
    loader = DataLoader(KeptFromGlobals(), batch_size=4, seed=0, **WAYS[way])
    list(loader)
    assert any("dataset.kept changed while" in note for note in loader.plan.notes)
    opened = OpenedOnFirstUse()
    calm = DataLoader(opened, batch_size=4, seed=0, **WAYS[way])
    list(calm)
    if opened.file is not None:
        opened.file.close()
    assert not any("changed while" in note for note in calm.plan.notes)  # control


def seed_numpy(worker: int) -> None:
    np.random.seed(42)


def seed_numpy_by_worker(worker: int) -> None:
    np.random.seed(42 + worker)


def test_numpy_s_seed_of_worker_init_fn_makes_kept_draws_equal_in_every_worker() -> None:
    def values(init_fn: Any) -> list[int]:
        loader = DataLoader(KeptFromGlobals(), batch_size=4, num_workers=2, worker_init_fn=init_fn)
        return [int(value) for batch in loader for value in batch]

    np_state = np.random.RandomState(42)
    assert values(seed_numpy) == np_state.permutation(NUM_SAMPLES).tolist()  # as in PyTorch
    assert len(set(values(seed_numpy_by_worker))) < NUM_SAMPLES  # control, as in PyTorch


def test_samples_draw_their_own_bits_after_a_seed_of_worker_init_fn() -> None:
    by_hand = two_epochs(FromNumpy(), num_workers=2, worker_init_fn=seed_numpy)
    assert by_hand == two_epochs(FromNumpy(), **WAYS["inline"])


class Unseeded(Base):
    def __getitem__(self, index: int) -> float:
        return float(np.random.default_rng().random())


class Seeded(Base):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(index).random(3))


@pytest.mark.parametrize("way", WAYS)
def test_samples_that_no_seed_reaches_are_warned_about_once(way: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Unseeded(), batch_size=4, seed=0, **WAYS[way])
        list(loader), list(loader)
    said = [str(one.message) for one in caught if "loaded twice" in str(one.message)]
    assert len(said) == 1
    assert any("penstock.rng()" in note for note in loader.plan.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader(Seeded(), batch_size=4, seed=0, **WAYS[way]))  # control


class FromNumpy(Base):
    def __getitem__(self, index: int) -> float:
        return float(np.random.rand())


@pytest.mark.skipif(
    not hasattr(np.random, "set_bit_generator"), reason="this NumPy cannot replace its generator"
)
def test_a_bit_generator_that_the_user_gave_numpy_is_used_in_workers() -> None:
    usual = two_epochs(FromNumpy(), **WAYS["inline"])
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        runs = [two_epochs(FromNumpy(), **options) for options in WAYS.values()]
        assert np.random.rand() == np.random.Generator(np.random.PCG64(1)).random()  # unchanged
    finally:
        np.random.set_bit_generator(before)
    assert all(run == runs[0] for run in runs)
    assert runs[0] != usual  # control: a different generator
    assert two_epochs(FromNumpy(), **WAYS["inline"]) == usual


class MadeLate(Base):
    """Creates its generator with the 30th sample that it loads."""

    def __init__(self) -> None:
        self.rng, self.num_loaded = None, 0

    def __getitem__(self, index: int) -> float:
        self.num_loaded += 1
        if self.num_loaded < 30:
            return 0.0
        self.rng = self.rng or np.random.default_rng(0)
        return float(self.rng.random())


def test_a_generator_that_is_made_late_is_warned_about_in_the_next_epoch() -> None:
    loader = DataLoader(MadeLate(), batch_size=4, num_workers=1, persistent_workers=True, seed=0)
    list(loader)
    assert not loader.plan.notes
    with pytest.warns(UserWarning, match="dataset.rng .* was created after the first samples"):
        list(loader)
    loader.close()
