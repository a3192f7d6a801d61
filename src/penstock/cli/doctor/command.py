"""``penstock doctor``: describes this machine and its plan, and lists problems.

::

    command           collects facts, plan and problems, then prints a report or JSON
      child_check       with SCRIPT:NAME, checks the dataset in a child process
        - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - in the child
        dataset_check     length, pickling, contents, samples, one batch, the plan
        sample_check      time, structure, exceptions, randomness, first and last index
        - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - in the command
      dataset_problems  finds problems in the saved results
      gpu_copies        with --gpu, measures copies to the GPUs
      convolutions      with --gpu, probes convolutions
      report            prints the findings
    watch             --watch: shows the GPUs once a second
    bad_sample_report BAD.JSONL: lists samples that failed, and how to remove them
    network_check     s3://...: measures object storage
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.child_check import CheckResults, run_check
from penstock.cli.doctor.bad_sample_report import (
    examine_bad_samples,
    names_bad_samples,
    print_bad_samples,
)
from penstock.cli.doctor.convolutions import convolution_problems, probe_convolutions
from penstock.cli.doctor.dataset_problems import find_dataset_problems
from penstock.cli.doctor.gpu_copies import copy_problems, measure_copies
from penstock.cli.doctor.report import DoctorFindings, print_report
from penstock.cli.doctor.watch import run_watch
from penstock.cli.parser import CommandParser, add_loader_options, number
from penstock.cli.script_loading import load_object, make_dataset
from penstock.cli.script_object import find_script_object
from penstock.cli.sections import make_console
from penstock.errors import BadTarget
from penstock.machine.collect import machine
from penstock.machine.facts import Machine
from penstock.machine.gpu import FoundGpus, find_torch_gpus
from penstock.machine.storage import Storage, storage_of
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Plan, Problem, worst_first
from penstock.planning.problems import check_storage, find_problems

HEALTHY, UNHEALTHY = 0, 1
DEFAULT_BATCH_SIZE = 32


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="[SCRIPT:NAME | BAD.JSONL | URL]",
        help="A dataset or loader to check, a list of bad samples, or object storage to measure.",
    )
    parser.add_script_arguments()
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="List the GPUs that torch can use, measure copies and probe convolutions.",
    )
    parser.add_argument("--watch", action="store_true", help="Show GPU usage once a second.")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="PATH",
        help="File or folder of the data. Can be repeated.",
    )
    parser.add_value(
        "--batch-size", "N", number(int, 1), "Batch size. By default, the loader's, or 32."
    )
    add_loader_options(
        parser,
        "num_workers",
        help={"num_workers": "Number of workers to plan for. By default, the loader's, or auto."},
    )
    parser.add_value(
        "--timeout",
        "SECONDS",
        number(float, 1, 86_400),
        "Time limit for checking a dataset.",
        default=60.0,
    )


def execute(options: argparse.Namespace) -> int:
    """Examine the machine and print the report. Returns 1 for a harmful problem or a failed check.

    Raises:
        BadTarget: ``options.target`` cannot be found or read.
    """
    if options.watch:
        return run_watch(as_json=options.json)
    if options.target is not None and names_bad_samples(options.target):
        return _report_bad_samples(options.target, as_json=options.json)
    if options.target is not None and "://" in options.target:
        return _report_network(options.target, as_json=options.json)
    findings = examine(options)
    if options.json:
        sys.stdout.write(json.dumps(as_dict(findings), indent=2, default=str) + "\n")
    else:
        print_report(make_console(), findings)
    failure = (findings.dataset or {}).get("failure")
    is_harmed = any(problem.severity == "harm" for problem in findings.problems)
    return UNHEALTHY if failure or is_harmed else HEALTHY


def _report_bad_samples(target: str, *, as_json: bool) -> int:
    report = examine_bad_samples(target)
    if as_json:
        sys.stdout.write(json.dumps({"bad_samples": report.to_dict()}, indent=2) + "\n")
    else:
        print_bad_samples(make_console(), report)
    return UNHEALTHY if report.samples else HEALTHY


def _report_network(url: str, *, as_json: bool) -> int:
    from penstock.cli.doctor.network_check import check_network, print_network

    found = check_network(url)
    if as_json:
        sys.stdout.write(json.dumps({"network": asdict(found)}, indent=2) + "\n")
    else:
        print_network(make_console(), found)
    return HEALTHY if found.failure is None else UNHEALTHY


def examine(options: argparse.Namespace) -> DoctorFindings:
    """Collect all findings."""
    target = find_script_object(options.target) if options.target is not None else None
    dataset = None if target is None else _check_in_child(options)
    here = _machine_in(dataset) or machine()
    plan = _plan_in(dataset) or make_plan(here, _request(options), Workload())
    storage, problems = _check_data(options.data, dataset)
    problems += find_problems(here, plan)
    found_gpus = find_torch_gpus(options.timeout) if options.gpu else None
    copies = None
    if found_gpus is not None:
        problems += _check_torch_gpus(here, found_gpus)
        copies = measure_copies(found_gpus.gpus, options.timeout)
        problems += copy_problems(copies)
    convolutions = probe_convolutions(found_gpus)
    problems += convolution_problems(convolutions)
    if dataset is not None:
        problems += find_dataset_problems(dataset)
    if target is not None:
        problems = [_with_line(problem, target.tree, str(target.script)) for problem in problems]
    return DoctorFindings(
        machine=here,
        plan=plan.to_dict(),
        problems=worst_first(problems),
        storage=storage,
        seen_by_torch=None if found_gpus is None else found_gpus.gpus,
        gpu_copies=copies,
        dataset=dataset,
        convolutions=convolutions,
    )


def as_dict(findings: DoctorFindings) -> dict[str, Any]:
    """Return the findings as plain values for JSON."""
    dataset = findings.dataset
    return {
        "machine": findings.machine.to_dict(),
        "plan": dict(findings.plan),
        "problems": [problem.to_dict() for problem in findings.problems],
        "storage": {path: asdict(storage) for path, storage in findings.storage.items()},
        "seen_by_torch": None
        if findings.seen_by_torch is None
        else [gpu._asdict() for gpu in findings.seen_by_torch],
        "convolutions": None if findings.convolutions is None else findings.convolutions.to_dict(),
        "gpu_copies": findings.gpu_copies,
        "dataset": None
        if dataset is None
        else {name: value for name, value in dataset.items() if name not in ("machine", "plan")},
    }


def _request(options: argparse.Namespace) -> LoaderRequest:
    return LoaderRequest(
        num_workers="auto" if options.num_workers is None else options.num_workers,
        batch_size=options.batch_size or DEFAULT_BATCH_SIZE,
    )


def _check_in_child(options: argparse.Namespace) -> dict[str, Any]:
    """Run :func:`check_dataset` in a child process and return the results."""
    asked = {
        name: getattr(options, name)
        for name in ("target", "arguments", "timeout", "batch_size", "num_workers")
    }
    return run_check(f"{__name__}:check_dataset", {**asked, "command": "doctor"})


def check_dataset(results: CheckResults, options: dict[str, Any], deadline: float) -> None:
    """Check the dataset of a script. Runs in the child process."""
    target = find_script_object(options["target"])
    value = load_object(target, options["arguments"], results.doing)
    results.doing(f"calling {target.name}()")
    made = make_dataset(value, target)
    import torch

    torch.set_num_threads(1)  # as in a worker, because samples are timed
    # Imported late, because it imports torch, which the script may have to configure first.
    from penstock.cli.doctor.dataset_check import DatasetCheck

    is_loader = isinstance(made, torch.utils.data.DataLoader)
    DatasetCheck(
        results=results,
        target=target,
        dataset=made.dataset if is_loader else made,
        loader=made if is_loader else None,
        options=options,
        deadline=deadline,
    ).run()


def _machine_in(dataset: dict[str, Any] | None) -> Machine | None:
    """Return the machine as seen after the script ran: start method, environment, an open GPU."""
    if dataset is None or not dataset.get("machine"):
        return None
    return Machine.from_json(json.dumps(dataset["machine"]))


def _plan_in(dataset: dict[str, Any] | None) -> Plan | None:
    values = (dataset or {}).get("plan")
    return Plan.from_dict(values) if values else None


def _check_data(
    folders: list[str], dataset: dict[str, Any] | None
) -> tuple[dict[str, Storage], list[Problem]]:
    """Check the storage of the data: ``--data``, the dataset's folders, or the current folder."""
    for folder in folders:
        if not Path(folder).exists():
            raise BadTarget(f"--data {folder} does not exist")
    folders = folders or (dataset or {}).get("folders", [])
    storage = {folder: storage_of(folder) for folder in folders or (".",)}
    problems = [
        problem
        for path, lies_on in storage.items()
        for problem in check_storage(path, lies_on, is_data=bool(folders))
    ]
    return storage, problems


def _check_torch_gpus(here: Machine, found_gpus: FoundGpus) -> list[Problem]:
    """Report GPUs that the drivers list but torch cannot use."""
    listed = [gpu.name for gpu in here.gpus if gpu.vendor in ("nvidia", "amd")]
    is_blind = listed and not found_gpus.gpus and here.torch_build in ("cuda", "hip")
    if not found_gpus.trouble and not is_blind:
        return []
    return [
        Problem(
            code="torch-sees-no-gpu",
            severity="harm",
            what=found_gpus.trouble or f"torch cannot use any of: {', '.join(listed)}",
            why="training runs on the CPU, or fails",
            cure='python -c "import torch; torch.zeros(1).cuda()"',
        )
    ]


def _with_line(problem: Problem, tree: ast.Module, script: str) -> Problem:
    """Point to the line where the script sets the start method, because that line must change."""
    if problem.code not in ("fork-set", "context-set"):
        return problem
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_start_method"):
            return problem._replace(where=f"{script}:{node.lineno}", cure=f"# {ast.unparse(node)}")
    return problem
