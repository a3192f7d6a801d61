"""Python's and NumPy's global generators, seen as memory: a look at them costs 0.2 microseconds.

Both are Mersenne Twisters of 624 words and an index. NumPy publishes the address of its state;
Python's is found behind the object header and checked word for word against ``getstate`` before it
is trusted. Where the check fails nothing is peeked at or written in place: the public calls do the
same work, slower.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

TWISTER_WORDS = 624
_STATE_BYTES = 4 * TWISTER_WORDS


class PythonGenerator:
    """The generator behind ``random.random()``."""

    def __init__(self) -> None:
        self._twister = random._inst
        address = id(self._twister) + object.__basicsize__
        self.is_known = _holds_python_state(address)
        self._address = address
        self._index = ctypes.c_int.from_address(address) if self.is_known else None

    def write(self, words: Any) -> None:
        """Set the 624 words (an array of 312 64-bit ones); the next draw starts from the first."""
        if self._index is None:
            state = words.view(np.uint32).tolist()
            random.setstate((3, (*state, TWISTER_WORDS), None))
            return
        ctypes.memmove(self._address + 4, words.ctypes.data, _STATE_BYTES)
        self._index.value = TWISTER_WORDS
        self._twister.gauss_next = None  # type: ignore[attr-defined]

    def cells(self) -> list[Any]:
        """Cells of memory that change with every draw: the index and the first word."""
        return [ctypes.c_uint64.from_address(self._address)]

    def reserve(self) -> Any:
        """A normal variate that the next one to ask gets, without any other trace; or None."""
        return self._twister.gauss_next  # type: ignore[attr-defined]

    def save(self) -> Any:
        """The whole state, for :meth:`restore`. A normal variate kept in reserve is put away: it
        could be taken by a sample without any other trace."""
        if self._index is None:
            return random.getstate()
        gauss_next = self._twister.gauss_next  # type: ignore[attr-defined]
        self._twister.gauss_next = None  # type: ignore[attr-defined]
        return ctypes.string_at(self._address, 4 + _STATE_BYTES), gauss_next

    def restore(self, saved: Any) -> None:
        if self._index is None:
            random.setstate(saved)
            return
        ctypes.memmove(self._address, saved[0], 4 + _STATE_BYTES)
        self._twister.gauss_next = saved[1]  # type: ignore[attr-defined]

    def restore_reserve(self, saved: Any) -> None:
        """The same, when it is known that nobody has drawn since :meth:`save`."""
        if self._index is not None and saved[1] is not None:
            self._twister.gauss_next = saved[1]  # type: ignore[attr-defined]


class NumpyGenerator:
    """The generator behind ``np.random.rand()``."""

    def __init__(self) -> None:
        bits = np.random.mtrand._rand._bit_generator
        self.is_known = isinstance(bits, np.random.MT19937)
        if self.is_known:
            self._address = int(bits.ctypes.state_address)
            self.is_known = _holds_numpy_state(self._address)
        self._cells = self.cells() if self.is_known else []
        self._without_reserve: list[int] | None = None

    def cells(self) -> list[Any]:
        """Cells of memory that change with every draw: the first words, the index behind them."""
        return [
            ctypes.c_uint64.from_address(self._address),
            ctypes.c_uint32.from_address(self._address + _STATE_BYTES),
        ]

    def reserve(self) -> Any:
        """As Python's. Not by ``np.random.get_state``, whose calls are noted."""
        state: Any = np.random.mtrand._rand.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None

    def save(self) -> Any:
        """The whole state, for :meth:`restore`; a normal variate in reserve is put away."""
        values = self._values()
        if values is not None and values == self._without_reserve:
            # Nobody has drawn since it was known that nothing is in reserve: a copy will do.
            return ctypes.string_at(self._address, _STATE_BYTES + 4), values
        state: Any = np.random.get_state(legacy=False)
        if state["has_gauss"]:
            np.random.set_state({**state, "has_gauss": 0})
        return state, values

    def restore_reserve(self, saved: Any) -> None:
        """Like :meth:`restore`, when it is known that nobody has drawn since :meth:`save`."""
        state, values = saved
        has_reserve = not isinstance(state, bytes) and state["has_gauss"]
        if has_reserve:
            np.random.set_state(state)
        self._without_reserve = None if has_reserve else values

    def restore(self, saved: Any) -> None:
        state, values = saved
        has_moved = values is None or values != self._values()
        if isinstance(state, bytes):
            if has_moved:
                np.random.seed(0)  # puts away what samples left in reserve
                ctypes.memmove(self._address, state, _STATE_BYTES + 4)
        elif state["has_gauss"] or has_moved:
            np.random.set_state(state)
        has_reserve = not isinstance(state, bytes) and state["has_gauss"]
        self._without_reserve = None if has_reserve else values

    def _values(self) -> list[int] | None:
        return [cell.value for cell in self._cells] if self.is_known else None


@functools.lru_cache(maxsize=1)
def python_generator() -> PythonGenerator:
    return PythonGenerator()


@functools.lru_cache(maxsize=1)
def numpy_generator() -> NumpyGenerator:
    return NumpyGenerator()


def _holds_python_state(address: int) -> bool:
    """Does memory there hold (int index, uint32 state[624]), as ``getstate`` tells it?"""
    if sys.implementation.name != "cpython" or sys.byteorder != "little":
        return False
    saved = random.getstate()
    try:
        random.seed(20261115)
        random.random()
        *words, index = random.getstate()[1]
        raw = ctypes.string_at(address, 4 + _STATE_BYTES)
    finally:
        random.setstate(saved)
    return bool(np.frombuffer(raw, dtype=np.uint32).tolist() == [index, *words])


def _holds_numpy_state(address: int) -> bool:
    state: Any = np.random.get_state()
    raw = ctypes.string_at(address, _STATE_BYTES + 4)
    words = np.frombuffer(raw, dtype=np.uint32).tolist()
    return bool(words == [*state[1].tolist(), state[2]])


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave the caller's generators as they were, whatever runs inside.

    Example:
        >>> import random
        >>> random.seed(1); expected = random.random(); random.seed(1)
        >>> with preserved_generators():
        ...     random.seed(99)
        >>> random.random() == expected
        True
    """
    import torch

    python, numpy = python_generator(), numpy_generator()
    python_state, numpy_state = python.save(), numpy.save()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        python.restore(python_state)
        numpy.restore(numpy_state)
        torch.default_generator.set_state(torch_state)
