"""Loader factories: finds the arguments that one accepts, and makes a factory from a loader.

torch's DataLoader and its subclasses keep their arguments, so a new one can be made from them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from penstock.errors import BadArgument
from penstock.order.samplers import SeededOrder

Factory = Callable[..., Any]

_ORDERING = ("shuffle", "sampler", "batch_sampler", "batch_size", "drop_last")


def factory_of(maker: Any) -> Factory:
    """Return ``maker``. If it is a DataLoader, return a function that makes similar loaders.

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
        restore()  # a generator shared by the loaders would continue where the last one stopped
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
    """Return the arguments of the loader, as far as its attributes show them."""
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
    mixture = sys.modules.get("penstock.order.mixture")
    seed = found.get("seed")
    is_own = isinstance(order, SeededOrder) and order.seed == seed
    if mixture is not None and isinstance(order, mixture.MixtureOrder):
        is_own = order.seed == (seed or 0)
    if is_own and order.shuffle == bool(shuffle):
        return {**found, "shuffle": shuffle}  # the loader created this order itself
    if type(loader.sampler).__name__ != "_InfiniteConstantSampler":  # an iterable has no order
        found["sampler"] = loader.sampler
    return found


def _generators(loader: Any) -> Callable[[], None]:
    """Save the torch generators of the loader and its sampler. Returns a function to restore."""
    owners = (loader, loader.sampler, loader.batch_sampler)
    found = [getattr(owner, "generator", None) for owner in owners]
    states = [(generator, generator.get_state()) for generator in found if generator is not None]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def taken_by(factory: Factory) -> Callable[[str], bool]:
    """Return a function that is True for keyword arguments that the factory accepts.

    A factory with ``**settings`` accepts all of them.

    Raises:
        BadArgument: It is not callable, or has a required argument that is not passed.
    """
    if not callable(factory):
        raise BadArgument(
            f"make_loader is a {type(factory).__name__}, but it must be a function that returns a "
            "loader",
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
            f"make_loader requires {', '.join(needed)}, which is not passed",
            remedy="def make_loader(num_workers=0): ...",
        )
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    by_name = {name for name, item in named.items() if item.kind is not item.POSITIONAL_ONLY}
    return lambda name: takes_all or name in by_name


def is_not_taken(error: BaseException) -> bool:
    """Return True if the loader rejected one of the ``**settings`` that its factory passed on."""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
