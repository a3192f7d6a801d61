"""Every problem is reported on an affected machine, and not on one without it."""

from __future__ import annotations

import pytest

from penstock.machine.facts import Gpu, Machine
from penstock.machine.storage import Storage
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Problem, worst_first
from penstock.planning.problems import check_storage, find_problems

pytestmark = pytest.mark.legacy

GIB = 1 << 30
H200 = Gpu(name="NVIDIA H200", vendor="nvidia", architecture="sm_90")


def healthy(**facts: object) -> Machine:
    """Return a healthy Linux workstation, except for ``facts``."""
    plain: dict[str, object] = {
        "os": "linux",
        "num_cpus": 16,
        "num_affine_cpus": 16,
        "memory_bytes": 64 * GIB,
        "available_bytes": 48 * GIB,
        "shm_bytes": 32 * GIB,
        "max_fds": 1024,
        "torch": "2.13.0",
        "torch_build": "cuda",
        "torch_build_version": "12.8",
        "gpus": (H200,),
        "gpus_seen_by": "nvml",
        "start_method": "fork",
        "decoders": ("cv2", "PIL"),
        "has_turbo": True,
    }
    return Machine(**{**plain, **facts})  # type: ignore[arg-type]


def problems_of(machine: Machine, request: LoaderRequest | None = None) -> dict[str, Problem]:
    found = find_problems(machine, make_plan(machine, request or LoaderRequest(), Workload()))
    return {problem.code: problem for problem in found}


HEALTHY = [
    healthy(),
    healthy(torch_build="cpu", gpus=()),
    healthy(os="darwin", torch_build="mps", gpus=(), shm_bytes=None, max_fds=256),
    healthy(os="win32", torch_build="cpu", gpus=(), shm_bytes=None, max_fds=None),
    healthy(memory_bytes=2 * GIB, available_bytes=int(1.5 * GIB), shm_bytes=GIB),
    healthy(environment={"OMP_NUM_THREADS": "1"}),
    healthy(has_turbo=None, decoders=()),
]


@pytest.mark.parametrize("machine", HEALTHY, ids=lambda machine: machine.os)
def test_a_healthy_machine_has_no_problem(machine: Machine) -> None:
    assert problems_of(machine) == {}


@pytest.mark.parametrize(
    ("code", "severity", "cure", "facts"),
    [
        ("shm-small", "note", "--shm-size", {"shm_bytes": 64 << 20}),
        ("one-core", "slow", "auto", {"num_cpus": 1, "num_affine_cpus": 1}),
        ("one-core", "slow", "taskset", {"num_affine_cpus": 1}),
        (
            "one-core",
            "slow",
            "--cpus",
            {"cpu_quota": 0.5, "environment": {"OMP_NUM_THREADS": "1"}},
        ),
        ("fork-set", "harm", "'spawn'", {"is_start_method_set": True}),
        ("context-set", "note", "force", {"is_start_method_set": True, "start_method": "spawn"}),
        ("gpu-context", "note", "multiprocessing_context", {"has_gpu_context": True}),
        ("pillow-without-turbo", "slow", "pip install", {"has_turbo": False}),
        (
            "threads-times-workers",
            "slow",
            "OMP_NUM_THREADS=1",
            {"environment": {"OMP_NUM_THREADS": "8"}},
        ),
        ("quota-unseen", "slow", "OMP_NUM_THREADS=2", {"cpu_quota": 2.0}),
        ("few-files", "slow", "ulimit -n", {"max_fds": 200}),
        ("memory-low", "note", "num_workers=1", {"available_bytes": GIB // 2}),
        ("memory-low", "harm", "num_workers=1", {"available_bytes": GIB // 8}),
        ("memory-low", "note", "--memory", {"memory_limit_bytes": GIB // 2}),
        ("torch-missing", "harm", "pip install torch", {"torch_build": "none", "torch": None}),
        ("torch-without-gpu", "note", "cu128", {"torch_build": "cpu"}),
        ("gpu-driver", "harm", "reboot", {"gpu_trouble": "nvidia-smi did not answer in 2 s"}),
        ("windows-commit", "note", "page file", {"os": "win32", "shm_bytes": None}),
        ("frozen", "note", "thread", {"is_frozen": True, "can_start_python": False}),
        ("gil-enabled", "slow", "-X gil=0", {"gil_enabled_by": "cv2"}),
    ],
)
def test_a_problem_is_found_with_the_line_that_cures_it(
    code: str, severity: str, cure: str, facts: dict[str, object]
) -> None:
    found = problems_of(healthy(**facts))
    assert set(found) == {code}
    assert found[code].severity == severity
    assert cure in found[code].cure
    assert found[code].what
    assert found[code].why


def test_fork_without_a_gpu_is_only_a_note() -> None:
    machine = healthy(is_start_method_set=True, torch_build="cpu", gpus=())
    assert problems_of(machine)["fork-set"].severity == "note"


def test_fork_on_macos_is_harm_without_a_gpu() -> None:
    machine = healthy(os="darwin", is_start_method_set=True, torch_build="mps", gpus=())
    assert problems_of(machine)["fork-set"].severity == "harm"


def test_the_default_start_method_is_nobody_s_doing() -> None:
    assert problems_of(healthy(start_method="fork", is_start_method_set=False)) == {}


def test_fork_that_was_asked_for_beside_a_gpu_context_is_harm() -> None:
    found = problems_of(
        healthy(has_gpu_context=True), LoaderRequest(num_workers=2, start_method="fork")
    )
    assert set(found) == {"asked-for-trouble"}
    assert found["asked-for-trouble"].severity == "harm"
    assert "Omit multiprocessing_context" in found["asked-for-trouble"].cure


def test_threads_are_counted_against_the_workers_of_the_plan() -> None:
    machine = healthy(environment={"OMP_NUM_THREADS": "4"})
    assert problems_of(machine, LoaderRequest(num_workers=4)) == {}
    found = problems_of(machine, LoaderRequest(num_workers=5))["threads-times-workers"]
    assert "20 threads on 16 cores" in found.what
    assert found.cure == "export OMP_NUM_THREADS=3"
    assert problems_of(machine, LoaderRequest(num_workers=0)) == {}
    both = healthy(environment={"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "16"})
    found = problems_of(both, LoaderRequest(num_workers=4))["threads-times-workers"]
    assert found.what.startswith("MKL_NUM_THREADS=16 with 4 workers: 64 threads")
    assert found.cure == "export OMP_NUM_THREADS=4 MKL_NUM_THREADS=4"


@pytest.mark.parametrize("text", ["", "many", "-3", "1,2"])
def test_a_thread_count_that_is_none_is_passed_over(text: str) -> None:
    assert problems_of(healthy(environment={"OMP_NUM_THREADS": text})) == {}


def test_a_quota_that_somebody_has_accounted_for_is_no_problem() -> None:
    machine = healthy(cpu_quota=2.0, environment={"OMP_NUM_THREADS": "1"})
    assert problems_of(machine) == {}
    assert problems_of(healthy(cpu_quota=12.0)) == {}


def test_a_driver_in_trouble_is_a_note_where_torch_has_no_use_for_it() -> None:
    machine = healthy(gpu_trouble="NVML: no driver", torch_build="cpu", gpus=())
    assert problems_of(machine)["gpu-driver"].severity == "note"


@pytest.mark.parametrize("kind", ["spinning", "network"])
def test_slow_storage_is_named_with_its_device(kind: str) -> None:
    storage = Storage(kind=kind, device="sda", advice="Pack the samples.")
    (problem,) = check_storage("data", storage)
    assert (problem.code, problem.severity) == (f"storage-{kind}", "slow")
    assert "data" in problem.what
    assert "sda" in problem.what
    (guess,) = check_storage(".", storage, is_data=False)
    assert guess.severity == "note"


@pytest.mark.parametrize("kind", ["ram", "nvme", "ssd", "unknown"])
def test_other_storage_is_no_problem(kind: str) -> None:
    assert check_storage("data", Storage(kind=kind)) == []


def test_the_worst_comes_first() -> None:
    machine = healthy(shm_bytes=64 << 20, has_turbo=False, gpu_trouble="hangs")
    found = find_problems(machine, make_plan(machine, LoaderRequest(), Workload()))
    assert [problem.severity for problem in found] == ["harm", "slow", "note"]
    assert worst_first(reversed(found)) == found


def test_problems_with_storage_come_with_the_others() -> None:
    machine = healthy()
    disk = {"data": Storage(kind="spinning", device="sdb")}
    found = find_problems(machine, make_plan(machine, LoaderRequest(), Workload()), disk)
    assert [problem.code for problem in found] == ["storage-spinning"]
