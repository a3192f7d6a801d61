"""What to do about broken convolutions: the rungs of a ladder, and which of them hold.

First settings of the vendor's library, then torch's own kernels, then our bypass. Each rung that
can be tried here is tried on exactly what is broken, in child processes; the fastest that gets all
of it right is the advice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.conv.probing.steps import Step, Verdict
from penstock.machine.facts import Machine

OVERRIDES = {"gfx101": "10.1.0", "gfx103": "10.3.0", "gfx110": "11.0.0"}
"""What a family's cards pose as; see docs/doctor.md."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One thing to try.

    Args:
        setup: What a child does before its steps; see :func:`~.running.run_steps`.
        line: What a person writes to have it.
    """

    name: str
    line: str
    setup: str = ""
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of a rung."""

    rung: Rung
    num_right: int
    num_steps: int
    ms: float

    @property
    def holds(self) -> bool:
        return self.num_right == self.num_steps

    def __str__(self) -> str:
        if self.holds:
            return f"{self.rung.name}: all {self.num_steps} right, {self.ms:.1f} ms"
        return f"{self.rung.name}: {self.num_right} of {self.num_steps} right"


def rungs_for(machine: Machine, device: str) -> list[Rung]:
    """What can be tried on this machine, the least change first.

    Example:
        >>> [rung.name for rung in rungs_for(Machine(os="linux"), "cpu")]
        ["torch's own kernels", "Penstock's bypass"]
    """
    found: list[Rung] = []
    if device == "cuda" and machine.torch_build == "hip":
        find = (("MIOPEN_FIND_MODE", "NORMAL"), ("MIOPEN_FIND_ENFORCE", "SEARCH"))
        found.append(
            Rung(
                name="MIOpen searches anew",
                line="export MIOPEN_FIND_MODE=NORMAL MIOPEN_FIND_ENFORCE=SEARCH",
                environ=find,
            )
        )
        found += _override_rungs(machine)
    off = "torch.backends.cudnn.enabled = False"
    if device == "cpu":
        off = "torch.backends.mkldnn.set_flags(False)"
    found.append(Rung(name="torch's own kernels", line=off, setup="library off"))
    line = 'penstock.conv.bypass_convolutions("auto")'
    found.append(Rung(name="Penstock's bypass", line=line, setup="bypass"))
    return found


def _override_rungs(machine: Machine) -> list[Rung]:
    name = "HSA_OVERRIDE_GFX_VERSION"
    for gpu in machine.gpus:
        wanted = OVERRIDES.get((gpu.architecture or "")[:6])
        if wanted and machine.environment.get(name) != wanted:
            rung = Rung(name=f"{name}={wanted}", line=f"export {name}={wanted}",
                        environ=((name, wanted),))  # fmt: skip
            return [rung]
    return []


def climb(
    rungs: Sequence[Rung], broken: Sequence[Step], run: Callable[[Rung], list[Verdict]]
) -> list[Trial]:
    """Try each rung on what is broken.

    Args:
        run: Tries the broken steps on a rung.
    """
    trials = []
    for rung in rungs:
        verdicts = run(rung)
        right = [verdict for verdict in verdicts if verdict.word == "right"]
        num_absent = sum(verdict.word == "absent" for verdict in verdicts)  # no rung can have it
        trials.append(
            Trial(
                rung=rung,
                num_right=len(right),
                num_steps=len(broken) - num_absent,
                ms=sum(verdict.ms for verdict in right),
            )
        )
    return trials


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest rung that holds.

    Example:
        >>> one = Rung(name="one", line="a")
        >>> two = Rung(name="two", line="b")
        >>> best_of([Trial(rung=one, num_right=1, num_steps=2, ms=1.0),
        ...          Trial(rung=two, num_right=2, num_steps=2, ms=9.0)]).rung.name
        'two'
    """
    return min((trial for trial in trials if trial.holds), key=lambda t: t.ms, default=None)


def wheels_hint(machine: Machine) -> str:
    """A word on newer builds, where they may help."""
    if machine.torch_build != "hip":
        return ""
    return (
        "Newer builds of torch may know the card: AMD publishes some for older architectures "
        "without testing them. Install one into an environment of its own and probe again."
    )
