"""Random programs whose samples use torchvision and albumentations transforms."""

from __future__ import annotations

import random

import pytest

from support.programs import parts, promises, record
from support.programs.driver import Session
from support.programs.record import Program

pytest.importorskip("torchvision")
pytest.importorskip("albumentations")
pytestmark = [pytest.mark.vision, pytest.mark.slow]

NUM_PROGRAMS = 8
"""``make soak`` runs programs for two hours."""
TRANSFORMS = ("torchvision", "torchvision v2", "albumentations")


def draw_with_transforms(number: int) -> Program:
    chance = random.Random(f"vision {number}")
    program = record.draw_program(chance, allows_spawn=False)
    draws = tuple(chance.sample(TRANSFORMS, 2))
    return promises.settle(
        program.having(source="made", draws=draws, length=13, randomness="sample")
    )


@pytest.mark.timeout(900)
def test_random_programs_with_transforms_agree_with_their_references() -> None:
    assert set(TRANSFORMS) <= set(parts.usable_draws())
    session = Session(0)
    found = {}
    try:
        for number in range(NUM_PROGRAMS):
            program = draw_with_transforms(number)
            problems = session.check(program)
            if problems:
                found[program] = problems
    finally:
        session.close()
    assert not found, "\n".join(f"{program!r}\n  {text}" for program, text in found.items())


def test_most_of_these_programs_use_a_transform() -> None:
    used = [draw_with_transforms(number).draws for number in range(NUM_PROGRAMS)]
    assert sum(map(bool, used)) > NUM_PROGRAMS // 2
