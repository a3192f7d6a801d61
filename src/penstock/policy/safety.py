"""What would hang or crash here, of what other people's code asks for? Changed, with the reason.

The user of :class:`penstock.DataLoader` is obeyed and warned. Code that was written for another
machine cannot read a warning, so for it these are changed.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.machine.facts import Machine
from penstock.policy.given import Wish, Work
from penstock.policy.rules import choose_start_method
from penstock.policy.workers import most_workers


def make_safe(machine: Machine, wish: Wish) -> tuple[Wish, list[str]]:
    """The wish as it can be granted here, and one line for each change.

    Example:
        >>> box = Machine(os="linux", num_cpus=2, has_gpu_context=True)
        >>> safe, lines = make_safe(box, Wish(num_workers=2, start_method="fork"))
        >>> safe.start_method, len(lines)
        (None, 1)
    """
    lines = []
    if wish.start_method == "fork" and machine.has_gpu_context:
        wish = replace(wish, start_method=None)
        lines.append(
            "multiprocessing_context='fork' with a GPU context in this process hangs or crashes: "
            "workers come from a clean process instead"
        )
    most = most_workers(machine, wish, Work(), choose_start_method(machine, wish).value)
    if isinstance(wish.num_workers, int) and wish.num_workers > most.num_workers:
        lines.append(f"num_workers={wish.num_workers} becomes {most.num_workers}: {most.reason}")
        wish = replace(wish, num_workers=most.num_workers)
    return wish, lines
