"""Generators held by the dataset are found, named and set."""

from __future__ import annotations

import functools
import pickle
import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.global_generators import preserved_generators
from penstock.order.sample_randomness import SampleRandomness

pytestmark = pytest.mark.legacy

module_rng = np.random.default_rng()


class Holder:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slotted:
    __slots__ = ("empty", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Drawing:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self) -> Any:
        return self.rng.random()


class InBody:
    rng = random.Random()


class FromModule:
    def __getitem__(self, index: int) -> float:
        return float(module_rng.random())


def closed_over(rng: Any) -> Any:
    return lambda: rng


def paths(dataset: Any) -> list[str]:
    return [one.path for one in DatasetGenerators(dataset).found]


GENERATORS: dict[str, tuple[Any, Any]] = {
    "numpy.random.Generator": (lambda: np.random.default_rng(), lambda g: g.random()),
    "dxsm": (
        lambda: np.random.Generator(np.random.PCG64DXSM()),
        lambda g: g.integers(9, dtype=np.uint32),
    ),
    "philox": (lambda: np.random.Generator(np.random.Philox()), lambda g: g.random()),
    "sfc": (lambda: np.random.Generator(np.random.SFC64()), lambda g: g.normal()),
    "twister": (lambda: np.random.Generator(np.random.MT19937()), lambda g: g.random()),
    "bits": (lambda: np.random.PCG64(), lambda g: g.random_raw()),
    "numpy.random.RandomState": (lambda: np.random.RandomState(), lambda g: g.randn()),
    "state of pcg": (lambda: np.random.RandomState(np.random.PCG64()), lambda g: g.rand()),
    "random.Random": (lambda: random.Random(), lambda g: g.gauss(0, 1)),
    "torch.Generator": (lambda: torch.Generator(), lambda g: torch.rand(1, generator=g).item()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_each_kind_is_found_and_draws_what_the_seed_says(name: str) -> None:
    make, draw = GENERATORS[name]

    def drawn(seed: int) -> list[Any]:
        dataset = Holder(rng=make())
        draw(dataset.rng)  # may leave a cached value
        own = DatasetGenerators(dataset)
        assert [(one.path, one.can_be_set) for one in own.found] == [("dataset.rng", True)]
        own.set(seed)
        return [draw(dataset.rng) for _ in range(20)]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_two_of_a_kind_do_not_draw_alike() -> None:
    dataset = Holder(one=np.random.default_rng(0), other=np.random.default_rng(0))
    assert dataset.one.random() == dataset.other.random()  # control: they start equal
    DatasetGenerators(dataset).set(5)
    assert dataset.one.random() != dataset.other.random()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda g: Holder(a=Holder(b=[0, {"c": g}])), "dataset.a.b[1]['c']"),
        (lambda g: Holder(a=Slotted(g)), "dataset.a.rng"),
        (lambda g: Holder(a=functools.partial(print, 1, rng=g)), "dataset.a.keywords['rng']"),
        (lambda g: Holder(a=closed_over(g)), "dataset.a.rng"),
        (lambda g: Holder(a=g.random), "dataset.a.__self__"),
        (lambda g: Holder(a=Drawing(g).draw), "dataset.a.__self__.rng"),
    ],
    ids=["nested", "slots", "partial", "closure", "method of a generator", "method"],
)
def test_it_is_found_where_people_put_it(make: Any, path: str) -> None:
    assert paths(make(np.random.default_rng())) == [path]


def test_generators_of_the_class_and_of_the_module_are_found() -> None:
    assert paths(InBody()) == ["InBody.rng"]
    assert paths(FromModule()) == [f"{__name__}.module_rng"]


def test_the_global_generators_are_not_the_dataset_s_own() -> None:
    dataset = Holder(
        a=np.random.mtrand._rand,
        b=random._inst,  # type: ignore[attr-defined]
        c=torch.default_generator,
        d=random.random,
        e=np.random.rand,
    )
    assert paths(dataset) == []


def test_what_cannot_be_set_is_named_with_the_reason() -> None:
    (found,) = DatasetGenerators(Holder(rng=random.SystemRandom())).found
    assert not found.can_be_set
    assert str(found) == "dataset.rng (random.SystemRandom): it draws from the operating system"


def test_one_that_refuses_is_named_too() -> None:
    class Stubborn(random.Random):
        def seed(self, *_: Any, **__: Any) -> None:
            if hasattr(self, "ready"):
                raise RuntimeError("no")

    stubborn = Stubborn()
    stubborn.ready = True  # type: ignore[attr-defined]
    (found,) = DatasetGenerators(Holder(rng=stubborn)).found
    assert not found.can_be_set
    assert "no" in (found.why_not or "")


def test_the_walk_is_bounded_and_survives_circles() -> None:
    dataset = Holder(paths=[f"{number}.jpg" for number in range(10**6)])
    dataset.self = dataset
    dataset.many = [Holder(number=number) for number in range(10**5)]
    assert paths(dataset) == []
    dataset.many[10**5 - 1].rng = np.random.default_rng()
    assert len(paths(dataset)) == 1


def test_a_sample_draws_the_same_from_its_own_generators_in_any_copy() -> None:
    dataset = Holder(rng=np.random.default_rng())

    def drawn(data: Any) -> list[float]:
        own = DatasetGenerators(data)
        randomness = SampleRandomness(0, dataset_generators=own)
        with preserved_generators():
            return [
                randomness.call(lambda _: float(data.rng.random()), 0, position)
                for position in (4, 2, 3)
            ]

    first = drawn(dataset)
    dataset.rng.random()
    assert drawn(pickle.loads(pickle.dumps(dataset))) == first
    assert len(set(first)) == 3
    assert not DatasetGenerators(Holder())


# -- libraries -------------------------------------------------------------------------------------


class Transform:
    """A transform like those of albumentations 2."""

    def __init__(self) -> None:
        self.random_generator = np.random.default_rng(0)
        self.py_random = random.Random(0)

    def set_random_state(self, random_generator: Any, py_random: Any) -> None:
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self) -> tuple[float, float]:
        return self.random_generator.random(), self.py_random.random()


class Pipeline(Transform):
    def __init__(self) -> None:
        self.transforms = [Transform(), Transform()]
        super().__init__()

    def set_random_state(self, random_generator: Any, py_random: Any) -> None:
        super().set_random_state(random_generator, py_random)
        for transform in self.transforms:
            transform.set_random_state(random_generator, py_random)

    def _check_worker_seed(self) -> None:
        self.set_random_state(np.random.default_rng(), random.Random())

    def __call__(self) -> Any:
        self._check_worker_seed()
        return [transform() for transform in self.transforms]


Transform.__module__ = Pipeline.__module__ = "albumentations.core.composition"


def test_a_pipeline_of_albumentations_is_one_thing_whose_transforms_draw_apart() -> None:
    def drawn(seed: int) -> Any:
        dataset = Holder(transform=Pipeline())
        own = DatasetGenerators(dataset, is_worker=True)
        assert [str(one) for one in own.found] == ["dataset.transform (albumentations)"]
        own.set(seed)
        return dataset.transform()

    assert drawn(1) == drawn(1) != drawn(2)
    first, second = drawn(1)
    assert first != second


def test_a_class_of_albumentations_that_code_names_is_no_pipeline() -> None:
    own = DatasetGenerators(Holder(kinds={"crop": Transform}, transform=Transform()))
    assert [str(one) for one in own.found] == ["dataset.transform (albumentations)"]


def test_threads_that_share_a_pipeline_each_set_what_it_draws_from() -> None:
    dataset = Holder(transform=Transform())
    owns = [DatasetGenerators(dataset) for _ in range(3)]

    def drawn(own: DatasetGenerators) -> Any:
        own.set(1)
        return dataset.transform()

    assert drawn(owns[0]) == drawn(owns[1]) == drawn(owns[2])


def test_a_pipeline_that_draws_from_the_global_generator_gets_a_pair_of_its_own() -> None:
    transform = Transform()
    transform.set_random_state(np.random.mtrand._rand, random._inst)
    DatasetGenerators(Holder(transform=transform)).set(1)
    assert transform.py_random is not random._inst
    assert isinstance(transform.random_generator, np.random.Generator)


def test_a_pipeline_that_seeds_itself_in_workers_is_left_as_it_is_elsewhere() -> None:
    dataset = Holder(transform=Pipeline())
    DatasetGenerators(dataset)
    assert "_check_worker_seed" not in vars(dataset.transform)


def test_opencv_is_set_where_the_dataset_s_code_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    cv2 = types.ModuleType("cv2")
    cv2.setRNGSeed = seeds.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    assert DatasetGenerators(Holder()).found == []  # loaded, but not used by this dataset's code
    monkeypatch.setitem(globals(), "cv2", cv2)
    function = types.FunctionType(compile("cv2.randn", "data.py", "eval"), {"cv2": cv2})
    own = DatasetGenerators(Holder(transform=function))
    assert [one.kind for one in own.found] == ["cv2"]
    own.set(2**63)
    assert 0 <= seeds[-1] < 2**31
