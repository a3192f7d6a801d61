"""Under which settings is a loader run, and which of them does its factory take?"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import BadArgument

Factory = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the loader.

    Args:
        arguments: What the factory is called with.
        delays: ``"samples"`` or ``"consumer"``: waits at random.
        resumed_with: Killed in the middle; what the factory is called with to go on. None: not.
        is_fresh: In a new process, with another hash seed.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    delays: str | None = None
    resumed_with: Mapping[str, Any] | None = None
    is_fresh: bool = False

    @property
    def needed(self) -> set[str]:
        """The arguments that the factory must take."""
        return {*self.arguments, *(self.resumed_with or ())}


def list_settings(
    workers: Sequence[int], *, takes_workers: bool, start_methods: Sequence[str] | None = None
) -> list[Setting]:
    """All settings; the first is what the others are compared with.

    Args:
        workers: Numbers of workers, of which the first is the reference.
        takes_workers: False: the factory makes the loader as it is, and only that is run.
        start_methods: None: all that there are.
    """
    first: dict[str, Any] = {"num_workers": workers[0]} if takes_workers else {}
    name = _count(workers[0]) if takes_workers else "as it is"
    settings = [
        Setting(name=name, arguments=first),
        Setting(name=f"{name}, again", arguments=first),
    ]
    some = {"num_workers": max(2, workers[0])}
    if takes_workers:
        settings += [
            Setting(name=_count(number), arguments={"num_workers": number})
            for number in workers[1:]
        ]
        settings.append(Setting(name="2 threads", arguments={"num_workers": 2, "pool": "thread"}))
        for method in _start_methods() if start_methods is None else start_methods:
            more = {"multiprocessing_context": method}
            settings.append(Setting(name=f"2 workers, {method}", arguments={**some, **more}))
        for depth in (1, 8):
            more_depth = {"prefetch_factor": depth}
            settings.append(
                Setting(name=f"2 workers, prefetch {depth}", arguments={**some, **more_depth})
            )
        settings.append(Setting(name="2 workers, slow samples", arguments=some, delays="samples"))
    busy, after = (some, {"num_workers": 3}) if takes_workers else ({}, {})
    label, later = ("2 workers", " with 3") if takes_workers else ("as it is", "")
    return [
        *settings,
        Setting(name=f"{label}, slow consumer", arguments=busy, delays="consumer"),
        Setting(name=f"{label}, killed and resumed{later}", arguments=busy, resumed_with=after),
        Setting(name=f"{name}, new process", arguments=first, is_fresh=True),
    ]


def _count(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _start_methods() -> list[str]:
    """Fork is left out where a GPU is in use: a forked child cannot use it, and may hang."""
    known = [name for name in multiprocessing.get_all_start_methods() if name != "forkserver"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        known = [name for name in known if name != "fork"]
    return known


def reason_not_to_spawn(loader: Any) -> str:
    """Would a spawned worker run the user's script once more, with whatever it trains?

    Penstock's own workers never do; torch's do, and rely on a guard in the script.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or type(loader).__module__.startswith("penstock."):
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as script:
            is_guarded = "__main__" in script.read()
    except OSError:
        return ""  # nothing that could be run
    return "" if is_guarded else f"each worker would run {path} again: it has no main guard"


def taken_by(factory: Factory) -> Callable[[str], bool]:
    """Which keyword arguments does the factory take? Everything, if it has ``**settings``.

    Raises:
        BadArgument: It is no function, or needs something that nobody gives it.
    """
    if not callable(factory):
        raise BadArgument(
            f"make_loader is a {type(factory).__name__}: it must be a function that makes a loader",
            remedy="penstock.verify(lambda **settings: DataLoader(dataset, **settings))",
        )
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return lambda name: False
    kinds = inspect.Parameter
    by_name = {
        name
        for name, item in parameters.items()
        if item.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    needed = [
        name
        for name, item in parameters.items()
        if item.default is item.empty
        and item.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        and name != "num_workers"
    ]
    if needed:
        raise BadArgument(
            f"make_loader needs {', '.join(needed)}, which nobody gives it",
            remedy="def make_loader(num_workers=0): ...",
        )
    takes_all = any(item.kind is kinds.VAR_KEYWORD for item in parameters.values())
    return lambda name: takes_all or name in by_name


def is_not_taken(error: BaseException) -> bool:
    """Did a factory with ``**settings`` hand one on to a loader that does not know it?"""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
