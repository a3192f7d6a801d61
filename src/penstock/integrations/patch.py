"""torch's own DataLoader, loading with our engine: for code that cannot be changed.

    patch() puts one function in the place of torch.utils.data.DataLoader._get_iterator

That one method is where every torch loader gets what loads its batches, so it does not matter when
the class was imported or subclassed. A loader keeps its class, attributes, sampler and order.
Beside it stands a :class:`penstock.integrations.patched_loader.PatchedLoader`, our loader with the
other's attributes, which does the loading.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader as TorchDataLoader

from penstock.errors import BadArgument
from penstock.integrations.patched_loader import PatchedLoader, PatchLayer, PatchReport
from penstock.loader import DataLoader
from penstock.options import PatchOptions, options_of, read_options, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ATTRIBUTE = "_penstock_loader"
"""Where a torch loader keeps the one of ours that loads for it."""
_READ_BY_US = ("_index_sampler", "_auto_collation")
"""A class that has its own of these means something that only torch's iterators follow."""
_ORIGINAL: Any = vars(TorchDataLoader).get("_get_iterator")
_lock = threading.RLock()


@dataclass
class _Patch:
    """What stands in torch's class now; one layer for each call of patch()."""

    original: Any
    report: PatchReport = field(default_factory=PatchReport)
    layers: list[PatchLayer] = field(default_factory=list)

    def add(self, options: dict[str, Any]) -> None:
        """Equal options go on with the same layer: epochs are counted on."""
        is_same = bool(self.layers) and self.layers[-1].options == options
        self.layers.append(self.layers[-1] if is_same else PatchLayer(options, self.report))


_current: _Patch | None = None


@takes_options(PatchOptions)
def patch(**options: Unpack[PatchOptions]) -> PatchReport:
    """Let every ``torch.utils.data.DataLoader`` load with Penstock's engine from now on.

    Already patched: the options of this call count until it is taken back. Loaders whose class has
    a ``_get_iterator`` of its own are left alone, as are iterators that exist already.

    Args:
        **options: Those of :class:`penstock.options.PatchOptions`. With ``seed``, each loader draws
            from generators of its own; the order stays torch's: ``torch.manual_seed`` repeats it.

    Returns what is counted while the patch stands. Pairs with :func:`unpatch`.

    Example:
        >>> import penstock, torch
        >>> report = penstock.patch()
        >>> [batch.tolist() for batch in torch.utils.data.DataLoader([1, 2, 3], batch_size=2)]
        [[1, 2], [3]]
        >>> report.num_loaders
        1
        >>> penstock.unpatch()
    """
    global _current
    checked = _checked(options)
    with _lock:
        if _current is None:
            _current = _Patch(_replaceable())
            TorchDataLoader._get_iterator = _get_iterator  # type: ignore[assignment, method-assign]
        _current.add(checked)
        return _current.report


def unpatch() -> None:
    """Take back the last :func:`patch`; without one, nothing happens."""
    global _current
    with _lock:
        if _current is None:
            return
        _current.layers.pop()
        if not _current.layers:
            TorchDataLoader._get_iterator = _current.original  # type: ignore[method-assign]
            _current = None


@takes_options(PatchOptions)
@contextmanager
def patched(**options: Unpack[PatchOptions]) -> Iterator[PatchReport]:
    """:func:`patch` for a while.

    Example:
        >>> import penstock, torch
        >>> with penstock.patched(on_error="skip") as report:
        ...     loader = torch.utils.data.DataLoader([1, None, 3], batch_size=3)
        ...     print([batch.tolist() for batch in loader], report.num_bad)
        [[1, 3]] 1
    """
    report = patch(**options)
    try:
        yield report
    finally:
        unpatch()


def _replaceable() -> Any:
    """torch's own method, if it is the one that we know."""
    original = vars(TorchDataLoader).get("_get_iterator")
    original = _ORIGINAL if original is _get_iterator else original
    if original is None or list(inspect.signature(original).parameters) != ["self"]:
        raise BadArgument(
            "this torch's DataLoader has no _get_iterator(self) that could be replaced",
            likely="a version of torch that Penstock does not know.",
            remedy="penstock.DataLoader in the place of torch's works without it",
        )
    return original


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    known = options_of(PatchOptions)
    unknown = ", ".join(sorted(set(given) - set(known)))
    if unknown:
        raise BadArgument(f"patch() does not know {unknown}; it knows {', '.join(known)}")
    options = read_options(PatchOptions, given)
    values = {name: value for name, value in options.items() if value is not None}
    is_for_workers = "multiprocessing_context" in values or values.get("persistent_workers")
    if is_for_workers and not values.get("num_workers"):
        values["num_workers"] = 1  # torch takes these only beside workers
    DataLoader([0], **values)  # torch says what is wrong with a value of its own
    return options


def _get_iterator(loader: Any) -> Any:
    """In the place of torch's own."""
    with _lock:
        patch = _current
        if patch is None:  # somebody kept this function, or put it back, beyond unpatch()
            return _ORIGINAL(loader)
        if any(getattr(type(loader), n) is not getattr(TorchDataLoader, n) for n in _READ_BY_US):
            return patch.original(loader)
        layer = patch.layers[-1]
        ours = vars(loader).get(_ATTRIBUTE)
        if not isinstance(ours, PatchedLoader) or not ours.belongs_to(loader, layer):
            ours = PatchedLoader(loader, layer)
            vars(loader)[_ATTRIBUTE] = ours
        else:
            ours.follow(loader)
    return ours._get_iterator()
