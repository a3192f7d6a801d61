"""Error messages and log lines for workers that died, hung or are late."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.engine.parent.restart_decision import (
    NO_PROGRESS,
    Place,
    RestartDecision,
    RestartPolicy,
)
from penstock.errors import (
    PenstockError,
    SampleTimeout,
    StartFailed,
    Stuck,
    WorkerDied,
    WorkerTimeout,
)
from penstock.named_tuple import NamedTuple

_CAUSES = {
    "SIGKILL": "another process killed it. The kernel reported no out-of-memory kill (not every "
    "system reports them).",
    "SIGSEGV": "native code (a decoder, an extension) crashed on this sample.",
    "SIGBUS": "a memory-mapped file was truncated or rewritten while it was read, or the disk is "
    "full.",
    "SIGABRT": "native code aborted (a failed assertion or a double free).",
}


class WorkerFault(NamedTuple):
    """Facts about a lost worker.

    Args:
        how: "died"; "hung" (a sample took longer than allowed); or "silent" (it has work but does
            not start it).
        index: The sample that it was loading, a list of samples, or None.
        position: The position of that sample in the epoch.
        place: What it was working on, for
            :class:`penstock.engine.parent.restart_decision.RestartPolicy`.
        is_crash: True if its exit code shows that its own code ended it.
        is_outside: True if no sample explains the loss.
        is_stopped: True if it was stopped by a signal when its status was read.
        stack: Its stack, if it was alive.
        oom: The kernel's count of out-of-memory kills as text. Empty if there were none.
        peak_kb: Peak memory of each worker, as far as known.
    """

    worker: int
    pid: int | str | None
    how: str = "died"
    exit_code: int | None = None
    is_orphaned: bool = False
    index: Any = None
    position: int | None = None
    place: Place | None = None
    is_crash: bool = False
    is_outside: bool = False
    is_stopped: bool = False
    seconds: float = 0.0
    stack: str = ""
    oom: str = ""
    peak_kb: Mapping[int, int] = MappingProxyType({})


def describe_crash(
    fault: WorkerFault,
    decision: RestartDecision = RestartDecision.RETRY,
    policy: RestartPolicy | None = None,
) -> PenstockError:
    """Return the error for a lost worker. Its text is logged if the worker is replaced."""
    sample, remedy = "", "DataLoader(..., num_workers=0), to see the error where it happens"
    if isinstance(fault.index, list):
        sample = f" while loading one of the samples {fault.index!r}"
        remedy = f"dataset.__getitems__({fault.index!r}) in this process, to reproduce the fault"
    elif fault.index is not None:
        sample = f" while loading sample {fault.index!r}"
        remedy = f"dataset[{fault.index!r}] in this process, to reproduce the fault"
    elif fault.place is not None and fault.place.kind == "batch":
        sample = f" while running collate_fn for batch {fault.place.lease[1]} or sending it"
    elif fault.how == "hung" and fault.place is None:
        sample = " during startup (unpickling the dataset, or worker_init_fn)"
    end = _describe_decision(decision, policy)
    if decision is RestartDecision.POISON and fault.index is not None:
        remedy += '; or DataLoader(..., on_error="skip") to skip samples like this'
    facts: dict[str, Any] = {
        "worker": fault.worker,
        "pid": fault.pid,
        "sample_index": fault.index,
        "num_restarts": policy.num_restarts if policy is not None else 0,
    }
    if fault.how != "died":
        return _describe_hang(fault, sample, end, remedy, facts)
    how, cause = _how_it_ended(fault.exit_code)
    if fault.oom and fault.exit_code == -9:
        cause = f"{fault.oom}. {_memory(fault)}"
        remedy = "DataLoader(...) with fewer workers, or a smaller batch or prefetch_factor"
    return WorkerDied(
        f"DataLoader worker (pid {fault.pid}) {how}{sample} (worker {fault.worker}){end}",
        likely=cause,
        remedy=remedy,
        exit_code=fault.exit_code,
        **facts,
    )


def _memory(fault: WorkerFault) -> str:
    """Describe each worker's memory as of its last batch. Growth after that is not included."""
    known = {worker: peak for worker, peak in fault.peak_kb.items() if peak > 0}
    if not known:
        return "No worker had delivered a batch yet."
    each = ", ".join(f"worker {worker} {peak / 1048576:.2f} GiB" for worker, peak in known.items())
    return f"Peak memory as of each worker's last batch: {each}."


def _describe_decision(decision: RestartDecision, policy: RestartPolicy | None) -> str:
    return {
        RestartDecision.RETRY: "; a new worker replaces it" if policy is not None else "",
        RestartDecision.ISOLATE: "; a new worker replaces it and retries in isolation",
        RestartDecision.POISON: _losses_there(policy),
        RestartDecision.HELPLESS: "; a thread cannot be terminated",
        RestartDecision.HOPELESS: "; the workers before it also failed during startup",
        RestartDecision.LIMIT: _limit(policy),
        RestartDecision.NO_PROGRESS: f"; {NO_PROGRESS} workers in its place were lost in a row "
        "without loading anything",
    }[decision]


def _losses_there(policy: RestartPolicy | None) -> str:
    if policy is None:
        return ""
    alone = f", {policy.num_alone} of them in isolation" if policy.num_alone else ""
    return f"; {policy.num_there} workers were lost at this point{alone}"


def _limit(policy: RestartPolicy | None) -> str:
    if policy is None or not policy.max_restarts:
        return ""
    return (
        f"; {policy.max_restarts} workers were replaced within {policy.window_s:.0f} s, "
        f"which is the limit (max_restarts={policy.max_restarts})"
    )


def describe_server_losses(
    error: StartFailed, decision: RestartDecision, policy: RestartPolicy
) -> StartFailed:
    """Return the error for fork servers that were killed in a row. ``error`` is the last one's."""
    end = _limit(policy)
    if decision is RestartDecision.NO_PROGRESS:
        end = f"; {NO_PROGRESS} fork servers in a row were killed before they started a worker"
    return StartFailed(f"{error.what}{end}", likely=error.likely, remedy=error.remedy)


def signal_name(exit_code: int) -> str:
    """Return the name of the signal that ended a process."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _how_it_ended(exit_code: int | None) -> tuple[str, str | None]:
    """Describe an exit in PyTorch's wording, which people and programs search for."""
    if exit_code is not None and exit_code < 0:
        name = signal_name(exit_code)
        return f"is killed by signal: {name}", _CAUSES.get(name)
    if exit_code is None:
        return "exited for an unknown reason", "the fork server, which reports it, is unresponsive."
    how = f"exited unexpectedly with exit code {exit_code}"
    return how, "user code called os._exit or sys.exit, or the interpreter itself exited."


def _describe_hang(
    fault: WorkerFault, sample: str, end: str, remedy: str, facts: dict[str, Any]
) -> SampleTimeout:
    what = "has made no progress" if fault.how == "hung" else "has not started its work"
    return SampleTimeout(
        f"DataLoader worker (pid {fault.pid}) {what} for {fault.seconds:.1f} s{sample} "
        f"(worker {fault.worker}){end}\n{fault.stack}",
        remedy=remedy,
        seconds=fault.seconds,
        stack=fault.stack,
        **facts,
    )


def describe_timeout(
    timeout_s: float, batch: int, busy: dict[int, tuple[Any, str]]
) -> WorkerTimeout:
    """Return the error for a late batch. ``busy`` maps each worker to its sample and stack."""
    places = [
        f"worker {worker} is loading "
        f"{'no sample' if index is None else f'sample {index!r}'}\n{stack}"
        for worker, (index, stack) in busy.items()
    ]
    return WorkerTimeout(
        f"DataLoader timed out after {timeout_s} seconds; batch {batch} has not arrived",
        where="\n  ".join(places) or None,
        remedy=f"DataLoader(..., timeout={timeout_s * 10:g}), or find out why the workers are slow "
        "(see the stacks above)",
        samples={worker: index for worker, (index, _) in busy.items()},
    )


def describe_stuck(what: str, seconds: float, stacks: str) -> Stuck:
    """Return the error for a wait of the engine that would never end."""
    return Stuck(
        f"no progress for {seconds:.0f} s: {what}. Worker stacks:\n{stacks}",
        likely="a bug in Penstock, or workers that were stopped (SIGSTOP, a debugger, a frozen "
        "control group).",
        remedy="report this text; DataLoader(..., num_workers=0) continues without workers",
        stacks=stacks,
    )
