"""Errors and log lines about a worker that died, hangs or is late."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
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

_CAUSES = {
    "SIGKILL": "something killed it from outside; the kernel has counted no kill for want of "
    "memory (or does not count them here).",
    "SIGSEGV": "native code (a decoder, an extension) crashed on this sample.",
    "SIGBUS": "memory behind a mapped file went away: a full disk, or a truncated file.",
    "SIGABRT": "native code gave up (an assertion or a double free).",
}


@dataclass(frozen=True, kw_only=True)
class WorkerFault:
    """What is known about a worker that was lost.

    Args:
        how: "died"; "hung": a sample took longer than allowed; "silent": it does not take its work.
        index: The sample that it was loading, a list of them, or None.
        position: Where that stands in the epoch.
        place: What it was at, as :class:`penstock.engine.parent.restart_decision.RestartPolicy`
            counts it.
        is_crash: Its own code ended it, as its exit code shows.
        is_outside: No sample explains the loss.
        is_stopped: It was stopped by a signal when it was looked at.
        stack: Where it stood, if it was alive.
        oom: What the kernel's own count says about kills for want of memory; empty: none.
        peak_kb: The most memory each worker has held, as far as known.
    """

    worker: int
    pid: int | None
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
    peak_kb: dict[int, int] = field(default_factory=dict)


def describe_crash(
    fault: WorkerFault,
    decision: RestartDecision = RestartDecision.RETRY,
    policy: RestartPolicy | None = None,
) -> PenstockError:
    """The error for a lost worker, or what is logged when it is replaced."""
    sample, remedy = "", "DataLoader(..., num_workers=0), to see the error where it happens"
    if isinstance(fault.index, list):
        sample = f" while loading one of the samples {fault.index!r}"
        remedy = f"dataset.__getitems__({fault.index!r}) alone, in this process"
    elif fault.index is not None:
        sample = f" while loading sample {fault.index!r}"
        remedy = f"dataset[{fault.index!r}] alone, in this process"
    elif fault.place is not None and fault.place.kind == "batch":
        sample = f" while putting batch {fault.place.lease[1]} together (collate_fn, or sending it)"
    elif fault.how == "hung" and fault.place is None:
        sample = " while it got ready (unpacking the dataset, or worker_init_fn)"
    end = _describe_decision(decision, policy)
    if decision is RestartDecision.POISON and fault.index is not None:
        remedy += '; DataLoader(..., on_error="skip") leaves such samples out'
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
    """Who held how much: as of each worker's last batch, so the last one's own growth is not in."""
    known = {worker: peak for worker, peak in fault.peak_kb.items() if peak > 0}
    if not known:
        return "No worker had delivered anything yet."
    each = ", ".join(f"worker {worker} {peak / 1048576:.2f} GiB" for worker, peak in known.items())
    return f"The most that each held up to its last batch: {each}."


def _describe_decision(decision: RestartDecision, policy: RestartPolicy | None) -> str:
    return {
        RestartDecision.RETRY: "; another takes its place" if policy is not None else "",
        RestartDecision.ISOLATE: "; another takes its place, and loads it alone",
        RestartDecision.POISON: _losses_there(policy),
        RestartDecision.HELPLESS: "; a thread cannot be ended from outside",
        RestartDecision.HOPELESS: "; like those before it, it was not ready yet",
        RestartDecision.LIMIT: _limit(policy),
        RestartDecision.NO_PROGRESS: f"; {NO_PROGRESS} were lost in its place, one after the "
        "other, and nothing was loaded in between",
    }[decision]


def _losses_there(policy: RestartPolicy | None) -> str:
    if policy is None:
        return ""
    alone = f", {policy.num_alone} of them while it was loaded alone" if policy.num_alone else ""
    return f"; {policy.num_there} workers were lost there{alone}"


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
    """The error for fork servers that were killed in a row; ``error``: the last one's."""
    end = _limit(policy)
    if decision is RestartDecision.NO_PROGRESS:
        end = f"; {NO_PROGRESS} in a row were, before they had started a worker"
    return StartFailed(f"{error.what}{end}", likely=error.likely, remedy=error.remedy)


def signal_name(exit_code: int) -> str:
    """The name of the signal that ended a process."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _how_it_ended(exit_code: int | None) -> tuple[str, str | None]:
    """The wording is PyTorch's, which people and programs look for."""
    if exit_code is not None and exit_code < 0:
        name = signal_name(exit_code)
        return f"is killed by signal: {name}", _CAUSES.get(name)
    if exit_code is None:
        return "is gone; how is not known", "the fork server, which would know, does not answer."
    how = f"exited unexpectedly with exit code {exit_code}"
    return how, "user code called os._exit or sys.exit, or the interpreter itself stopped."


def _describe_hang(
    fault: WorkerFault, sample: str, end: str, remedy: str, facts: dict[str, Any]
) -> SampleTimeout:
    what = "has stood still" if fault.how == "hung" else "has not taken its work"
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
    """The error for a batch that is late; ``busy``: each worker's sample, and where it stands."""
    places = [
        f"worker {worker} is at {'no sample' if index is None else f'sample {index!r}'}\n{stack}"
        for worker, (index, stack) in busy.items()
    ]
    return WorkerTimeout(
        f"DataLoader timed out after {timeout_s} seconds; batch {batch} is not here",
        where="\n  ".join(places) or None,
        remedy=f"DataLoader(..., timeout={timeout_s * 10:g}), or find out what keeps the workers "
        "there",
        samples={worker: index for worker, (index, _) in busy.items()},
    )


def describe_stuck(what: str, seconds: float, stacks: str) -> Stuck:
    """The error for a wait of our own that has no end."""
    return Stuck(
        f"nothing has happened for {seconds:.0f} s: {what}. Where everybody stands:\n{stacks}",
        likely="a fault of Penstock's own, or workers that were stopped from outside (SIGSTOP, a "
        "debugger, a frozen control group).",
        remedy="report this text; DataLoader(..., num_workers=0) goes on without workers",
        stacks=stacks,
    )
