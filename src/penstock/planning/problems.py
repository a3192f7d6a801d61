"""Finds problems of a machine that affect data loading. Pure: same facts, same problems.

Each check covers one fact. It reports nothing if the fact is fine or unknown, because a false alarm
costs more trust than a missed problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from penstock.machine.facts import Machine
from penstock.machine.storage import Storage
from penstock.planning.amd_override import check_override
from penstock.planning.plan import Plan, Problem, Severity, worst_first
from penstock.planning.quantities import count, size

SMALL_SHM_BYTES = 1 << 30
"""A container has 64 MiB by default. Outside of containers, it is half the memory."""
FEW_FILES = {"linux": 1024, "darwin": 256}
"""The defaults. A lower limit was set on purpose."""
LITTLE_MEMORY_BYTES, HARDLY_ANY_MEMORY_BYTES = 1 << 30, 256 << 20
"""Estimates. A worker needs 50 MB and its batches. torch with the training step needs more."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GPU_BUILDS = ("cuda", "hip", "xpu")
BUILD_OF_VENDOR = {"nvidia": "cuda", "amd": "hip"}


def find_problems(
    machine: Machine, plan: Plan, storage: Mapping[str, Storage] | None = None
) -> list[Problem]:
    """Return everything that prevents fast and correct loading, worst first.

    Args:
        plan: The plan for this machine. Some facts matter only with many workers, or with fork.
        storage: The storage of the data, by path.

    Example:
        >>> from penstock.planning.inputs import LoaderRequest, Workload
        >>> from penstock.planning.decisions import make_plan
        >>> box = Machine(os="linux", num_cpus=4, torch_build="cpu", shm_bytes=64 << 20)
        >>> for problem in find_problems(box, make_plan(box, LoaderRequest(), Workload())):
        ...     print(problem.severity, problem.code, problem.cure, sep=": ")
        note: shm-small: docker run --shm-size=8g ...
    """
    checks: tuple[Callable[[Machine, Plan], Iterable[Problem]], ...] = (
        _check_torch,
        _check_gpu_driver,
        lambda machine, plan: check_override(machine),
        _check_start_method,
        _check_gpu_context,
        _check_plan,
        _check_windows,
        _check_memory,
        _check_cores,
        _check_threads,
        _check_files,
        _check_shm,
        _check_frozen,
        _check_gil,
        _check_pillow,
    )
    found = [problem for check in checks for problem in check(machine, plan)]
    for path, lies_on in (storage or {}).items():
        found += check_storage(path, lies_on)
    return worst_first(found)


# -- torch and GPUs ------------------------------------------------------------------------------


def _check_torch(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.torch_build == "none":
        yield Problem(
            code="torch-missing",
            severity="harm",
            what="torch is not installed in this Python",
            why="nothing can be loaded without it",
            cure="pip install torch",
        )
        return
    builds = {BUILD_OF_VENDOR[gpu.vendor] for gpu in machine.gpus if gpu.vendor in BUILD_OF_VENDOR}
    if machine.torch_build == "cpu" and builds:
        card = next(gpu for gpu in machine.gpus if gpu.vendor in BUILD_OF_VENDOR)
        yield Problem(
            code="torch-without-gpu",
            severity="note",
            what=f"torch {machine.torch} is a CPU build",
            why=f"the {card.name} stays idle",
            cure="pip install torch --index-url https://download.pytorch.org/whl/"
            + ("cu128" if card.vendor == "nvidia" else "rocm6.4"),
        )


def _check_gpu_driver(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.gpu_trouble:
        is_needed = machine.torch_build in GPU_BUILDS
        yield Problem(
            code="gpu-driver",
            severity="harm" if is_needed else "note",
            what=f"the GPU driver did not respond correctly: {machine.gpu_trouble}",
            why="a driver in this state also makes torch fail or hang",
            cure="sudo reboot",
        )


def _check_start_method(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if not machine.is_start_method_set:
        return
    if machine.start_method == "fork":
        has_gpu = machine.torch_build in GPU_BUILDS and (machine.gpus or machine.has_gpu_context)
        is_unsafe = has_gpu or machine.os == "darwin"  # Apple's frameworks crash after a fork
        yield Problem(
            code="fork-set",
            severity="harm" if is_unsafe else "note",
            what="multiprocessing's start method was set to 'fork'",
            why="a forked child of a process that uses a GPU or threads hangs or crashes; "
            "Penstock ignores this setting, but PyTorch and others follow it",
            cure="multiprocessing.set_start_method('spawn', force=True)",
        )
        return
    yield Problem(
        code="context-set",
        severity="note",
        what=f"multiprocessing's start method is already set: {machine.start_method!r}",
        why="a later set_start_method() raises 'context has already been set'; Penstock "
        "ignores this setting",
        cure="multiprocessing.set_start_method('spawn', force=True)",
    )


def _check_gpu_context(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.has_gpu_context and plan.start_method.value != "fork":  # fork: the plan warns
        yield Problem(
            code="gpu-context",
            severity="note",
            what="this process holds a GPU context before the first batch",
            why="children forked from it cannot use the GPU; Penstock's workers come from a "
            "process that has none",
            cure="DataLoader(..., multiprocessing_context=None)",
        )


def _check_plan(machine: Machine, plan: Plan) -> Iterable[Problem]:
    for text in plan.warnings:
        what, _, cure = text.rstrip(".").rpartition(". ")
        yield Problem(
            code="asked-for-trouble",
            severity="harm",
            what=what or text,
            why="it was requested, so the plan follows it",
            cure=cure,
        )


# -- processor and memory --------------------------------------------------------------------------


def _check_windows(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.os == "win32" and machine.torch_build == "cuda":
        yield Problem(
            code="windows-commit",
            severity="note",
            what="a CUDA build of torch on Windows",
            why="each worker process commits about 2.5 GiB for CUDA's libraries, and too many "
            "workers end in WinError 1455; the plan has "
            f"{count(plan.num_workers.value, 'worker')}",
            cure="SystemPropertiesPerformance.exe  (Advanced, Virtual memory: a larger page file)",
        )


def _check_memory(machine: Machine, plan: Plan) -> Iterable[Problem]:
    known = [amount for amount in (machine.available_bytes, machine.usable_memory_bytes) if amount]
    free = min(known, default=None)
    if free is None or free >= LITTLE_MEMORY_BYTES:
        return
    is_limit = free == machine.memory_limit_bytes
    yield Problem(
        code="memory-low",
        severity="harm" if free < HARDLY_ANY_MEMORY_BYTES else "note",
        what=f"{size(free)} of memory is "
        + ("all that the control group allows" if is_limit else "free"),
        why="the kernel kills workers when memory runs out",
        cure="docker run --memory=8g ..."
        if is_limit
        else "DataLoader(..., num_workers=1, prefetch_factor=2)",
    )


def _check_cores(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.usable_cores > 1:
        return
    if machine.num_cpus == 1:
        cure = "DataLoader(..., num_workers='auto')"
        what = "this machine has one core"
    elif machine.num_affine_cpus == 1:
        cure = f"taskset -c 0-{machine.num_cpus - 1} python train.py"
        what = f"this process can use one of {machine.num_cpus} cores (affinity)"
    else:
        cure = "docker run --cpus=4 ..."
        what = f"the control group allows {machine.cpu_quota:.3g} of {machine.num_cpus} cores"
    yield Problem(
        code="one-core",
        severity="slow",
        what=what,
        why="workers and training share it, so a worker helps only if samples wait for a disk",
        cure=cure,
    )


def _check_threads(machine: Machine, plan: Plan) -> Iterable[Problem]:
    cores = machine.usable_cores
    num_workers = plan.num_workers.value if plan.pool.value == "process" else 0
    settings = {name: machine.environment.get(name, "") for name in THREAD_VARIABLES}
    given = {name: int(text) for name, text in settings.items() if text.strip().isdecimal()}
    crowding = {name: n for name, n in given.items() if n > 1 and n * num_workers > cores}
    if crowding:
        name, threads = max(crowding.items(), key=lambda item: item[1])
        fitting = max(1, cores // num_workers)
        yield Problem(
            code="threads-times-workers",
            severity="slow",
            what=f"{name}={threads} with {count(num_workers, 'worker')}: "
            f"{threads * num_workers} threads on {count(cores, 'core')}",
            why="the threads compete for the cores. Penstock starts its workers with one thread, "
            "but libraries that a worker loads later, and PyTorch's workers, follow the variable",
            cure="export " + " ".join(f"{each}={fitting}" for each in crowding),
        )
    seen = machine.num_affine_cpus or machine.num_cpus
    if machine.cpu_quota and seen >= 2 * cores and not given:
        yield Problem(
            code="quota-unseen",
            severity="slow",
            what=f"the control group allows {machine.cpu_quota:.3g} of the {seen} cores that "
            "libraries see",
            why="torch, OpenBLAS and OpenCV start a thread for each core they see, and all of them "
            "stall when the quota is used up",
            cure=f"export OMP_NUM_THREADS={cores}",
        )


# -- the system ----------------------------------------------------------------------------------


def _check_files(machine: Machine, plan: Plan) -> Iterable[Problem]:
    usual = FEW_FILES.get(machine.os)
    if machine.max_fds is not None and usual is not None and machine.max_fds < usual:
        yield Problem(
            code="few-files",
            severity="slow",
            what=f"this process can have {machine.max_fds} open files",
            why="each worker needs about 4, and PyTorch needs one for each tensor in flight",
            cure="ulimit -n 4096",
        )


def _check_shm(machine: Machine, plan: Plan) -> Iterable[Problem]:
    shm = machine.shm_bytes
    if machine.os != "linux" or shm is None or shm >= SMALL_SHM_BYTES:
        return
    if machine.memory_bytes and shm >= machine.memory_bytes // 4:
        return  # small only because the machine has little memory
    yield Problem(
        code="shm-small",
        severity="note",
        what=f"/dev/shm has {size(shm)}",
        why="PyTorch's workers die of a bus error when it is full; Penstock's batches are in "
        "anonymous memory, which it does not limit",
        cure="docker run --shm-size=8g ...",
    )


def _check_frozen(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if not machine.can_start_python:
        what = "a frozen application" if machine.is_frozen else "this program"
        yield Problem(
            code="frozen",
            severity="note",
            what=f"{what} cannot start Python worker processes",
            why="workers are threads, and code that holds the GIL does not get faster",
            cure="DataLoader(..., pool='thread')",
        )


def _check_gil(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.gil_enabled_by is not None:
        yield Problem(
            code="gil-enabled",
            severity="slow",
            what=f"{machine.gil_enabled_by} turned the GIL of this free-threaded Python on",
            why="threads no longer run in parallel, so workers are processes; newer versions of "
            "the module may support free threads",
            cure="python -X gil=0 train.py  # if you know that the module is thread-safe",
        )


def _check_pillow(machine: Machine, plan: Plan) -> Iterable[Problem]:
    if machine.has_turbo is False:
        yield Problem(
            code="pillow-without-turbo",
            severity="slow",
            what="Pillow was built without libjpeg-turbo",
            why="libjpeg-turbo decodes JPEG two to six times faster, according to its authors",
            cure="pip install --force-reinstall --only-binary :all: pillow",
        )


def check_storage(path: str, storage: Storage, *, is_data: bool = True) -> list[Problem]:
    """Return a problem if the storage of ``path`` is too slow for training.

    Args:
        is_data: True if the data is known to be there. If False, the problem is only a note.
    """
    if storage.kind not in ("spinning", "network"):
        return []
    severity: Severity = "slow" if is_data else "note"
    kind = "a spinning disk" if storage.kind == "spinning" else "the network"
    on = f" ({storage.device})" if storage.device else ""
    return [
        Problem(
            code=f"storage-{storage.kind}",
            severity=severity,
            what=f"{path} is on {kind}{on}",
            why=storage.advice,
            cure=f"{'aws s3 sync' if '://' in path else 'rsync -a'} {path} /path/on/an/ssd/",
        )
    ]
