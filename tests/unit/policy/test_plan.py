"""Every choice has a value, a reason and a source."""

from __future__ import annotations

import pytest

from penstock.policy.plan import (
    Choice,
    Plan,
    choose_num_workers,
    choose_pool,
    choose_prefetch,
    choose_start_method,
)

pytestmark = pytest.mark.legacy


def test_a_number_of_workers_that_was_given_is_obeyed() -> None:
    assert choose_num_workers(0, 8) == Choice(0, "num_workers was given", "asked")
    assert choose_num_workers(99, 2).value == 99


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_auto_takes_the_usable_cores_and_says_so(cores: int) -> None:
    choice = choose_num_workers("auto", cores)
    assert choice.value == cores
    assert choice.source == "rule"
    assert str(cores) in choice.reason


def test_the_pool_is_what_was_asked_for() -> None:
    for pool in ("process", "thread", "inline"):
        choice = choose_pool(pool, 4, can_start_processes=True)
        assert (choice.value, choice.source) == (pool, "asked")


def test_the_pool_follows_the_number_of_workers_and_the_machine() -> None:
    assert choose_pool("auto", 0, can_start_processes=True).value == "inline"
    assert choose_pool("auto", 2, can_start_processes=True).value == "process"
    frozen = choose_pool("auto", 2, can_start_processes=False)
    assert frozen.value == "thread"
    assert "frozen" in frozen.reason


@pytest.mark.parametrize(
    ("asked", "platform", "value", "source"),
    [
        (None, "linux", "nursery", "rule"),
        ("forkserver", "linux", "nursery", "asked"),
        ("fork", "linux", "fork", "asked"),
        ("spawn", "linux", "spawn", "asked"),
        (None, "darwin", "spawn", "rule"),
        (None, "win32", "spawn", "rule"),
        ("fork", "darwin", "fork", "asked"),
    ],
)
def test_the_start_method(asked: str | None, platform: str, value: str, source: str) -> None:
    choice = choose_start_method(asked, "process", platform)
    assert (choice.value, choice.source) == (value, source)


@pytest.mark.parametrize("pool", ["thread", "inline"])
def test_pools_without_processes_have_no_start_method(pool: str) -> None:
    assert choose_start_method("spawn", pool, "linux").value is None


def test_prefetch_that_was_given_is_obeyed_and_else_measured() -> None:
    assert choose_prefetch(3, "process").value == 3
    assert choose_prefetch(None, "process").source == "measured"
    assert choose_prefetch(None, "inline").value == 0


def test_a_plan_reads_as_a_table_with_every_reason() -> None:
    plan = Plan(
        pool=choose_pool("auto", 2, can_start_processes=True),
        start_method=choose_start_method(None, "process", "linux"),
        num_workers=choose_num_workers("auto", 2),
        prefetch_factor=choose_prefetch(None, "process"),
        randomness=Choice("sample", "a reason of its own", "rule"),
    )
    lines = str(plan).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("pool ")
    assert all("(" in line and ": " in line for line in lines)
    assert "a reason of its own" in str(plan)


def test_a_choice_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        Choice(1, "x", "rule").value = 2  # type: ignore[misc]
