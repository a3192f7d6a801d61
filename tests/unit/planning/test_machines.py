"""Plans and problems for recorded and constructed machines.

Every ``tests/machines/*.json`` is planned with the same request and the same workload. The expected
results are in ``tests/machines/expected/``. After an intended change of the rules, run this and
review the difference:

    PENSTOCK_REWRITE_EXPECTED=1 python -m pytest tests/unit/planning/test_machines.py
"""

from __future__ import annotations

import os

import pytest

from penstock.machine.facts import Machine
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Plan, Problem
from penstock.planning.problems import find_problems
from support.paths import MACHINES

pytestmark = pytest.mark.legacy

EXPECTED = MACHINES / "expected"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))

REQUEST = LoaderRequest(batch_size=64)
JPEGS = Workload(sample_s=0.008, busy_share=0.95, num_samples=100_000, sample_bytes=3 * 224 * 224)
"""A photograph, decoded and cropped, as uint8."""


def machine(name: str) -> Machine:
    return Machine.from_json((MACHINES / f"{name}.json").read_text(encoding="utf-8"))


def planned(name: str, request: LoaderRequest = REQUEST) -> Plan:
    return make_plan(machine(name), request, JPEGS)


def found(name: str, request: LoaderRequest = REQUEST) -> dict[str, Problem]:
    problems = find_problems(machine(name), planned(name, request))
    return {problem.code: problem for problem in problems}


def answer(name: str) -> str:
    """Return the plan and the problems as text, one fact per line."""
    problems = find_problems(machine(name), planned(name))
    lines = [str(planned(name)), ""]
    for problem in problems:
        lines += [f"{problem.severity} [{problem.code}] {problem.what}"]
        lines += [f"  {problem.why}", f"  {problem.cure}"]
    return "\n".join(lines if problems else [*lines, "no problem"]) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_gets_the_plan_and_the_problems_it_got_before(name: str) -> None:
    path = EXPECTED / f"{name}.txt"
    if os.environ.get("PENSTOCK_REWRITE_EXPECTED"):
        EXPECTED.mkdir(exist_ok=True)
        path.write_text(answer(name), encoding="utf-8")
    assert answer(name) == path.read_text(encoding="utf-8")


def test_there_are_twenty_machines_and_no_answer_without_one() -> None:
    assert len(NAMES) >= 20
    assert sorted(path.stem for path in EXPECTED.glob("*.txt")) == NAMES


def test_a_windows_laptop_spawns_few_workers_because_of_what_cuda_commits() -> None:
    plan = make_plan(machine("windows-laptop-rtx"), REQUEST, Workload())  # before any measurement
    assert plan.start_method.value == "spawn"
    assert 1 <= plan.num_workers.value <= 3
    assert "CUDA's libraries" in plan.num_workers.reason
    assert found("windows-laptop-rtx")["windows-commit"].severity == "note"
    many = found("windows-laptop-rtx", LoaderRequest(num_workers=12, batch_size=64))
    assert "WinError 1455" in many["asked-for-trouble"].what
    assert "Use num_workers=" in many["asked-for-trouble"].cure
    assert planned("windows-no-gpu").num_workers.value > 3  # control: light without CUDA


def test_a_small_shm_changes_nothing_but_is_noted() -> None:
    plan = planned("container-64mb-shm")
    assert plan.pool.value == "process"
    assert plan.num_workers.value > 4
    assert found("container-64mb-shm")["shm-small"].severity == "note"


def test_a_quota_of_two_cores_means_two_workers() -> None:
    assert planned("container-2-of-64-cores").num_workers.value == 2
    cure = found("container-2-of-64-cores")["quota-unseen"].cure
    assert cure == "export OMP_NUM_THREADS=2"


def test_an_rx_5600_xt_is_told_which_override_is_its_own() -> None:
    problem = found("rx5600xt-rocm52")["override-wrong"]
    assert problem.severity == "harm"
    assert problem.cure == "export HSA_OVERRIDE_GFX_VERSION=10.1.0"
    assert "=10.3.0" in found("rx6700xt-no-override")["override-unset"].cure
    assert "override" not in " ".join(found("rx7900xtx"))  # control: a card that needs none


def test_a_frozen_application_works_with_threads() -> None:
    assert planned("frozen-app-windows").pool.value == "thread"
    assert set(found("frozen-app-windows")) == {"frozen"}


def test_fork_that_somebody_set_is_harm_beside_a_gpu() -> None:
    assert found("fork-set-by-someone")["fork-set"].severity == "harm"
    assert planned("fork-set-by-someone").start_method.value == "forkserver"


def test_a_driver_that_hangs_is_harm() -> None:
    assert found("driver-hangs")["gpu-driver"].severity == "harm"


def test_64_threads_in_each_worker_are_counted() -> None:
    assert found("omp-64-threads")["threads-times-workers"].severity == "slow"


@pytest.mark.parametrize(
    "name",
    [
        "h200",
        "dgx-h100-8gpu",
        "mi300x",
        "rx7900xtx",
        "macos-m2",
        "linux-vm-2-cores",
        "windows-no-gpu",
    ],
)
def test_a_machine_in_order_has_no_problem(name: str) -> None:
    assert found(name) == {}
