"""The settings that ``penstock.verify`` compares: workers, pools, start methods, delays, kills."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.planning.quantities import count


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the loader.

    Args:
        arguments: The arguments of the factory.
        delays: ``"samples"`` or ``"consumer"``: adds random delays there.
        resumed_with: The arguments of the factory after the run is killed in the middle and
            resumed. None: the run is not interrupted.
        is_fresh: True to run in a new process, with a different hash seed.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    delays: str | None = None
    resumed_with: Mapping[str, Any] | None = None
    is_fresh: bool = False

    @property
    def needed(self) -> set[str]:
        """The arguments that the factory must accept."""
        return {*self.arguments, *(self.resumed_with or ())}


def list_settings(
    workers: Sequence[int], *, takes_workers: bool, start_methods: Sequence[str] | None = None
) -> list[Setting]:
    """Return all settings. The others are compared with the first.

    Args:
        workers: Numbers of workers. The first is the reference.
        takes_workers: False if the factory does not accept ``num_workers``. Only the loader as
            given is run then.
        start_methods: None: all that are available.
    """
    if not takes_workers:
        first, busy, after = Setting(name="as given"), Setting(name="as given"), {}
        others, later = [], ""
    else:
        first, busy = (_with(number) for number in (workers[0], workers[0] or 2))
        others = [_with(number) for number in workers[1:]]
        others += _settings_of_workers(busy, start_methods)
        num_after = busy.arguments["num_workers"] + 1
        after, later = {"num_workers": num_after}, f" with {num_after}"
    return [
        first,
        replace(first, name=f"{first.name}, again"),
        *others,
        replace(busy, name=f"{busy.name}, slow consumer", delays="consumer"),
        replace(busy, name=f"{busy.name}, killed and resumed{later}", resumed_with=after),
        replace(first, name=f"{first.name}, new process", is_fresh=True),
    ]


def _settings_of_workers(busy: Setting, start_methods: Sequence[str] | None) -> list[Setting]:
    """Return the settings that change workers, with the same number of them as ``busy``."""
    methods = _start_methods() if start_methods is None else start_methods
    changes: dict[str, dict[str, Any]] = {
        "threads": {"pool": "thread"},
        **{method: {"multiprocessing_context": method} for method in methods},
        **{f"prefetch {depth}": {"prefetch_factor": depth} for depth in (1, 8)},
    }
    settings = [
        replace(busy, name=f"{busy.name}, {change}", arguments={**busy.arguments, **more})
        for change, more in changes.items()
    ]
    return [*settings, replace(busy, name=f"{busy.name}, slow samples", delays="samples")]


def _with(number: int) -> Setting:
    return Setting(name=count(number, "worker"), arguments={"num_workers": number})


def _start_methods() -> list[str]:
    """Return the start methods. Excludes fork if a GPU is in use, because the child may hang."""
    known = [name for name in multiprocessing.get_all_start_methods() if name != "forkserver"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        known = [name for name in known if name != "fork"]
    return known


def reason_not_to_spawn(loader: Any) -> str:
    """Return why spawned workers would run the user's script again, including its training.

    Empty if they would not. Penstock's workers never do. torch's do, and rely on a guard in the
    script.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or type(loader).__module__.startswith("penstock."):
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as script:
            is_guarded = "__main__" in script.read()
    except OSError:
        return ""  # there is no script to run
    return "" if is_guarded else f"each worker would run {path} again, which has no main guard"
