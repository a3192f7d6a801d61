"""``penstock doctor --gpu``: probes the GPU's convolutions and reports broken ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.machine.gpu import FoundGpus
from penstock.planning.plan import Problem

if TYPE_CHECKING:
    from penstock.conv.probing.probe import ProbeResult


def probe_convolutions(found_gpus: FoundGpus | None) -> ProbeResult | None:
    """Return the result of the convolution probe, or None if torch cannot use a GPU.

    The result may come from a cache.
    """
    if found_gpus is None or not any(gpu.vendor in ("nvidia", "amd") for gpu in found_gpus.gpus):
        return None
    from penstock.conv.probing.probe import probe

    return probe("cuda")


def convolution_problems(found: ProbeResult | None) -> list[Problem]:
    """Return broken convolutions as a problem, with a workaround to paste."""
    broken = [] if found is None else [v for v in found.verdicts if v.is_broken]
    if found is None or not broken:
        return []
    words = ", ".join(f"{num} {word}" for word, num in Counter(v.word for v in broken).items())
    note = next((v.note for v in broken if v.note), "")
    return [
        Problem(
            code="convolutions-broken",
            severity="harm",
            what=f"{len(broken)} of {len(found.verdicts)} convolutions fail on the GPU ({words})",
            why=note.splitlines()[0][:160] if note else "models with these layers cannot train",
            cure=found.advice,
        )
    ]


def convolution_rows(found: ProbeResult) -> Iterable[tuple[str, str]]:
    """Yield the probe's table as rows of the report."""
    head, *lines = str(found).splitlines()
    yield "probed", head
    for line in lines:
        yield "", line.strip("\n")
