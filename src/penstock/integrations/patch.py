"""Makes torch's own DataLoader use Penstock's engine, for code that cannot be changed.

    patch() replaces one method: torch.utils.data.DataLoader._get_iterator

Every torch loader gets its iterator from that method, so it does not matter when the class was
imported or subclassed. A loader keeps its class, attributes, sampler and order. A
:class:`penstock.integrations.patched_loader.PatchedLoader` is attached to it. That is a Penstock
loader with the same attributes, and it does the loading.
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
"""The attribute of a torch loader that holds its Penstock loader."""
_READ_BY_US = ("_index_sampler", "_auto_collation")
"""A class that overrides one of these keeps torch's iterators, which follow the override."""
_ORIGINAL: Any = vars(TorchDataLoader).get("_get_iterator")
_lock = threading.RLock()


@dataclass
class _Patch:
    """The active patch, with one layer for each call of patch()."""

    original: Any
    report: PatchReport = field(default_factory=PatchReport)
    layers: list[PatchLayer] = field(default_factory=list)

    def add(self, options: dict[str, Any]) -> None:
        """Add a layer. Equal options reuse the last layer, so its epoch counts continue."""
        is_same = bool(self.layers) and self.layers[-1].options == options
        self.layers.append(self.layers[-1] if is_same else PatchLayer(options, self.report))


_current: _Patch | None = None


@takes_options(PatchOptions)
def patch(**options: Unpack[PatchOptions]) -> PatchReport:
    """Make every ``torch.utils.data.DataLoader`` load with Penstock's engine.

    Calls can be nested: the options of the last call apply until it is undone. Loaders whose class
    overrides ``_get_iterator`` are left alone, as are existing iterators.

    Args:
        **options: See :class:`penstock.options.PatchOptions`. With ``seed``, each loader uses its
            own generators. The order stays torch's, and ``torch.manual_seed`` reproduces it.

    Returns the counters of the patch. Undo it with :func:`unpatch`.

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
    """Undo the last :func:`patch`. Does nothing without one."""
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
    """Apply :func:`patch` inside a ``with`` block.

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
    """Return torch's own method, if it has the expected signature."""
    original = vars(TorchDataLoader).get("_get_iterator")
    original = _ORIGINAL if original is _get_iterator else original
    if original is None or list(inspect.signature(original).parameters) != ["self"]:
        raise BadArgument(
            "this torch's DataLoader has no _get_iterator(self) to replace",
            likely="a torch version that Penstock does not support.",
            remedy="penstock.DataLoader instead of torch's works without a patch",
        )
    return original


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    known = options_of(PatchOptions)
    unknown = ", ".join(sorted(set(given) - set(known)))
    if unknown:
        raise BadArgument(f"unknown patch() option {unknown}; options are {', '.join(known)}")
    options = read_options(PatchOptions, given)
    values = {name: value for name, value in options.items() if value is not None}
    is_for_workers = "multiprocessing_context" in values or values.get("persistent_workers")
    if is_for_workers and not values.get("num_workers"):
        values["num_workers"] = 1  # torch accepts these only with workers
    DataLoader([0], **values)  # torch raises for invalid values of its own options
    return options


def _get_iterator(loader: Any) -> Any:
    """Replacement for torch's method."""
    with _lock:
        patch = _current
        if patch is None:  # the user's code kept this function beyond unpatch()
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
