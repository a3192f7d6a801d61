"""Checks ``HSA_OVERRIDE_GFX_VERSION``, which makes ROCm treat an AMD card as a different one.

ROCm's libraries are built for some architectures of each family. A card with a different
architecture works only if the variable makes ROCm treat it as a related card with the same
instructions:

    RDNA1    gfx101x   10.1.0  (10.3.0 is in use, but has instructions that these cards lack)
    RDNA2    gfx103x   10.3.0  (the others are treated as gfx1030)
    RDNA3    gfx110x   11.0.0  (the others are treated as gfx1100; newer torch builds support them)
    RDNA3.5, RDNA4 and the Instinct cards: none
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.machine.facts import Gpu, Machine
from penstock.planning.plan import Problem, Severity

VARIABLE = "HSA_OVERRIDE_GFX_VERSION"

_INTEGRATED = frozenset({"gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103"})
"""Integrated graphics. Checked only if there is no discrete card."""
_KNOWS_ALL_RDNA3 = (6, 4)
"""From this HIP version on, the wheels of pytorch.org also contain kernels for gfx1101 and
gfx1102."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Cards with the same instructions.

    Args:
        override: The correct value of the variable. None: it should not be set.
        native: The architecture that the other cards of the family are treated as.
    """

    name: str
    override: str | None
    native: str | None = None


_FAMILIES = {
    "gfx101": _Family(name="RDNA1", override="10.1.0"),
    "gfx103": _Family(name="RDNA2", override="10.3.0", native="gfx1030"),
    "gfx110": _Family(name="RDNA3", override="11.0.0", native="gfx1100"),
}
"""Families by the first characters of the architecture name."""
_NO_OVERRIDE = _Family(name="this family", override=None)


def check_override(machine: Machine) -> list[Problem]:
    """Return the problem with the override for this machine's AMD card, if there is one.

    Example:
        >>> card = Gpu(name="RX 6600", vendor="amd", architecture="gfx1032")
        >>> for problem in check_override(Machine(os="linux", torch_build="hip", gpus=(card,))):
        ...     print(problem.cure)
        export HSA_OVERRIDE_GFX_VERSION=10.3.0
    """
    cards = [gpu for gpu in machine.gpus if gpu.vendor == "amd" and gpu.architecture]
    if machine.os != "linux" or machine.torch_build != "hip" or not cards:
        return []  # only HIP builds on Linux read the variable
    discrete = [card for card in cards if card.architecture not in _INTEGRATED]
    card = (discrete or cards)[0]
    family = _FAMILIES.get((card.architecture or "")[: len("gfx101")], _NO_OVERRIDE)
    found = machine.environment.get(VARIABLE, "").strip()
    if not found:
        return _check_unset(card, family, machine)
    if found == family.override:
        return []
    return [_wrong(card, family, found)]


def _check_unset(card: Gpu, family: _Family, machine: Machine) -> list[Problem]:
    if family.override is None or card.architecture == family.native:
        return []
    severity: Severity = "harm"
    why = f"torch has no kernels for {card.architecture} and fails with 'invalid device function'"
    if card.architecture in _INTEGRATED:
        severity = "note"
        why += "; integrated graphics are not officially supported, so check the results"
    elif family.name == "RDNA3" and _hip_version(machine) >= _KNOWS_ALL_RDNA3:
        severity = "note"
        why = f"most builds for HIP {machine.torch_build_version} support {card.architecture}; "
        why += "others fail with 'invalid device function'"
    elif family.name == "RDNA1":
        why += ". AMD's engineers recommend 10.1.0 for this family. It needs a torch build with "
        why += "kernels for gfx1010, which AMD provides and pytorch.org does not"
    return [
        Problem(
            code="override-unset",
            severity=severity,
            what=f"{VARIABLE} is not set, but the {card.name} is {card.architecture} "
            f"({family.name})",
            why=why,
            cure=f"export {VARIABLE}={family.override}",
        )
    ]


def _wrong(card: Gpu, family: _Family, found: str) -> Problem:
    what = f"{VARIABLE}={found}, but the {card.name} is {card.architecture}"
    if family.override is None:
        return Problem(
            code="override-wrong",
            severity="harm",
            what=what,
            why=f"the card is treated as a different family, whose kernels crash on it or give "
            f"wrong numbers; newer torch builds support {card.architecture}",
            cure=f"unset {VARIABLE}",
        )
    why = (
        f"the card is treated as a different family: kernels crash or give wrong numbers on "
        f"{family.name}"
    )
    if family.name == "RDNA1" and found == "10.3.0":
        why = (
            "some users set this for RDNA1, but convolutions then raise, crash or give wrong "
            "numbers; AMD's engineers recommend 10.1.0, with a torch build that has kernels for "
            "gfx1010"
        )
    return Problem(
        code="override-wrong",
        severity="harm",
        what=f"{what} ({family.name})",
        why=why,
        cure=f"export {VARIABLE}={family.override}",
    )


def _hip_version(machine: Machine) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", machine.torch_build_version or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)
