"""Adjusts loader arguments of third-party code, if they would hang or crash on this machine.

:class:`penstock.DataLoader` follows its arguments and only warns. Third-party code was written for
other machines and cannot react to a warning, so patched loaders use this module.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.machine.facts import Machine
from penstock.planning.decisions import choose_start_method
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.quantities import count
from penstock.planning.worker_count import FIRST_MOST, Ceiling, most_workers

USUAL_REQUESTS = (0, 1, 2, 4, 8)
"""Numbers of workers that scripts commonly request."""
PER_CORE = 8
"""More are not needed, unless samples wait for a server."""


def make_safe(machine: Machine, request: LoaderRequest) -> tuple[LoaderRequest, list[str]]:
    """Return a request that is safe on this machine, and one line for each change.

    Example:
        >>> box = Machine(os="linux", num_cpus=2, has_gpu_context=True)
        >>> safe, lines = make_safe(box, LoaderRequest(num_workers=2, start_method="fork"))
        >>> safe.start_method, len(lines)
        (None, 1)
    """
    lines = []
    if request.start_method == "fork" and machine.has_gpu_context:
        request = request._replace(start_method=None)
        lines.append(
            "multiprocessing_context='fork' with a GPU context in this process hangs or crashes: "
            "workers are started from a clean process instead"
        )
    most = most_workers(machine, request, Workload(), choose_start_method(machine, request).value)
    usual = max(FIRST_MOST, PER_CORE * machine.usable_cores)
    if usual < most.num_workers:
        reason = (
            f"more than {usual} workers compete for {count(machine.usable_cores, 'usable core')}"
        )
        most = Ceiling(num_workers=usual, reason=reason)
    if isinstance(request.num_workers, int) and request.num_workers > most.num_workers:
        lines.append(f"num_workers={request.num_workers} becomes {most.num_workers}: {most.reason}")
        request = request._replace(num_workers=most.num_workers)
    return request, lines


def choose_safe_workers(machine: Machine, num_workers: int) -> Choice:
    """Return ``num_workers``, or the maximum for this machine if that is lower.

    Example:
        >>> laptop = Machine(os="win32", num_cpus=8, torch_build="cuda", available_bytes=8 << 30)
        >>> print(choose_safe_workers(laptop, 1).value, choose_safe_workers(laptop, 4).value)
        1 1
    """
    safe, lines = make_safe(machine, LoaderRequest(num_workers=num_workers))
    if lines:
        return Choice(safe.num_workers, lines[0].partition(": ")[2], "rule")
    return Choice(num_workers, "as requested", "asked")


def tabulate_safe_workers(
    machine: Machine, requested: Iterable[int] = USUAL_REQUESTS
) -> dict[int, Choice]:
    """Map each requested number of workers to the number that is safe on this machine.

    Example:
        >>> table = tabulate_safe_workers(Machine(os="linux", num_cpus=8, max_fds=80))
        >>> [(asked, safe.value) for asked, safe in table.items()]
        [(0, 0), (1, 1), (2, 2), (4, 4), (8, 4)]
        >>> table[8].reason
        'only 80 files can be open (ulimit -n)'
    """
    return {number: choose_safe_workers(machine, number) for number in requested}
