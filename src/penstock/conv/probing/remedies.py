"""Finds a remedy for broken convolutions: library settings, torch's kernels, or the bypass.

Each remedy that applies to this machine is tried on the broken steps, in child processes. The
fastest one that fixes all of them is the advice.

Tested by ``tests/faults/conv/probing/test_probe.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conv.probing.steps import ProbeStep, StepVerdict
from penstock.machine.facts import Machine

OVERRIDES = {"gfx101": "10.1.0", "gfx103": "10.3.0", "gfx110": "11.0.0"}
"""The version that GPUs of a family report with the override; see docs/doctor.md."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A setting that may fix convolutions.

    Args:
        setup: What a child sets up before its steps; see ``run_steps`` in the module ``probe``.
        line: The line of code or shell that applies the remedy.
    """

    name: str
    line: str
    setup: str = ""
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RemedyTrial:
    """The result of a remedy on the broken steps."""

    remedy: Remedy
    num_right: int
    num_steps: int
    ms: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RemedyTrial:
        remedy = values["remedy"]
        environ = tuple((name, value) for name, value in remedy["environ"])
        return cls(**{**values, "remedy": Remedy(**{**remedy, "environ": environ})})

    @property
    def is_right(self) -> bool:
        return self.num_right == self.num_steps

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.remedy.name}: fixes all {self.num_steps} steps, {self.ms:.1f} ms"
        return f"{self.remedy.name}: fixes {self.num_right} of {self.num_steps} steps"


def remedies_for(machine: Machine, device: str) -> list[Remedy]:
    """Return the remedies for this machine, least intrusive first.

    Example:
        >>> [remedy.name for remedy in remedies_for(Machine(os="linux"), "cpu")]
        ["torch's own kernels", "Penstock's bypass"]
    """
    found: list[Remedy] = []
    if device == "cuda" and machine.torch_build == "hip":
        find = (("MIOPEN_FIND_MODE", "NORMAL"), ("MIOPEN_FIND_ENFORCE", "SEARCH"))
        found.append(
            Remedy(
                name="new MIOpen kernel search",
                line="export MIOPEN_FIND_MODE=NORMAL MIOPEN_FIND_ENFORCE=SEARCH",
                environ=find,
            )
        )
        found += _override_remedies(machine)
    off = "torch.backends.cudnn.enabled = False"
    if device == "cpu":
        off = "torch.backends.mkldnn.set_flags(False)"
    found.append(Remedy(name="torch's own kernels", line=off, setup="library off"))
    line = 'penstock.conv.bypass_convolutions("auto")'
    found.append(Remedy(name="Penstock's bypass", line=line, setup="bypass"))
    return found


def _override_remedies(machine: Machine) -> list[Remedy]:
    name = "HSA_OVERRIDE_GFX_VERSION"
    for gpu in machine.gpus:
        wanted = OVERRIDES.get((gpu.architecture or "")[:6])
        if wanted and machine.environment.get(name) != wanted:
            remedy = Remedy(name=f"{name}={wanted}", line=f"export {name}={wanted}",
                        environ=((name, wanted),))  # fmt: skip
            return [remedy]
    return []


def try_remedy(
    remedy: Remedy, broken: Sequence[ProbeStep], run: Callable[[Remedy], list[StepVerdict]]
) -> RemedyTrial:
    """Try a remedy on the broken steps.

    Args:
        run: Runs the broken steps with a remedy.
    """
    verdicts = run(remedy)
    right = [verdict for verdict in verdicts if verdict.word == "right"]
    num_absent = sum(verdict.word == "absent" for verdict in verdicts)  # no remedy can fix these
    return RemedyTrial(
        remedy=remedy,
        num_right=len(right),
        num_steps=len(broken) - num_absent,
        ms=sum(verdict.ms for verdict in right),
    )


def best_of(trials: Sequence[RemedyTrial]) -> RemedyTrial | None:
    """Return the fastest remedy that fixes all steps, or None.

    Example:
        >>> one = Remedy(name="one", line="a")
        >>> two = Remedy(name="two", line="b")
        >>> best_of([RemedyTrial(remedy=one, num_right=1, num_steps=2, ms=1.0),
        ...          RemedyTrial(remedy=two, num_right=2, num_steps=2, ms=9.0)]).remedy.name
        'two'
    """
    return min((trial for trial in trials if trial.is_right), key=lambda t: t.ms, default=None)


def wheels_hint(machine: Machine) -> str:
    """Return advice on newer builds of torch, if they may help."""
    if machine.torch_build != "hip":
        return ""
    return (
        "Newer builds of torch may support this GPU: AMD publishes untested builds for older "
        "architectures. Install one in a separate environment and probe again."
    )
