"""Random programs around a loader agree with their references. See :mod:`programs`.

``PROGRAMS_SEED=5`` draws different programs. A failure prints the smallest failing program, and
``cd tests && python -m support.programs --one 'Program(...)'`` runs it again.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.parent.iterator import LoaderIterator
from penstock.loader import DataLoader
from penstock.order.sample_randomness import SampleRandomness
from support import leftovers
from support.paths import DOCS
from support.programs import checking, driver, promises, record, running
from support.programs.record import Program
from support.programs.shrinking import shrink

# Programs use more workers than cores, generators without a seed, and other things that warn.
pytestmark = pytest.mark.filterwarnings("ignore")

SEED = int(os.environ.get("PROGRAMS_SEED", "0"))
NUM_PROGRAMS = 30
"""``make soak`` runs programs for two hours."""


@pytest.mark.timeout(900)
def test_random_programs_agree_with_their_references() -> None:
    session = driver.Session(SEED)
    found = [*session.run(count=NUM_PROGRAMS, allows_spawn=False)]
    print(session.report)
    assert not found, f"seed {SEED}\n" + "\n".join(map(str, found))


DIFFERED_ONCE = [
    # Index 28, and its generator, is first used in the second epoch.
    Program(length=40, draws=("by key",), order="buckets", batch_size=3, drop_last=True, epochs=2),
]


@pytest.mark.parametrize("program", DIFFERED_ONCE, ids=repr)
def test_a_program_that_differed_once_agrees(program: Program) -> None:
    assert checking.check(program) == []


# -- the generator ---------------------------------------------------------------------------------


def test_a_program_is_made_again_from_its_print() -> None:
    for number in range(300):
        program = record.draw_program(random.Random(number))
        assert record.parse(repr(program)) == program


def test_the_print_names_only_what_is_not_the_default() -> None:
    assert repr(Program(length=3)) == "Program(length=3)"


def test_a_seed_draws_the_same_programs_again() -> None:
    first, again = ([*zip(range(20), driver.Session(4).programs(allows_spawn=True))] for _ in "ab")  # noqa: B905
    assert first == again


def test_what_was_settled_stays_as_it_is() -> None:
    for number in range(300):
        program = record.draw_program(random.Random(number))
        assert promises.settle(program) == program


@pytest.mark.parametrize("name", promises.EXCEPTIONS)
def test_each_exception_is_a_sentence_of_the_documentation(name: str) -> None:
    page, sentence = promises.EXCEPTIONS[name]
    text = re.sub(r"\s+", " ", (DOCS / page).read_text(encoding="utf-8"))
    assert sentence in text


def test_shrinking_finds_the_part_that_matters() -> None:
    program = next(
        program
        for number in range(1000)
        if (program := record.draw_program(random.Random(number))).draws
        and program.length > 10
        and program.num_workers == 3
    )

    def fails(candidate: Program) -> bool:
        return candidate.num_workers in (2, 3) and candidate.length > 5

    assert shrink(program, fails) == Program(num_workers=2)


def test_the_loop_goes_on_after_an_error_late_in_an_epoch() -> None:
    late = running.MAX_ERRORS + 5
    program = Program(length=late + 10, batch_size=1, num_workers=0, bad=(late,))
    [batches] = running.run(program).epochs
    assert len(batches) == program.length


# -- negative controls: each defect is found -------------------------------------------------------

_take = LoaderIterator.__next__


def _is_loaded_by_workers(iterator: Any) -> bool:
    return bool(getattr(iterator, "_workers", ()))


def _seed_nothing(self: Any, function: Callable[[Any], Any], index: Any, position: int) -> Any:
    return function(index)


def _seed_all_alike(self: Any, position: int) -> None:
    _set_generators(self, 0)


_set_generators = SampleRandomness.set_generators


def _drop_a_batch(iterator: Any) -> Any:
    batch = _take(iterator)
    if _is_loaded_by_workers(iterator) and not vars(iterator).setdefault("_dropped", False):
        iterator._dropped = True
        return _take(iterator)
    return batch


def _repeat_a_batch(iterator: Any) -> Any:
    if _is_loaded_by_workers(iterator) and "_repeated" in vars(iterator):
        return vars(iterator).pop("_repeated")
    batch = _take(iterator)
    iterator._repeated = batch
    return batch


def _overwrite_the_batch_before(iterator: Any) -> Any:
    if _is_loaded_by_workers(iterator) and "_before" in vars(iterator):
        running._zero(iterator._before)
    iterator._before = _take(iterator)
    return iterator._before


def _move_the_users_generator(iterator: Any) -> Any:
    if _is_loaded_by_workers(iterator):
        random.random()
    return _take(iterator)


def _leave_a_descriptor(iterator: Any) -> Any:
    _LEFT.append(os.open(os.devnull, os.O_RDONLY))
    return _take(iterator)


_LEFT: list[int] = []


def _forget_a_batch(loader: Any) -> Any:
    state = _tell(loader)
    return {**state, "position": state["position"] - 2}


_tell = DataLoader.state_dict

DEFECTS: dict[str, tuple[Any, str, Any, Program, str]] = {
    "generators are not set": (
        SampleRandomness,
        "call",
        _seed_nothing,
        Program(draws=("random",), num_workers=2, start_method="fork"),
        "epoch 0, batch 0",
    ),
    "generators are set alike": (
        SampleRandomness,
        "set_generators",
        _seed_all_alike,
        Program(draws=("random",), start_method="fork"),
        "repeat a draw",
    ),
    "a batch is lost": (
        LoaderIterator,
        "__next__",
        _drop_a_batch,
        Program(),
        "3 batches, no workers: 4",
    ),
    "a batch comes twice": (
        LoaderIterator,
        "__next__",
        _repeat_a_batch,
        Program(in_order=False),
        "other batches than no workers",
    ),
    "a batch that is held is overwritten": (
        LoaderIterator,
        "__next__",
        _overwrite_the_batch_before,
        Program(form="tensor", keep=2),
        "a batch that is held changed",
    ),
    "the loop's own generators are moved": (
        LoaderIterator,
        "__next__",
        _move_the_users_generator,
        Program(),
        "the loop's own draw 0",
    ),
    "a state is one batch behind": (
        DataLoader,
        "state_dict",
        _forget_a_batch,
        Program(seed=0, events=(("resume", 0, 2, 2),)),
        "5 batches, no workers: 4",
    ),
    "a descriptor is left": (
        LoaderIterator,
        "__next__",
        _leave_a_descriptor,
        Program(num_workers=0),
        "left behind: ",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, defect, program, expected = DEFECTS[name]
    assert checking.check(program) == []
    monkeypatch.setattr(owner, attribute, defect)
    monkeypatch.setattr(leftovers.wait_until_clean, "__defaults__", (0.5,))
    problems = checking.check(program)
    while _LEFT:
        os.close(_LEFT.pop())
    assert any(expected in problem for problem in problems), problems


def test_random_programs_find_generators_that_are_not_set_and_name_the_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SampleRandomness, "call", _seed_nothing)

    def fails(program: Program) -> bool:
        program = program.having(events=())
        return any("no workers:" in problem for problem in checking.check(program))

    def is_quick(program: Program) -> bool:
        return not program.sample_ms and program.form != "very big" and program.epochs == 1

    drawn = (record.draw_program(random.Random(f"0 {n}"), allows_spawn=False) for n in range(200))
    quick = (program for program in drawn if is_quick(program) and program.draws)
    found = next(program for program in quick if fails(program))
    smallest = shrink(found, fails, max_tries=40)
    assert smallest.draws
    assert len(repr(smallest)) < len(repr(found))


def test_a_program_that_hangs_is_named_with_its_stack() -> None:
    child = driver.Child(limit_s=5.0)
    try:
        problems = child.check(Program(sample_ms=600_000, num_workers=0))
    finally:
        child.close()
    assert problems[0].startswith("hangs: Timeout (")
    assert "checking.py" in problems[0]
