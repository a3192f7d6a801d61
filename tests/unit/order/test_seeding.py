"""seed_all and seeded set, report and restore the generators."""

from __future__ import annotations

import os
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock import seed_all, seeded
from penstock.errors import BadArgument
from penstock.order import seeding
from support.datasets import assert_same

pytestmark = pytest.mark.legacy


def world() -> Any:
    """Return all state that seed_all can change."""
    return (
        random.getstate(),
        np.random.get_state()[1:],
        torch.get_rng_state(),
        torch.initial_seed(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.fixture(autouse=True)
def world_as_it_was() -> Iterator[None]:
    before = world()
    with seeded(0):
        yield
    assert_same(world(), before)


def draw() -> Any:
    return random.random(), np.random.rand(3), torch.rand(3)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63, 2**64 - 1, -(2**63)])
def test_the_same_seed_draws_the_same(seed: int) -> None:
    seed_all(seed)
    first = draw()
    draw()
    seed_all(seed)
    assert_same(draw(), first)


def test_different_seeds_draw_differently() -> None:
    drawn = []
    for seed in (0, 1, -1, 2**32, 2**32 + 1, 2**63, 2**64 - 2):
        seed_all(seed)
        python, numpy, tensor = draw()
        drawn.append((python, numpy[0], tensor[0].item()))
    for place, num_different in ((0, 7), (1, 7), (2, 4)):  # torch uses the lower 32 bits
        assert len({values[place] for values in drawn}) == num_different


def test_small_seeds_are_what_each_library_makes_of_them() -> None:
    seed_all(5)
    found = draw()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert_same(found, draw())


@pytest.mark.parametrize(
    ("deterministic", "flags"),
    [(True, (True, True, False)), ("warn", (True, True, True)), (False, (False, False, False))],
)
@pytest.mark.parametrize("is_benchmark", [True, False])
def test_the_switches_are_set(deterministic: Any, flags: Any, is_benchmark: bool) -> None:
    told = seed_all(0, deterministic=deterministic, benchmark=is_benchmark)
    assert torch.backends.cudnn.benchmark is is_benchmark
    assert flags == (
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    assert f"benchmark={is_benchmark}" in str(told)


@pytest.mark.parametrize(
    "arguments", [{"seed": 2**64}, {"seed": 1.5}, {"seed": "a"}, {"deterministic": "maybe"}]
)
def test_what_makes_no_sense_is_refused_and_nothing_is_set(arguments: dict[str, Any]) -> None:
    before = world()
    with pytest.raises(BadArgument):
        seed_all(**{"seed": 0, **arguments})
    assert_same(world(), before)


def test_everything_is_put_back_also_after_an_exception() -> None:
    torch.backends.cudnn.benchmark = True
    random.gauss(0, 1)  # caches a value
    np.random.randn()
    before = world()
    with pytest.raises(ZeroDivisionError), seeded(3, deterministic="warn"):
        draw()[0] / 0
    assert_same(world(), before)


@pytest.mark.parametrize(
    ("is_random", "variable", "told"),
    [
        (1, None, "not set: the order of sets"),
        (1, "random", "not set: the order of sets"),
        (1, "0", "not set: the order of sets"),  # set too late, inside the process
        (1, "42", "set: the order of sets of strings, if PYTHONHASHSEED=42"),
        (0, "0", "set: the order of sets of strings: PYTHONHASHSEED=0 was set at startup"),
    ],
)
def test_it_says_whether_the_hash_seed_is_fixed(
    is_random: int, variable: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(hash_randomization=is_random))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYTHONHASHSEED", variable)
    text = str(seed_all(0))
    assert f"  {told}" in text
    assert ("PYTHONHASHSEED=0 python" in text) == told.startswith("not")


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(seeding, "_needs_workspace", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return monkeypatch


def test_the_workspace_of_cublas_is_set_where_torch_needs_it(
    cuda_build: pytest.MonkeyPatch,
) -> None:
    with seeded(0) as told:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in told.done
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with seeded(0, deterministic=False):
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_workspace_that_comes_too_late_or_is_another_is_told(
    cuda_build: pytest.MonkeyPatch,
) -> None:
    cuda_build.setenv("CUBLAS_WORKSPACE_CONFIG", ":1:1")
    with seeded(0) as told:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":1:1"
    assert any(":1:1" in text for text in told.cannot)
    cuda_build.delenv("CUBLAS_WORKSPACE_CONFIG")
    done: list[str] = []
    cannot: list[str] = []
    cuda_build.setattr(torch.cuda, "is_initialized", lambda: True)
    seeding._set_workspace(done, cannot)
    assert "already in use" in cannot[0]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")


def test_torch_s_own_words_say_whether_it_needs_the_workspace() -> None:
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 10)
    if is_old or is_new:
        assert seeding._needs_workspace() is is_old


def test_generators_of_accelerators_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    cuda = types.SimpleNamespace(
        get_rng_state_all=lambda: "saved",
        set_rng_state_all=lambda state: calls.append(("state", state)),
        manual_seed_all=lambda seed: calls.append(("seed", seed)),
        is_initialized=lambda: True,
    )
    monkeypatch.setattr(seeding, "seed_all", lambda *_: "told")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.delattr(torch, "xpu", raising=False)
    torch.default_generator.manual_seed(77)
    with seeded(5):
        pass
    cuda.is_initialized = lambda: False
    with seeded(5):
        pass
    assert calls == [("state", "saved"), ("seed", 77)]
    monkeypatch.undo()


def test_opencv_is_seeded_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setitem(sys.modules, "cv2", types.SimpleNamespace(setRNGSeed=seeds.append))
    assert any("OpenCV" in text for text in seed_all(2**64 - 1).done)
    assert seeds == [2**31 - 1]
