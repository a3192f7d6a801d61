"""Chooses the number of workers with a model of one epoch, with and without workers.

Without workers, a batch and the training step that uses it run one after the other. With ``n``
workers, one round of batch and step takes

    max(PARENT_S, (wall + HANDOVER_S) / n, step, (computing of both + HANDOVER_S) / cores)

seconds. The terms are the parent, which receives the batch; the workers, which leave their cores to
others while they wait for a disk; the step, which runs at the same time; and all computing, which
shares the cores. The smallest ``n`` with nearly the best epoch time, including the start of the
workers, is chosen, if an epoch saves several times the cost of starting them.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.quantities import count, duration, size

PARENT_S = 120e-6
HANDOVER_S = 250e-6
"""Time of the parent for one batch, and the combined overhead of parent and worker for one batch.
Estimated from the rates of tiny batches (3,000 to 5,000 a second, 2 workers), not measured
separately."""
THREAD = "thread"
"""Stands for a start method where workers are threads."""
START_S = {"forkserver": 0.06, "fork": 0.06, "spawn": 3.0, THREAD: 0.001}
"""Time to start one worker per core. More workers than cores take longer. Until 2, 8 and 16 workers
had each delivered a batch, a warm fork server took 0.05, 0.2 and 0.26 s, and spawning took 1.8, 7
and 14 s (2 cores, load 4)."""
WORTH_STARTS = 3
"""Workers must save this many times the cost of starting them."""
SLACK = 1.25
WORTH_SHARE = 0.9
"""Workers must shorten a round at least to this fraction, because the model is not more precise."""
NEAR_BEST = 1.05
GPU_BOUND_SHARE = 0.05
"""If loading takes less than this fraction of a step, no worker is used."""
FIRST_MOST, GROWTH, MOST = 64, 4, 512
"""Most workers at first, as a multiple of those whose times were measured, and ever."""
WORKER_BYTES = {"forkserver": 48 << 20, "fork": 48 << 20, "spawn": 300 << 20, THREAD: 1 << 20}
"""Private memory of a worker. Idle workers measured 10 and 146 MiB. The rest is a margin for the
user's libraries."""
WINDOWS_CUDA_WORKER_BYTES = 2560 << 20
"""On Windows each process that imports a CUDA torch commits its libraries (pytorch #59904).
The amount is an estimate, not measured on Windows."""


class Ceiling(NamedTuple):
    """The maximum number of workers for this machine, and the reason."""

    num_workers: int
    reason: str


def choose_num_workers(
    machine: Machine, request: LoaderRequest, work: Workload, method: str
) -> Choice:
    """Choose the number of workers.

    Args:
        method: The start method: ``"forkserver"``, ``"spawn"`` or ``"fork"``; or :data:`THREAD`.

    Example:
        >>> laptop = Machine(os="linux", num_cpus=4, available_bytes=8 << 30)
        >>> jpeg = Workload(sample_s=0.01, busy_share=1.0, num_samples=50_000)
        >>> request = LoaderRequest(batch_size=64)
        >>> choice = choose_num_workers(laptop, request, jpeg, "forkserver")
        >>> print(choice.value, choice.reason, sep=": ")
        4: a batch takes 640 ms without workers; about 160 ms per batch with 4 workers on 4 cores
    """
    settled = _settled(machine, request, work, method)
    if settled is not None:
        return settled
    if work.sample_s is None:
        ceiling = _ceiling(machine, request, work, method)
        return Choice(
            ceiling.num_workers,
            f"at most: {ceiling.reason}. The first batches show how many help",
            "rule",
        )
    return _measured(machine, request, work, method)


def should_measure(machine: Machine, request: LoaderRequest, work: Workload, method: str) -> bool:
    """Return True if the first batches are loaded in this process, to measure them.

    Also if earlier batches needed no workers, because samples or the step can change.

    Example:
        >>> linux, two = Machine(os="linux"), LoaderRequest(num_workers=2)
        >>> should_measure(linux, LoaderRequest(), Workload(), "forkserver")
        True
        >>> should_measure(linux, two, Workload(), "forkserver")
        False
    """
    if _settled(machine, request, work, method) is not None:
        return False
    return work.sample_s is None or not _measured(machine, request, work, method).value


def _settled(
    machine: Machine, request: LoaderRequest, work: Workload, method: str
) -> Choice | None:
    """Return the choice if no measurement can change it, else None."""
    if request.num_workers != "auto":
        return Choice(request.num_workers, "num_workers was given", "asked")
    if request.pool == "inline":
        return Choice(0, "pool='inline' was given", "rule")
    if work.is_iterable:
        reason = "each worker would read the whole iterable dataset, so one worker loads ahead"
        return Choice(1, reason, "rule")
    if work.is_in_memory:
        return Choice(
            0, "tensors in memory are sliced at memory speed; workers only add overhead", "rule"
        )
    if request.pool == "ray":
        num_cpus = machine.ray_cpus or machine.usable_cores
        where = "the Ray cluster" if machine.ray_cpus else "this machine; Ray is not connected yet"
        return Choice(num_cpus, f"one worker per CPU of {where}", "rule")
    if work.stays_because is not None:
        return Choice(0, f"the dataset stays in this process: {work.stays_because}", "rule")
    ceiling = _ceiling(machine, request, work, method)
    if request.has_init_fn:
        reason = f"{ceiling.reason}; worker_init_fn sets up workers, so no sample is timed here"
        return Choice(ceiling.num_workers, reason, "rule")
    if request.pool == "thread" or not machine.can_start_python:
        return Choice(ceiling.num_workers, ceiling.reason, "rule")
    return None


def _measured(machine: Machine, request: LoaderRequest, work: Workload, method: str) -> Choice:
    batch_size, least = request.batch_size or 1, 1 if request.pool == "process" else 0
    if work.num_samples:
        batch_size = min(batch_size, work.num_samples)
    wall_s, step_s = (work.sample_s or 0.0) * batch_size, work.step_s or 0.0
    shown = f"a batch takes {duration(wall_s)} without workers"
    if wall_s < GPU_BOUND_SHARE * step_s:
        reason = f"{shown}, {wall_s / step_s:.0%} of a step: the bottleneck is the step"
        return Choice(least, reason, "measured")
    most = _ceiling(machine, request, work, method).num_workers
    if work.tuned is not None:
        num_workers, why = work.tuned
        fitting = min(num_workers, most_workers(machine, request, work, method).num_workers)
        return Choice(fitting, f"{shown}{_waits(work)}; {why}", "measured")
    rounds = {n: _round_s(n, machine, work, batch_size) for n in range(1, most + 1)}
    epochs = rounds  # if the epoch's length is unknown, compare rounds
    if work.num_samples is not None:
        num_rounds = work.num_samples / batch_size
        epochs = {n: num_rounds * rounds[n] + _start_s(n, machine, method) for n in rounds}
    chosen = min(n for n in epochs if epochs[n] <= NEAR_BEST * min(epochs.values()))
    inline_s, pooled_s = wall_s + step_s, rounds[chosen]
    with_step = f" and the step takes {duration(step_s)}" if step_s > 0.01 * wall_s else ""
    if pooled_s > WORTH_SHARE * inline_s:
        reason = f"{shown}{with_step}; with workers, about {duration(pooled_s)} per batch"
        return Choice(least, reason, "measured")
    if work.num_samples is not None:
        saved_s = num_rounds * (inline_s - pooled_s)
        start_s = _start_s(chosen, machine, method)
        if saved_s < WORTH_STARTS * start_s:
            reason = (
                f"{shown}{with_step}; workers would save {duration(saved_s)} per epoch, "
                f"but starting them takes {duration(start_s)}"
            )
            return Choice(least, reason, "measured")
    reason = (
        f"{shown}{with_step}; about {duration(pooled_s)} per batch with {count(chosen, 'worker')}"
        f" on {count(machine.usable_cores, 'core')}{_waits(work)}"
    )
    return Choice(chosen, reason, "measured")


def _round_s(num_workers: int, machine: Machine, work: Workload, batch_size: int) -> float:
    """Return the time of one batch and one step, with workers."""
    wall_s = (work.sample_s or 0.0) * batch_size
    busy_s = wall_s * (1.0 if work.busy_share is None else work.busy_share)
    computed_s = (busy_s + work.step_busy_s + HANDOVER_S) / machine.usable_cores
    if work.in_flight:  # timed with one batch in flight; a worker has more
        wall_s = max(busy_s, wall_s * min(1.0, batch_size / work.in_flight))
    loaded_s, step_s = (wall_s + HANDOVER_S) / num_workers, work.step_s or 0.0
    if loaded_s <= step_s:
        loaded_s *= SLACK  # batch times vary, and a late batch delays the step
    return max(PARENT_S, loaded_s, step_s, computed_s)


def _start_s(num_workers: int, machine: Machine, method: str) -> float:
    return START_S[method] * max(1.0, num_workers / machine.usable_cores)


def _waits(work: Workload) -> str:
    if work.in_flight:
        return f"; each has about {work.in_flight} async samples in flight"
    if work.busy_share is None or work.busy_share > 0.8:
        return ""
    shown = f"{1 - work.busy_share:.0%}"
    return f"; samples wait {shown} of the time, so workers can outnumber cores"


def _ceiling(machine: Machine, request: LoaderRequest, work: Workload, method: str) -> Ceiling:
    cores, ranks = machine.usable_cores, machine.num_local_ranks
    most = Ceiling(num_workers=cores, reason=f"one worker per core, {count(cores, 'usable core')}")
    if ranks > 1:
        reason = f"{count(cores, 'usable core')} shared by {ranks} ranks on this machine"
        most = Ceiling(num_workers=max(1, cores // ranks), reason=reason)
    if not work.in_flight and work.busy_share is not None and work.busy_share < 0.8:
        share = max(work.busy_share, 0.01)
        waiting = max(most.num_workers, int(most.num_workers / share))
        most = Ceiling(num_workers=waiting, reason="samples spend much of their time waiting")
    first = max(FIRST_MOST, GROWTH * work.num_running)
    first_most = Ceiling(num_workers=first, reason=f"not more than {first} workers at first")
    return _lowest(most, first_most, most_workers(machine, request, work, method))


def most_workers(machine: Machine, request: LoaderRequest, work: Workload, method: str) -> Ceiling:
    """Return the maximum for this machine, even for workers that mostly wait.

    Example:
        >>> linux = Machine(os="linux", num_cpus=2, max_fds=256)
        >>> most_workers(linux, LoaderRequest(), Workload(), "forkserver").num_workers
        48
    """
    most = Ceiling(num_workers=MOST, reason=f"more than {MOST} workers are never started")
    return _lowest(most, memory_ceiling(machine, request, work, method), _file_ceiling(machine))


def _lowest(*ceilings: Ceiling | None) -> Ceiling:
    known = [ceiling for ceiling in ceilings if ceiling is not None]
    return min(known, key=lambda ceiling: ceiling.num_workers)


def memory_ceiling(
    machine: Machine, request: LoaderRequest, work: Workload, method: str
) -> Ceiling | None:
    """Return the number of workers that fit in half of the free memory. None if unknown."""
    available = min(
        machine.available_bytes or machine.usable_memory_bytes,
        machine.usable_memory_bytes or machine.available_bytes,
    )
    if not available:
        return None
    each = WORKER_BYTES[method]
    why = f"each worker needs {size(each)}"
    if machine.os == "win32" and machine.torch_build == "cuda" and method != THREAD:
        each = WINDOWS_CUDA_WORKER_BYTES
        why = f"each worker commits about {size(each)} for CUDA's libraries on Windows"
    if work.sample_bytes is not None:
        each += 2 * work.sample_bytes * (request.batch_size or 1)
        why += ", plus its batches"
    most = max(1, available // 2 // each)
    return Ceiling(num_workers=most, reason=f"{size(available)} of memory is free, and {why}")


def _file_ceiling(machine: Machine) -> Ceiling | None:
    if machine.max_fds is None:
        return None
    most = max(1, (machine.max_fds - 64) // 4)
    return Ceiling(num_workers=most, reason=f"only {machine.max_fds} files can be open (ulimit -n)")
