"""torch's own DataLoader, loading with our engine: for code that cannot be changed.

    patch() puts one function in the place of torch.utils.data.DataLoader._get_iterator

That one method is where every torch loader gets what loads its batches, so it does not matter when
the class was imported or subclassed. A loader keeps its class, attributes, sampler and order.
Beside it stands a :class:`Shadow`, our loader with the other's attributes, which does the loading.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from penstock.errors import BadArgument
from penstock.loader import DataLoader
from penstock.machine.collect import here
from penstock.policy.given import Wish
from penstock.policy.safety import make_safe

_SHADOW = "_penstock_shadow"
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What patched loaders are told beyond what their code says; as in DataLoader.

    Args:
        num_workers: None: as the code says. A number or "auto" is used instead.
    """

    num_workers: int | str | None = None
    seed: int | None = None
    pool: str = "auto"
    randomness: str = "sample"
    on_error: Any = "raise"
    max_bad: float | None = None
    bad_samples_file: Any = None
    max_restarts: int = 100
    sample_timeout_s: float | None = None


@dataclass
class Tally:
    """What patched loaders did since the patch."""

    num_loaders: int = 0
    num_epochs: int = 0
    num_restarts: int = 0
    num_bad: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass
class _Patch:
    options: Options
    tally: Tally
    original: Any
    depth: int = 1


_current: _Patch | None = None


def patch(**options: Any) -> Tally:
    """Let every ``torch.utils.data.DataLoader`` load with Penstock's engine from now on.

    Already patched: the options of this call count from now on. Loaders whose class has a
    ``_get_iterator`` of its own are left alone, as are iterators that exist already.

    Args:
        **options: ``seed``, ``num_workers`` (in the place of what the code says), ``pool``,
            ``randomness``, ``on_error``, ``max_bad``, ``bad_samples_file``, ``max_restarts`` and
            ``sample_timeout_s``, as :class:`penstock.DataLoader` takes them.

    Returns what is counted while the patch stands. Pairs with :func:`unpatch`.

    Example:
        >>> import penstock, torch
        >>> tally = penstock.patch()
        >>> [batch.tolist() for batch in torch.utils.data.DataLoader([1, 2, 3], batch_size=2)]
        [[1, 2], [3]]
        >>> tally.num_loaders
        1
        >>> penstock.unpatch()
    """
    global _current
    checked = _checked(options)
    with _lock:
        if _current is not None:
            _current.options = checked
            _current.depth += 1
            return _current.tally
        original = vars(TorchDataLoader).get("_get_iterator")
        if original is None or list(inspect.signature(original).parameters) != ["self"]:
            raise BadArgument(
                "this torch's DataLoader has no _get_iterator(self) that could be replaced",
                likely="a version of torch that Penstock does not know.",
                remedy="penstock.DataLoader in the place of torch's works without it",
            )
        _current = _Patch(checked, Tally(), original)
        TorchDataLoader._get_iterator = _get_iterator  # type: ignore[assignment, method-assign]
        return _current.tally


def unpatch() -> None:
    """Take back what :func:`patch` did; as often as it was called, or nothing happens."""
    global _current
    with _lock:
        if _current is None:
            return
        _current.depth -= 1
        if not _current.depth:
            TorchDataLoader._get_iterator = _current.original  # type: ignore[method-assign]
            _current = None


@contextmanager
def patched(**options: Any) -> Iterator[Tally]:
    """:func:`patch` for a while.

    Example:
        >>> import penstock, torch
        >>> with penstock.patched(on_error="skip") as tally:
        ...     loader = torch.utils.data.DataLoader([1, None, 3], batch_size=3)
        ...     print([batch.tolist() for batch in loader], tally.num_bad)
        [[1, 3]] 1
    """
    tally = patch(**options)
    try:
        yield tally
    finally:
        unpatch()


def _checked(options: dict[str, Any]) -> Options:
    try:
        checked = Options(**options)
    except TypeError:
        known = ", ".join(vars(Options()))
        unknown = ", ".join(sorted(set(options) - set(vars(Options()))))
        raise BadArgument(f"patch() does not know {unknown}; it knows {known}") from None
    values = {name: value for name, value in vars(checked).items() if value is not None}
    DataLoader([0], **values)  # it says what is wrong with a value
    return checked


def _get_iterator(loader: Any) -> Any:
    """In the place of torch's own."""
    with _lock:
        patch = _current
        if patch is None:  # somebody kept this function beyond unpatch()
            return _torch_iterator(loader)
        shadow = vars(loader).get(_SHADOW)
        if shadow is None or shadow._options != patch.options:
            shadow = Shadow(patch.options, patch.tally)
            vars(loader)[_SHADOW] = shadow
            patch.tally.num_loaders += 1
        patch.tally.num_epochs += 1
    shadow._follow(loader)
    return shadow._get_iterator()


def _torch_iterator(loader: Any) -> Any:
    from torch.utils.data import dataloader as torch_loader

    if loader.num_workers == 0:
        return torch_loader._SingleProcessDataLoaderIter(loader)
    loader.check_worker_number_rationality()
    return torch_loader._MultiProcessingDataLoaderIter(loader)


class Shadow(DataLoader[Any]):
    """Our loader with another's attributes: dataset, sampler, workers and all are the other's."""

    def __init__(self, options: Options, tally: Tally) -> None:
        # Not torch's __init__: everything that it would make is taken over in _follow.
        self._options = options
        self._tally = tally
        self._has_begun = False

    def _follow(self, loader: Any) -> None:
        """Take the other's attributes as they are now: some change between epochs."""
        options = self._options
        theirs = {name: value for name, value in vars(loader).items() if name != _SHADOW}
        theirs.pop("_iterator", None)
        vars(self).update(theirs)
        vars(self)["_iterator"] = None
        if not self._has_begun:
            self._has_begun = True
            self._settle_faults(
                options.on_error,
                options.max_bad,
                options.bad_samples_file,
                options.max_restarts,
                options.sample_timeout_s,
            )
            self._begin(
                loader.dataset,
                _asked_prefetch(loader),
                options.pool,
                options.randomness,
                options.seed,
            )
            self._is_auto = options.num_workers == "auto"
            self._auto_workers = here().usable_cores if self._is_auto else None
        if isinstance(options.num_workers, int):
            self.num_workers = options.num_workers
        elif self._auto_workers is not None:
            self.num_workers = int(self._auto_workers)
        self.in_order = getattr(loader, "in_order", True)

    def _wish(self) -> Wish:
        """What the code asks for, as far as it is safe here."""
        wish = super()._wish()
        safe, lines = make_safe(here(), wish)
        for line in lines:
            if line not in self._notes:
                self._notes[line] = None
                self._tally.changes.append(line)
                warnings.warn(f"penstock: {line}", stacklevel=2)
        return replace(wish, start_method=safe.start_method, num_workers=safe.num_workers)

    def _count_restart(self) -> None:
        super()._count_restart()
        self._tally.num_restarts += 1

    def _take_bad(self, found: list[Any]) -> None:
        self._tally.num_bad += len(found)
        super()._take_bad(found)


def _asked_prefetch(loader: Any) -> int | None:
    """What the code asked for. torch fills in 2 where nothing was said, so that counts as none."""
    prefetch = loader.prefetch_factor
    return None if prefetch == 2 else prefetch
