"""Spans for each transform of torchvision's ``Compose``, recorded on request.

The class's own method runs on a proxy of the ``Compose`` whose transforms are timed. No ``Compose``
is modified, and every version of torchvision applies its transforms as usual.

Called in the process that loads samples. Tested by ``tests/compat/test_compose_steps.py``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from penstock.trace.record import Kind, span
from penstock.user_objects import probe

_COMPOSE_METHODS = (
    ("torchvision.transforms.v2._container", "forward"),
    ("torchvision.transforms.transforms", "__call__"),
)
"""The modules of the two ``Compose`` classes, and their methods that apply the transforms."""
_MARK = "_penstock_steps"


def trace_steps() -> None:
    """Record every transform in this process from now on. Repeated calls have no effect."""
    for module_name, method in _COMPOSE_METHODS:
        compose = getattr(sys.modules.get(module_name), "Compose", None)
        original = vars(compose).get(method) if compose is not None else None
        if original is not None and not hasattr(original, _MARK):
            setattr(compose, method, _timed_method(original))


def _timed_method(original: Any) -> Any:
    @functools.wraps(original)
    def apply(self: Any, *inputs: Any) -> Any:
        return original(_TimedCompose(self), *inputs)

    setattr(apply, _MARK, True)
    return apply


class _TimedCompose:
    """Proxy of a ``Compose`` with timed transforms and otherwise the same attributes."""

    def __init__(self, compose: Any) -> None:
        self._compose = compose
        self.transforms = [_timed(transform) for transform in compose.transforms]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compose, name)


def _timed(transform: Any) -> Any:
    own = probe(transform, "__name__")
    name = own if isinstance(own, str) and own else type(transform).__name__

    def call(*inputs: Any) -> Any:
        with span(name, kind=Kind.TRANSFORM):
            return transform(*inputs)

    return call
