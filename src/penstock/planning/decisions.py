"""Makes the plan of a loader: every automatic choice, with its reason.

:func:`make_plan` is pure: the same facts, request and workload give the same plan on any machine.
The loader and ``penstock doctor`` call it. :func:`plan` is the public ``penstock.plan``, which
first collects the facts and measures the dataset.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import BadArgument
from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice, Plan, Source
from penstock.planning.quantities import count, size
from penstock.planning.worker_count import THREAD, choose_num_workers, memory_ceiling

AUTO_PREFETCH = "2 to 16"


def plan(
    dataset: Any = None,
    *,
    batch_size: int | None = 1,
    num_workers: int | str = "auto",
    pool: str = "auto",
    start_method: str | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    pin_memory: bool | None = None,
    randomness: str = "sample",
) -> Plan:
    """Return the plan of a ``DataLoader`` with these arguments on this machine, with reasons.

    Args:
        dataset: A few of its samples are loaded in this process and timed, for about half a second.
            Without a dataset, the plan depends only on the machine.
        start_method: The value of ``multiprocessing_context``.

    Raises:
        BadArgument: An argument has a value that the loader would also refuse.
        Any exception that ``dataset[i]`` raises.

    Example:
        >>> import penstock
        >>> print(penstock.plan(range(1000), batch_size=10).pool.value)
        inline
    """
    request = LoaderRequest(
        num_workers=num_workers,
        pool=pool,
        start_method=start_method,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory=pin_memory,
        batch_size=batch_size,
        randomness=randomness,
    )
    _refuse_unknown(request)
    # Imported late, because the loader and the doctor need neither for make_plan.
    from penstock.machine.collect import machine
    from penstock.planning.sample_timing import measure_workload

    work = Workload() if dataset is None else measure_workload(dataset)
    return make_plan(machine(), request, work)


def _refuse_unknown(request: LoaderRequest) -> None:
    """Refuse values that the loader refuses."""
    is_known = {
        "num_workers": request.num_workers == "auto" or _is_count(request.num_workers, least=0),
        "batch_size": request.batch_size is None or _is_count(request.batch_size, least=1),
        "prefetch_factor": request.prefetch_factor is None
        or _is_count(request.prefetch_factor, least=1),
        "pool": request.pool in ("auto", "process", "thread", "inline", "ray"),
        "start_method": request.start_method in (None, "fork", "forkserver", "spawn"),
        "randomness": request.randomness in ("sample", "worker"),
    }
    for name, is_fine in is_known.items():
        if not is_fine:
            raise BadArgument(
                f"{name}={getattr(request, name)!r} is not valid for a loader",
                remedy=f"penstock.plan(dataset) without {name}",
            )


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and value >= least


def make_plan(machine: Machine, request: LoaderRequest, work: Workload) -> Plan:
    """Make every choice for one loader on one machine.

    Example:
        >>> laptop, request = Machine(os="win32", num_cpus=8), LoaderRequest(num_workers=4)
        >>> print(make_plan(laptop, request, Workload()).start_method)
        spawn (rule: win32 has no safe fork)
    """
    method = choose_start_method(machine, request)
    uses_threads = choose_pool(machine, request, work, 1).value == "thread"
    workers = choose_num_workers(machine, request, work, THREAD if uses_threads else method.value)
    pool = choose_pool(machine, request, work, workers.value)
    if pool.value == "thread" and work.is_iterable and workers.value > 1:
        workers = Choice(1, "threads cannot divide an iterable dataset", "rule")
    if pool.value == "thread" and work.in_flight and workers.value > 1:
        reason = "threads share one dataset, whose connections belong to one event loop"
        workers = Choice(1, reason, "rule")
    if pool.value == "ray":
        method = Choice(None, "Ray starts the workers", "rule")
    elif pool.value != "process":
        method = Choice(None, f"the {pool.value} pool starts no process", "rule")
    plan = Plan(
        pool=pool,
        start_method=method,
        num_workers=workers,
        prefetch_factor=_choose_prefetch(request, pool.value),
        persistent_workers=_choose_persistence(request, pool.value, method.value),
        pin_memory=_choose_pinning(machine, request),
        threads_per_worker=_choose_threads(machine, pool.value, workers.value),
        slot_memory=_count_slots(request, work, pool.value, workers.value),
        randomness=_choose_randomness(request, work),
    )
    return plan._replace(warnings=tuple(_warnings(plan, machine, request, work)))


def choose_pool(
    machine: Machine, request: LoaderRequest, work: Workload, num_workers: int
) -> Choice:
    """Choose processes, threads, or no workers."""
    if request.pool == "inline":
        return Choice("inline", "pool='inline' was given", "asked")
    if num_workers == 0:
        return Choice("inline", "num_workers is 0", "rule")
    if request.pool != "auto":
        return Choice(request.pool, f"pool={request.pool!r} was given", "asked")
    if not machine.can_start_python:
        what = "a frozen application" if machine.is_frozen else "this interpreter"
        return Choice("thread", f"{what} cannot start Python worker processes", "rule")
    if machine.gil_enabled_by is not None:
        return Choice("process", f"{machine.gil_enabled_by} turned the GIL on", "rule")
    if machine.is_gil_enabled:
        return Choice("process", "user code may hold the GIL", "rule")
    reason = _why_processes(request, work)
    if reason is not None:
        return Choice("process", reason, "rule")
    return Choice("thread", "the GIL is off: threads run in parallel, with one dataset", "rule")


def _why_processes(request: LoaderRequest, work: Workload) -> str | None:
    """Return the reason for processes in a Python without the GIL, or None."""
    if request.start_method is not None:
        return f"multiprocessing_context={request.start_method!r} was given"
    if request.has_sample_limit:
        return "sample_timeout_s was given, and a thread cannot be ended"
    if request.has_init_fn:
        return "worker_init_fn sets up each worker, and threads share one dataset"
    if work.is_iterable:
        return "threads cannot divide an iterable dataset"
    if work.in_flight:
        return "each worker process has an event loop of its own for async samples"
    return None


def choose_start_method(machine: Machine, request: LoaderRequest) -> Choice:
    """Choose the given method, else the fork server where available, else spawn."""
    asked = request.start_method
    if asked in ("fork", "spawn"):
        return Choice(asked, f"multiprocessing_context={asked!r} was given", "asked")
    if machine.os == "linux" and not machine.has_proc:
        return Choice(
            "spawn", "without /proc, it is unknown whether a process is safe to fork", "rule"
        )
    if machine.os == "linux":
        reason = "a clean process, a fresh one or an early copy of this one, forks workers quickly"
        source: Source = "asked" if asked == "forkserver" else "rule"
        return Choice("forkserver", reason, source)
    return Choice("spawn", f"{machine.os} has no safe fork", "rule")


def _choose_prefetch(request: LoaderRequest, pool: str) -> Choice:
    if pool == "inline":
        return Choice(0, "nothing is loaded ahead without workers", "rule")
    if request.prefetch_factor is not None:
        return Choice(request.prefetch_factor, "prefetch_factor was given", "asked")
    return Choice(
        AUTO_PREFETCH, "about 20 ms of work per worker, as measured while loading", "rule"
    )


def _choose_persistence(request: LoaderRequest, pool: str, method: str | None) -> Choice:
    if pool == "inline":
        return Choice(False, "there are no workers to keep", "rule")
    if request.persistent_workers is not None:
        how = "persistent_workers was given" if request.persistent_workers else "torch's default"
        return Choice(
            request.persistent_workers, how, "asked" if request.persistent_workers else "rule"
        )
    if pool == "ray":
        return Choice(True, "actors take seconds to start, so they are kept between epochs", "rule")
    if method == "spawn":
        return Choice(True, "spawning takes seconds, so workers are kept between epochs", "rule")
    return Choice(
        False, "new workers start in milliseconds and see changes made since the last epoch", "rule"
    )


def _choose_pinning(machine: Machine, request: LoaderRequest) -> Choice:
    if request.device is not None and request.device.startswith("cuda"):
        reason = f"device={request.device!r}: slots are pinned once, and copies overlap the step"
        return Choice(True, reason, "rule")
    cards = [gpu.name for gpu in machine.gpus if gpu.vendor in ("nvidia", "amd")]
    if not cards and machine.has_gpu_context:
        cards = ["GPU"]  # a GPU is in use, but its name is unknown
    has_card = bool(cards) and machine.torch_build in ("cuda", "hip")
    if request.pin_memory is None:
        if has_card:
            return Choice(True, f"copies to the {cards[0]} are faster from pinned memory", "rule")
        return Choice(False, "there is no GPU to copy to", "rule")
    if request.pin_memory:
        return Choice(True, "pin_memory was given", "asked")
    hint = f"; pin_memory=True makes copies to the {cards[0]} faster" if has_card else ""
    return Choice(False, f"torch's default{hint}", "rule")


def _choose_threads(machine: Machine, pool: str, num_workers: int) -> Choice:
    if pool == "ray":
        return Choice(1, "Ray gives each worker one CPU: one thread each", "rule")
    if pool != "process":
        return Choice(None, "there are no worker processes", "rule")
    reason = (
        f"{count(num_workers, 'worker')} on {count(machine.usable_cores, 'core')}: one thread each"
    )
    return Choice(1, reason, "rule")


def _count_slots(request: LoaderRequest, work: Workload, pool: str, num_workers: int) -> Choice:
    if pool == "inline":
        return Choice(0, "no batch is in flight without workers", "rule")
    if work.sample_bytes is None:
        return Choice(None, "known after the first batch", "rule")
    depth = request.prefetch_factor or 2
    batch_bytes = work.sample_bytes * (request.batch_size or 1)
    total = num_workers * depth * batch_bytes
    reason = f"{count(num_workers, 'worker')} x {depth} batches x {size(batch_bytes)}"
    return Choice(total, reason, "measured")


def _choose_randomness(request: LoaderRequest, work: Workload) -> Choice:
    if request.randomness == "worker":
        return Choice("worker", "randomness='worker' was given", "asked")
    if work.is_iterable:
        reason = "samples of an iterable dataset have no position"
        return Choice("worker", reason, "rule")
    return Choice("sample", "the same bits for any number of workers", "rule")


def _warnings(plan: Plan, machine: Machine, request: LoaderRequest, work: Workload) -> list[str]:
    """Return a line for each given option that causes problems. Its last sentence is the fix."""
    found = []
    free = machine.available_bytes or machine.usable_memory_bytes
    slots = plan.slot_memory.value or 0
    if free and slots > free // 2:
        found.append(
            f"batches in flight need {size(slots)} ({plan.slot_memory.reason}), but only "
            f"{size(free)} of memory is free. Lower prefetch_factor, num_workers or batch_size."
        )
    if plan.start_method.value == "fork" and machine.has_gpu_context:
        found.append(
            "multiprocessing_context='fork' copies a process that holds a GPU context: workers "
            "that use it hang or crash. Omit multiprocessing_context."
        )
    if request.has_sample_limit and plan.pool.value == "inline" and not work.in_flight:
        found.append(
            "sample_timeout_s has no effect, because samples are loaded in this process. "
            "Use num_workers=1 or more."
        )
    is_heavy = machine.os == "win32" and machine.torch_build == "cuda"
    if is_heavy and plan.num_workers.source == "asked" and plan.pool.value == "process":
        most = memory_ceiling(machine, request, Workload(), "spawn")
        if most is not None and most.num_workers < plan.num_workers.value:
            found.append(
                f"num_workers={plan.num_workers.value}: {most.reason}, so Windows may refuse to "
                f"start them (WinError 1455). Use num_workers={most.num_workers}."
            )
    return found
