"""Factories of the loaders that are compared: which arguments they take, how to make one.

torch's DataLoader and its subclasses keep their arguments, so one of them can be made again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from penstock.errors import BadArgument
from penstock.order.samplers import SeededOrder

Factory = Callable[..., Any]

_ORDERING = ("shuffle", "sampler", "batch_sampler", "batch_size", "drop_last")


def factory_of(maker: Any) -> Factory:
    """``maker`` itself, or, if it is a DataLoader, a function that makes loaders like it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> make = factory_of(DataLoader([1, 2, 3], batch_size=2, shuffle=True))
        >>> make(num_workers=2).num_workers, make().batch_size
        (2, 2)
    """
    from torch.utils.data import DataLoader

    if not isinstance(maker, DataLoader):
        return maker  # type: ignore[no-any-return]
    given = _arguments(maker)
    restore = _generators(maker)

    def make_again(**settings: Any) -> Any:
        restore()  # a generator that all of them share goes on where the last one left it
        arguments = {**given, **settings}
        if not arguments.get("num_workers"):
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                arguments.pop(name, None)
            arguments["timeout"] = 0
        elif arguments.get("prefetch_factor") is None:
            arguments.pop("prefetch_factor", None)
        return type(maker)(**arguments)

    return make_again


def _arguments(loader: Any) -> dict[str, Any]:
    """What the loader was made with, as far as its attributes tell."""
    names = [
        name
        for name, item in inspect.signature(type(loader).__init__).parameters.items()
        if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD) and name != "self"
    ]
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    ordering = {name: found.pop(name) for name in _ORDERING if name in found}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {**found, "batch_sampler": loader.batch_sampler}
    found["batch_size"] = loader.batch_size
    if loader.batch_size is not None:
        found["drop_last"] = loader.drop_last
    order, shuffle = loader.sampler, ordering.get("shuffle")
    is_seeded = isinstance(order, SeededOrder) and order.seed == found.get("seed")
    if is_seeded and order.shuffle == bool(shuffle):
        return {**found, "shuffle": shuffle}  # an order of its own making
    if type(loader.sampler).__name__ != "_InfiniteConstantSampler":  # an iterable has no order
        found["sampler"] = loader.sampler
    return found


def _generators(loader: Any) -> Callable[[], None]:
    """Remember the torch generators that the loader and its sampler were given."""
    owners = (loader, loader.sampler, loader.batch_sampler)
    found = [getattr(owner, "generator", None) for owner in owners]
    states = [(generator, generator.get_state()) for generator in found if generator is not None]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def taken_by(factory: Factory) -> Callable[[str], bool]:
    """Whether the factory takes a keyword argument. It takes everything if it has ``**settings``.

    Raises:
        BadArgument: It is no function, or needs an argument that it is not given.
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
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: item for name, item in parameters.items() if item.kind not in variable}
    needed = [
        name for name, item in named.items() if item.default is item.empty and name != "num_workers"
    ]
    if needed:
        raise BadArgument(
            f"make_loader needs {', '.join(needed)}, which nobody gives it",
            remedy="def make_loader(num_workers=0): ...",
        )
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    by_name = {name for name, item in named.items() if item.kind is not item.POSITIONAL_ONLY}
    return lambda name: takes_all or name in by_name


def is_not_taken(error: BaseException) -> bool:
    """Whether a factory with ``**settings`` handed one on to a loader that does not know it."""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
