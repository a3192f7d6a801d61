"""Each transform of torchvision's ``Compose`` as a span, without changing any ``Compose``.

The method of the class is run as it stands, on a stand-in whose transforms are timed: what it does
with them, in whatever version, stays its own business. Only where that was asked for.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from penstock.trace.record import STEP, span

_PLACES = (
    ("torchvision.transforms.v2._container", "forward"),
    ("torchvision.transforms.transforms", "__call__"),
)
"""Where the two kinds of Compose live, and which method goes through the transforms."""
_MARK = "_penstock_steps"


def trace_steps() -> None:
    """Note every transform in this process from now on. Twice is as good as once."""
    for module_name, method in _PLACES:
        compose = getattr(sys.modules.get(module_name), "Compose", None)
        original = vars(compose).get(method) if compose is not None else None
        if original is not None and not hasattr(original, _MARK):
            setattr(compose, method, _timed_method(original))


def _timed_method(original: Any) -> Any:
    @functools.wraps(original)
    def go_through(self: Any, *inputs: Any) -> Any:
        return original(_StandIn(self), *inputs)

    setattr(go_through, _MARK, True)
    return go_through


class _StandIn:
    """A Compose as its own method sees it: the same, but for the transforms."""

    def __init__(self, compose: Any) -> None:
        self._compose = compose
        self.transforms = [_timed(transform) for transform in compose.transforms]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compose, name)


def _timed(transform: Any) -> Any:
    name = getattr(transform, "__name__", None) or type(transform).__name__

    def call(*inputs: Any) -> Any:
        with span(name, kind=STEP):
            return transform(*inputs)

    return call
