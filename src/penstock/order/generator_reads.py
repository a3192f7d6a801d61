"""Did user code read a generator's state without drawing? Then it must be the sample's own.

``random.getstate``, ``np.random.get_state``, ``torch.initial_seed`` and ``torch.get_rng_state`` are
replaced by stand-ins that note the call, for as long as somebody watches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Reads:
    """How often states were read (Python's and NumPy's, torch's), and who watches."""

    def __init__(self) -> None:
        self.of_globals = self.of_torch = 0
        self.num_watchers = 0
        self.originals: list[tuple[Any, str, Any]] = []


reads = Reads()


def _noting(original: Callable[..., Any], mark: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **keywords: Any) -> Any:
        setattr(reads, mark, getattr(reads, mark) + 1)
        return original(*args, **keywords)

    return read


_WATCHED = (
    ("random", "getstate", "of_globals"),
    ("numpy.random", "get_state", "of_globals"),
    ("torch", "initial_seed", "of_torch"),
    ("torch", "get_rng_state", "of_torch"),
    ("torch.random", "initial_seed", "of_torch"),
    ("torch.random", "get_rng_state", "of_torch"),
)
_stand_ins: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextmanager
def counting_state_reads() -> Iterator[None]:
    """Notice calls that read a generator's state (``random.getstate`` and the like) meanwhile."""
    watch()
    try:
        yield
    finally:
        unwatch()


def watch() -> None:
    reads.num_watchers += 1
    if reads.num_watchers == 1:
        reads.originals = [_replace_reader(*place) for place in _WATCHED]


def unwatch() -> None:
    reads.num_watchers -= 1
    if reads.num_watchers == 0:
        for module, name, original in reads.originals:
            setattr(module, name, original)


def _replace_reader(module_name: str, name: str, mark: str) -> tuple[Any, str, Any]:
    module = sys.modules[module_name]
    original = getattr(module, name)
    stand_in = _stand_ins.get(original)
    if stand_in is None:
        stand_in = _stand_ins[original] = _noting(original, mark)
    setattr(module, name, stand_in)
    return module, name, original
