"""The doctor's round: facts, plan, problems, and a dataset if one was named."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.cli.doctor.bad_samples import (
    examine_bad_samples,
    names_bad_samples,
    print_bad_samples,
)
from penstock.cli.doctor.child import TrialOptions, try_dataset
from penstock.cli.doctor.convolutions import judge_convolutions, probe_convolutions
from penstock.cli.doctor.findings import find_dataset_problems
from penstock.cli.doctor.gpu_copies import judge_copies, measure_copies
from penstock.cli.doctor.report import Findings, print_report
from penstock.cli.doctor.target import find_target
from penstock.cli.sections import make_console
from penstock.errors import BadTarget
from penstock.machine.collect import machine
from penstock.machine.facts import Gpu, Machine
from penstock.machine.gpu import FoundGpus, find_torch_gpus
from penstock.machine.storage import Storage, storage_of
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Plan, Problem, worst_first
from penstock.planning.planner import make_plan
from penstock.planning.problems import check_storage, find_problems

HEALTHY, UNHEALTHY = 0, 1
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What the person asked for.

    Args:
        target: ``script.py:name``, a file of bad samples, or None to look at the machine alone.
        arguments: The script's own.
        folders: Where the data lies.
        asks_torch: May a child process open the GPUs, to see what torch can use?
    """

    target: str | None = None
    arguments: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    as_json: bool = False
    asks_torch: bool = False
    batch_size: int | None = None
    num_workers: int | None = None
    limit_s: float = 60.0


def run_doctor(options: DoctorOptions) -> int:
    """Look, print, and give the exit code: 1 where something harms or the dataset fails.

    Raises:
        BadTarget: There is nothing to try at ``options.target``.
    """
    if options.target is not None and names_bad_samples(options.target):
        return _show_bad_samples(options.target, as_json=options.as_json)
    findings = examine(options)
    if options.as_json:
        sys.stdout.write(json.dumps(as_dict(findings), indent=2, default=str) + "\n")
    else:
        print_report(make_console(), findings)
    failure = (findings.dataset or {}).get("failure")
    is_harmed = any(problem.severity == "harm" for problem in findings.problems)
    return UNHEALTHY if failure or is_harmed else HEALTHY


def examine(options: DoctorOptions) -> Findings:
    """Everything there is to find."""
    target = find_target(options.target) if options.target is not None else None
    notes = None if target is None else _try(options)
    here = _machine_in(notes) or machine()
    plan = _plan_in(notes) or make_plan(here, _request(options), Workload())
    storage, problems = _judge_data(options, notes)
    problems += find_problems(here, plan)
    sighting = find_torch_gpus(options.limit_s) if options.asks_torch else None
    copies = None
    if sighting is not None:
        problems += _judge_torch_gpus(here, sighting)
        copies = measure_copies(sighting.gpus, options.limit_s)
        problems += judge_copies(copies)
    convolutions = probe_convolutions(sighting)
    problems += judge_convolutions(convolutions)
    if notes is not None:
        problems += find_dataset_problems(notes)
    if target is not None:
        problems = [_with_line(problem, target.tree, str(target.script)) for problem in problems]
    return Findings(
        machine=here,
        plan=plan.to_dict(),
        problems=worst_first(problems),
        storage=storage,
        seen_by_torch=None if sighting is None else sighting.gpus,
        gpu_copies=copies,
        dataset=notes,
        convolutions=convolutions,
    )


def as_dict(findings: Findings) -> dict[str, Any]:
    """The findings as a program reads them."""
    notes = findings.dataset
    return {
        "machine": asdict(findings.machine),
        "plan": dict(findings.plan),
        "problems": [problem.to_dict() for problem in findings.problems],
        "storage": {path: asdict(storage) for path, storage in findings.storage.items()},
        "seen_by_torch": None
        if findings.seen_by_torch is None
        else [asdict(gpu) for gpu in findings.seen_by_torch],
        "convolutions": None if findings.convolutions is None else findings.convolutions.to_dict(),
        "gpu_copies": findings.gpu_copies,
        "dataset": None
        if notes is None
        else {name: value for name, value in notes.items() if name not in ("machine", "plan")},
    }


def _request(options: DoctorOptions) -> LoaderRequest:
    return LoaderRequest(
        num_workers="auto" if options.num_workers is None else options.num_workers,
        batch_size=options.batch_size or DEFAULT_BATCH_SIZE,
    )


def _try(options: DoctorOptions) -> dict[str, Any]:
    assert options.target is not None
    notes = try_dataset(
        TrialOptions(
            target=options.target,
            arguments=options.arguments,
            limit_s=options.limit_s,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
        )
    )
    failure = notes["failure"]
    if failure and failure["kind"] == "name":
        raise BadTarget(failure["what"], where=failure["where"], remedy=failure["cure"] or None)
    return notes


def _machine_in(notes: dict[str, Any] | None) -> Machine | None:
    """The machine as the script left it: start method, environment, an open GPU."""
    if notes is None or not notes.get("machine"):
        return None
    return Machine.from_json(json.dumps(notes["machine"]))


def _plan_in(notes: dict[str, Any] | None) -> Plan | None:
    values = (notes or {}).get("plan")
    return Plan.from_dict(values) if values else None


def _judge_data(
    options: DoctorOptions, notes: dict[str, Any] | None
) -> tuple[dict[str, Storage], list[Problem]]:
    """What the data lies on: as told, as found in the dataset, or else this folder as a guess."""
    for folder in options.folders:
        if not Path(folder).exists():
            raise BadTarget(f"--data {folder}: there is no such file or folder")
    folders = options.folders or tuple((notes or {}).get("folders", ()))
    is_data = bool(folders)
    storage = {folder: storage_of(folder) for folder in folders or (".",)}
    problems = [
        problem
        for path, lies_on in storage.items()
        for problem in check_storage(path, lies_on, is_data=is_data)
    ]
    return storage, problems


def _judge_torch_gpus(here: Machine, sighting: FoundGpus) -> list[Problem]:
    """Can torch use what the drivers list?"""
    listed = [gpu for gpu in here.gpus if gpu.vendor in ("nvidia", "amd")]
    if sighting.trouble or (listed and not sighting.gpus and here.torch_build in ("cuda", "hip")):
        return [
            Problem(
                code="torch-sees-no-gpu",
                severity="harm",
                what=sighting.trouble or f"torch can use none of: {_names(listed)}",
                why="training runs on the processor, or fails",
                cure='python -c "import torch; torch.zeros(1).cuda()"',
            )
        ]
    return []


def _names(gpus: list[Gpu]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def _with_line(problem: Problem, tree: ast.Module, script: str) -> Problem:
    """Where the script itself set the start method, its line is the one to change."""
    if problem.code not in ("fork-set", "context-set"):
        return problem
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_start_method"):
            return replace(problem, where=f"{script}:{node.lineno}", cure=f"# {ast.unparse(node)}")
    return problem


def _show_bad_samples(target: str, *, as_json: bool) -> int:
    report = examine_bad_samples(target)
    if as_json:
        sys.stdout.write(json.dumps({"bad_samples": report.to_dict()}, indent=2) + "\n")
    else:
        print_bad_samples(make_console(), report)
    return UNHEALTHY if report.samples else HEALTHY
