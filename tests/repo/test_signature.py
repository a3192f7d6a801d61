"""The signature matches torch's in names, order and defaults. Penstock's options follow."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader

pytestmark = pytest.mark.legacy

OUR_OWN = {
    *("pool", "randomness", "seed", "shard", "rank", "world_size", "padding"),
    *("on_error", "max_bad", "bad_samples_file", "max_restarts", "sample_timeout_s"),
    *("device", "device_prefetch", "finish", "trace", "in_flight", "remote_workers"),
}
NEWER_THAN_SOME_TORCH = {"in_order"}
DIFFERENT_DEFAULTS_IN_OLD_TORCH = {
    "prefetch_factor": 2,  # torch 1.13: 2; torch 2.0 and later: None, which means 2
    "pin_memory_device": "",
}


def parameters(kind: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(kind.__init__).parameters)
    found.pop("self")
    return found


def mismatches(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the unexpected differences between Penstock's signature and torch's."""
    found = []
    shared = [name for name in ours if name in theirs]
    if shared != list(theirs):
        found.append(f"names or order: {shared} is not {list(theirs)}")
    for name in shared:
        mine, other = ours[name], theirs[name]
        old = DIFFERENT_DEFAULTS_IN_OLD_TORCH.get(name, object())
        if mine.default != other.default and other.default != old:
            found.append(f"default of {name}: {mine.default!r} is not {other.default!r}")
        if mine.kind is not other.kind:
            found.append(f"kind of {name}: {mine.kind} is not {other.kind}")
    extra = set(ours) - set(theirs) - OUR_OWN - NEWER_THAN_SOME_TORCH
    if extra:
        found.append(f"unknown: {extra}")
    return found


def test_every_parameter_of_torch_s_is_there_in_its_order_with_its_default() -> None:
    assert mismatches(parameters(DataLoader), parameters(TorchDataLoader)) == []


def test_what_is_our_own_can_be_given_by_name_only() -> None:
    ours = parameters(DataLoader)
    assert {ours[name].kind for name in OUR_OWN} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_signature_that_differs_would_be_noticed() -> None:
    class Swapped:
        def __init__(self, dataset: Any, shuffle: Any = None, batch_size: int = 1) -> None: ...

    class Other:
        def __init__(self, dataset: Any, batch_size: int = 2, shuffle: Any = None) -> None: ...

    class Good:
        def __init__(self, dataset: Any, batch_size: int = 1, shuffle: Any = None) -> None: ...

    good = parameters(Good)
    assert mismatches(parameters(Good), good) == []
    assert "order" in mismatches(parameters(Swapped), good)[0]
    assert "default of batch_size" in mismatches(parameters(Other), good)[0]
