"""How fast do batches get to the GPUs, and what could a model be fed with? Measured, then told.

The copies run in a child process with a limit (:mod:`penstock.cli.doctor.gpu_trial`); here is what
becomes of its notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.cli.doctor.child import run_trial
from penstock.machine.facts import Gpu
from penstock.machine.pcie import PcieLink
from penstock.planning.plan import Problem

_TRIAL = "penstock.cli.doctor.gpu_trial"
IMAGE_VALUES = 3 * 224 * 224
_KINDS = {
    "pageable": "from ordinary memory",
    "pinned": "from pinned memory",
    "registered": "from our slots",
}


def measure_copies(gpus: tuple[Gpu, ...], limit_s: float, *, trial: str = _TRIAL) -> dict[str, Any]:
    """The notes of a trial of all GPUs, or why there was none: ``gpus`` and ``failure``.

    Args:
        gpus: Those that torch can use.
        trial: The module whose ``main`` runs in the child.
    """
    if not any(gpu.vendor in ("nvidia", "amd") for gpu in gpus):
        apple = any(gpu.vendor == "apple" for gpu in gpus)
        why = "Apple's shares its memory with the processor" if apple else "torch can use none"
        return {"gpus": [], "failure": f"no GPU to copy to: {why}"}
    notes = run_trial(trial, {"command": "doctor", "target": "--gpu", "limit_s": limit_s})
    failure = notes["failure"]
    return {"gpus": notes.get("gpus", []), "failure": failure and failure["what"]}


def copy_rows(copies: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """For a person. One line where nothing was measured."""
    for gpu in copies["gpus"]:
        link = PcieLink(**gpu["link"]) if gpu["link"] else "unknown"
        yield f"cuda:{gpu['index']}", f"{gpu['name']}; link: {link}"
        rates = [
            f"{rate / 1e9:.3g} GB/s {_KINDS[kind]}"
            for kind, rate in gpu["bytes_per_s"].items()
            if rate
        ]
        yield "copies", ", ".join(rates) or "none came through"
        yield "slots", _pinning(gpu)
        best = _best(gpu)
        if best:
            yield (
                "feeds",
                f"{best / IMAGE_VALUES:,.0f} images/s of 224 x 224 as bytes, "
                f"{best / IMAGE_VALUES / 4:,.0f} as float32",
            )
    if copies["failure"]:
        yield "not measured", copies["failure"]


def _pinning(gpu: Mapping[str, Any]) -> str:
    if gpu["bytes_per_s"]["registered"] is None:
        return f"cannot be pinned ({gpu['trouble']}): batches go through torch's pinned buffers"
    seen = "" if gpu["is_pinned"] else ", though torch does not see that"
    return f"can be pinned{seen}; before one is used again: {gpu['fence']}"


def _best(gpu: Mapping[str, Any]) -> float | None:
    rates: dict[str, float | None] = gpu["bytes_per_s"]
    return rates["registered"] or rates["pinned"] or rates["pageable"]


def judge_copies(copies: Mapping[str, Any]) -> list[Problem]:
    """What in the notes is a problem."""
    problems = []
    for gpu in copies["gpus"]:
        name = f"cuda:{gpu['index']} ({gpu['name']})"
        link = PcieLink(**gpu["link"]) if gpu["link"] else PcieLink()
        if link.width and link.max_width and link.width < link.max_width:
            problems.append(
                Problem(
                    code="narrow-link",
                    severity="slow",
                    what=f"{name} uses {link.width} of its {link.max_width} PCIe lanes",
                    why="copies take as much longer; another card or the slot shares the lanes",
                    cure="",
                )
            )
        if gpu["bytes_per_s"]["registered"] is None:
            problems.append(
                Problem(
                    code="slots-not-pinned",
                    severity="slow",
                    what=f"{name}: memory of batches cannot be pinned: {gpu['trouble']}",
                    why="each batch is copied once more on its way to the GPU",
                    cure="ulimit -l unlimited",
                )
            )
    if copies["failure"] and not str(copies["failure"]).startswith("no GPU to copy to"):
        problems.append(
            Problem(
                code="gpu-copies",
                severity="harm",
                what=f"copies to the GPUs could not be measured: {copies['failure']}",
                why="training would end in the same way",
                cure="penstock doctor --gpu --timeout 300",
            )
        )
    return problems
