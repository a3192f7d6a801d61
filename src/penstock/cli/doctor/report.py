"""The report of ``penstock doctor``: facts, dataset, plan and problems.

Tested by ``tests/integration/cli/doctor/test_command.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from penstock.cli.doctor.convolutions import convolution_rows
from penstock.cli.doctor.gpu_copies import copy_rows
from penstock.cli.sections import main_facts, print_section
from penstock.machine.facts import Gpu, Machine
from penstock.machine.storage import Storage
from penstock.planning.plan import Problem, label, value_text
from penstock.planning.quantities import duration, size

if TYPE_CHECKING:
    from penstock.conv.probing import probe

_STYLES = {"harm": "bold red", "slow": "yellow", "note": "cyan"}
_GENERATORS = {"python": "random", "numpy": "numpy.random", "torch": "torch"}


@dataclass(frozen=True, kw_only=True)
class DoctorFindings:
    """All findings of ``penstock doctor``, as plain records.

    Args:
        plan: Result of :meth:`penstock.planning.plan.Plan.to_dict`.
        seen_by_torch: The GPUs that torch can use. None without ``--gpu``.
        gpu_copies: Result of :func:`penstock.cli.doctor.gpu_copies.measure_copies`.
        dataset: Results of the dataset check.
        convolutions: Result of the convolution probe. None without ``--gpu``.
    """

    machine: Machine
    plan: Mapping[str, Any]
    problems: list[Problem]
    storage: Mapping[str, Storage]
    seen_by_torch: tuple[Gpu, ...] | None = None
    gpu_copies: Mapping[str, Any] | None = None
    dataset: Mapping[str, Any] | None = None
    convolutions: probe.ProbeResult | None = None


def print_report(console: Console, findings: DoctorFindings) -> None:
    """Print all findings, without color in a pipe. Lines are not wrapped, so they can be pasted."""
    print_section(console, "Machine", _machine_rows(findings))
    if findings.gpu_copies is not None:
        print_section(console, "GPU copies", copy_rows(findings.gpu_copies))
    if findings.dataset is not None:
        print_section(
            console, f"Dataset {findings.dataset['target']}", _dataset_rows(findings.dataset)
        )
    if findings.convolutions is not None:
        print_section(console, "Convolutions", convolution_rows(findings.convolutions))
    rows = []
    for name, choice in findings.plan.items():
        if isinstance(choice, dict):
            value = value_text(name, choice["value"])
            rows.append((label(name), f"{value}  ({choice['source']}: {choice['reason']})"))
    print_section(console, "Plan", rows)
    _print_problems(console, findings.problems)


def _print_problems(console: Console, problems: list[Problem]) -> None:
    console.print(Text("Problems", style="bold"), soft_wrap=True)
    if not problems:
        console.print(Text("  none found", style="green"), soft_wrap=True)
    for problem in problems:
        where = f"{problem.where}: " if problem.where else ""
        lines = (
            Text.assemble(
                (f"  {problem.severity}  ", _STYLES[problem.severity]), where + problem.what
            ),
            Text(f"        {problem.why}", style="dim"),
            Text.assemble("        ", ("fix: ", "green"), (problem.cure, "bold")),
        )
        for line in lines if problem.cure else lines[:2]:
            console.print(line, soft_wrap=True)


# -- the machine -----------------------------------------------------------------------------------


def _machine_rows(findings: DoctorFindings) -> Iterable[tuple[str, str]]:
    machine = findings.machine
    yield from main_facts(machine)
    if findings.seen_by_torch is not None:
        names = [gpu.name for gpu in findings.seen_by_torch]
        yield "torch can use", ", ".join(names) or "no GPU"
    how = "as was set" if machine.is_start_method_set else "by default"
    yield "multiprocessing", f"{machine.start_method} {how}; Penstock's workers: see the plan"
    if machine.environment:
        texts = [f"{name}={value}" for name, value in machine.environment.items()]
        yield "environment", ", ".join(texts)
    turbo = {True: " (Pillow with turbo)", False: " (Pillow without turbo)"}
    decoders = ", ".join(machine.decoders) or "none"
    yield "JPEG decoders", decoders + turbo.get(machine.has_turbo, "")  # type: ignore[arg-type]
    for path, storage in findings.storage.items():
        on = " ".join(filter(None, (storage.device, storage.filesystem)))
        kind = "type not reported" if storage.kind == "unknown" else storage.kind
        yield "data", f"{path}: {kind}" + (f" ({on})" if on else "")


# -- the dataset -----------------------------------------------------------------------------------


def _dataset_rows(dataset: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if not dataset.get("type"):
        yield "type", "unknown, see the problems below"
    if dataset.get("type"):
        length = dataset.get("length")
        shown = "no length" if length is None else f"{length:,} samples"
        loader = dataset.get("loader")
        through = f", from a {loader['made_by']} DataLoader" if loader else ""
        yield "type", f"{dataset['type']} ({dataset['kind']}), {shown}{through}"
    if dataset.get("forms"):
        yield "sample", dataset["forms"][0]["form"]
    yield from _timing_rows(dataset.get("samples"))
    yield from _travel_rows(dataset)
    if dataset.get("draws"):
        drawn = ", ".join(_GENERATORS[name] for name in dataset["draws"])
        yield "randomness", f"samples draw from {drawn}, seeded for each sample"
    elif "draws" in dataset:
        yield "randomness", "no draws from global generators detected"


def _timing_rows(timing: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    if not timing:
        return
    yield (
        "time",
        f"{duration(timing['median_s'])} median, {duration(timing['p10_s'])} to "
        f"{duration(timing['p90_s'])} (10th to 90th percentile), "
        f"{duration(timing['slowest_s'])} slowest, {duration(timing['first_s'])} first; "
        f"{timing['num_samples']:,} samples timed",
    )
    waiting = 1 - timing["busy_share"]
    yield "", f"{size(timing['sample_bytes'])} per sample; {waiting:.0%} of the time is waiting"


def _travel_rows(dataset: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    travel = dataset.get("travel")
    if travel and travel["is_ok"]:
        yield (
            "pickling",
            f"takes {duration(travel['took_s'])}; {size(travel['private_bytes'])} per worker, "
            f"{size(travel['shared_bytes'])} shared by all workers",
        )
        yield from (("", note) for note in travel["notes"])
    elif travel:
        yield "pickling", f"fails: {travel['what']}"
    batch = dataset.get("batch")
    if batch and batch["is_ok"]:
        held = batch["worker_bytes"]
        worker = f"; the worker uses {size(held)} of private memory" if held else ""
        yield "batch", f"{batch['form']}, the first after {duration(batch['first_s'])}{worker}"
