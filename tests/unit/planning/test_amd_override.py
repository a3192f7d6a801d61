"""The override for unsupported AMD cards: correct, unset, or wrong for the card's family."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.machine.facts import Gpu, Machine
from penstock.planning.amd_override import check_override
from penstock.planning.plan import Problem

pytestmark = pytest.mark.legacy


def amd(architecture: str, override: str | None = None, hip: str = "6.2") -> Machine:
    cards = tuple(
        Gpu(name=f"card {name}", vendor="amd", architecture=name)
        for name in architecture.split("+")
    )
    environment = {} if override is None else {"HSA_OVERRIDE_GFX_VERSION": override}
    return Machine(
        os="linux",
        torch_build="hip",
        torch_build_version=hip,
        gpus=cards,
        environment=environment,
    )


def problems_of(machine: Machine) -> dict[str, Problem]:
    return {problem.code: problem for problem in check_override(machine)}


@pytest.mark.parametrize(
    ("architecture", "override"),
    [
        ("gfx1010", "10.1.0"),
        ("gfx1012", "10.1.0"),
        ("gfx1030", None),
        ("gfx1030", "10.3.0"),
        ("gfx1032", "10.3.0"),
        ("gfx1034", " 10.3.0 "),
        ("gfx1036", "10.3.0"),
        ("gfx1100", None),
        ("gfx1101", "11.0.0"),
        ("gfx1151", None),
        ("gfx1201", None),
        ("gfx942", None),
        ("gfx1036+gfx1030", None),  # integrated graphics next to a card
    ],
)
def test_an_override_that_is_right_for_its_family_is_no_problem(
    architecture: str, override: str | None
) -> None:
    assert problems_of(amd(architecture, override)) == {}


@pytest.mark.parametrize(
    ("architecture", "override", "code", "severity", "cure"),
    [
        ("gfx1010", None, "override-unset", "harm", "=10.1.0"),
        ("gfx1010", "10.3.0", "override-wrong", "harm", "=10.1.0"),
        ("gfx1031", None, "override-unset", "harm", "=10.3.0"),
        ("gfx1032", "11.0.0", "override-wrong", "harm", "=10.3.0"),
        ("gfx1030", "rubbish", "override-wrong", "harm", "=10.3.0"),
        ("gfx1036", None, "override-unset", "note", "=10.3.0"),
        ("gfx1102", None, "override-unset", "harm", "=11.0.0"),
        ("gfx1201", "11.0.0", "override-wrong", "harm", "unset "),
        ("gfx942", "10.3.0", "override-wrong", "harm", "unset "),
    ],
)
def test_an_override_that_is_unset_or_wrong_is_named_with_the_right_one(
    architecture: str, override: str | None, code: str, severity: str, cure: str
) -> None:
    found = problems_of(amd(architecture, override))
    assert set(found) == {code}
    assert found[code].severity == severity
    assert cure in found[code].cure
    assert architecture in found[code].what


def test_rdna1_posing_as_rdna2_is_told_about_convolutions() -> None:
    assert "convolutions" in problems_of(amd("gfx1010", "10.3.0"))["override-wrong"].why


def test_newer_builds_know_all_of_rdna3() -> None:
    assert problems_of(amd("gfx1102", hip="6.4.43483"))["override-unset"].severity == "note"


@pytest.mark.parametrize("other", [{"torch_build": "cpu"}, {"os": "win32"}, {"gpus": ()}])
def test_the_override_is_nothing_to_a_torch_without_hip(other: dict[str, Any]) -> None:
    assert check_override(amd("gfx1010")._replace(**other)) == []
