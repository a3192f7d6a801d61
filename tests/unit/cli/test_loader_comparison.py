"""Timings of two loaders become lines and a conclusion, for either winner."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.loader_comparison import LoaderComparison, conclude, print_comparison
from penstock.cli.loader_timing import LoaderTiming, compare, take_turns

pytestmark = pytest.mark.legacy


def timings(first_batch_s: float, *rates: float) -> list[LoaderTiming]:
    return [LoaderTiming(first_batch_s=first_batch_s, batches_per_s=rate) for rate in rates]


def comparison(**changes: Any) -> LoaderComparison:
    given: dict[str, Any] = {
        "batch_size": 10,
        "ours": timings(0.1, 20.0, 21.0, 22.0),
        "theirs": timings(0.2, 10.0, 10.5, 11.0),
    }
    return LoaderComparison(**{**given, **changes})


def printed(found: LoaderComparison) -> str:
    out = io.StringIO()
    print_comparison(Console(file=out, width=120), found)
    return out.getvalue()


def test_the_faster_loader_is_named_whichever_it_is() -> None:
    assert conclude(comparison()) == "Penstock is 2.00 times as fast, and faster in every turn."
    slower = comparison(ours=timings(0.1, 5.0, 5.0, 5.0))
    assert conclude(slower) == "PyTorch is 2.10 times as fast here, and faster in every turn."
    assert "Penstock  210 (200 to 220) images/s, first batch after 0.10 s" in printed(comparison())


def test_turns_that_go_both_ways_are_noise_and_the_reason_is_given_once() -> None:
    mixed = timings(0.2, 9.0, 10.6, 13.0)
    assert "time is spent in the dataset" in conclude(comparison(ours=mixed))
    with_step = conclude(comparison(ours=mixed, step_s=0.1))
    assert "The step is the limit for both (100 images/s at most)" in with_step
    assert "No difference" not in with_step
    assert printed(comparison(ours=mixed)).count("No difference") == 1


def test_a_loader_that_failed_is_said_to_have_and_not_compared() -> None:
    text = printed(comparison(theirs=[], failure="no space in /dev/shm"))
    assert "PyTorch   failed: no space in /dev/shm" in text
    assert "times as fast" not in text


def test_loaders_take_turns_forwards_and_backwards_and_are_compared_turn_by_turn() -> None:
    order: list[str] = []
    found = take_turns({"a": lambda: 2.0, "b": lambda: 1.0}, 3, on_turn=order.append)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert compare(found["a"], found["b"]).low == 2.0
