"""The global generators: fast access to their state, and detection of state reads.

Python's, NumPy's and torch's are Mersenne Twisters with 624 words and an index. NumPy publishes the
address of its state. Python's state follows the object header, and torch's is at the same offset in
every generator. Both are compared word for word with the public ``getstate`` or ``get_state``
before the address is used. Comparing states in memory takes 0.2 microseconds. If the comparison
fails, the public functions are used instead, which is slower.

Code that reads a state without drawing (``random.getstate``, ``torch.initial_seed``) does not
change the memory. :func:`watching_state_reads` replaces these functions with watched versions.

Used by the loading code: workers, threads, or the training process.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

TWISTER_WORDS = 624
_STATE_BYTES = 4 * TWISTER_WORDS
StateBuffer = ctypes.c_char * (_STATE_BYTES + 4)
"""Holds a copy of the words of a state and its index. Reused for each batch."""


class PythonGenerator:
    """The generator behind ``random.random()``."""

    def __init__(self) -> None:
        self._twister: Any = random._inst  # type: ignore[attr-defined, unused-ignore]
        self._address = id(self._twister) + object.__basicsize__
        self._index = ctypes.c_int.from_address(self._address)
        self.is_known = _holds_python_state(self._address)

    def write(self, words: Any) -> None:
        """Set the 624 words (an array of 312 64-bit words). The next draw uses the first word."""
        if not self.is_known:
            state = words.view(np.uint32).tolist()
            random.setstate((3, (*state, TWISTER_WORDS), None))
            return
        ctypes.memmove(self._address + 4, words.ctypes.data, _STATE_BYTES)
        self._index.value = TWISTER_WORDS
        self._twister.gauss_next = None

    def cells(self) -> list[Any]:
        """Memory that changes with every draw: the index and the first word."""
        return [ctypes.c_uint64.from_address(self._address)]

    def seed_cell(self) -> Any:
        """Memory that differs between seeds: the next words. The first is the same for all."""
        return ctypes.c_uint64.from_address(self._address + 8)

    def cached_normal(self) -> Any:
        """Return the value that the next ``random.gauss`` returns without drawing, or None."""
        return self._twister.gauss_next

    def save(self, into: Any = None) -> Any:
        """Return the whole state, for :meth:`restore`, and clear the cached normal variate.

        A sample could use that variate without changing the state in memory.

        Args:
            into: A :data:`StateBuffer` that may be overwritten.
        """
        if not self.is_known:
            return random.getstate()
        cached_normal, self._twister.gauss_next = self._twister.gauss_next, None
        return _copy_state(self._address, into), cached_normal

    def restore(self, saved: Any, *, has_moved: bool = True) -> None:
        """Undo :meth:`save`. Pass ``has_moved=False`` if nothing was drawn since."""
        if not self.is_known:
            random.setstate(saved)
            return
        if has_moved:
            ctypes.memmove(self._address, saved[0], 4 + _STATE_BYTES)
        self._twister.gauss_next = saved[1]


class NumpyGenerator:
    """The generator behind ``np.random.rand()``."""

    is_imported = True

    def __init__(self, bits: Any) -> None:
        self.is_known = type(bits) is np.random.MT19937
        if self.is_known:
            self._address = int(bits.ctypes.state_address)
            self.is_known = _holds_numpy_state(self._address)
            self._cells = self.cells() if self.is_known else []
        self._values_without_normal: list[int] | None = None

    def cells(self) -> list[Any]:
        """Memory that changes with every draw: the first words, and the index after the state."""
        return [
            ctypes.c_uint64.from_address(self._address),
            ctypes.c_uint32.from_address(self._address + _STATE_BYTES),
        ]

    def cached_normal(self) -> Any:
        """Return the cached normal variate, or None, without marking a read of the state."""
        state: Any = np.random.mtrand._rand.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None

    def save(self, into: Any = None) -> Any:
        """Return the whole state, for :meth:`restore`, and clear the cached normal variate.

        Args:
            into: A :data:`StateBuffer` that may be overwritten.
        """
        values = self._values()
        if values is not None and values == self._values_without_normal:
            # Nothing was drawn since the last check for a cached variate, so a copy is enough.
            return _copy_state(self._address, into), values
        state: Any = np.random.mtrand._rand.get_state(legacy=False)  # not marked as a read
        if state["has_gauss"]:
            np.random.set_state({**state, "has_gauss": 0})
        return state, values

    def restore(self, saved: Any, *, has_moved: bool | None = None) -> None:
        """Undo :meth:`save`. ``has_moved``: True if numbers were drawn since; None: compare."""
        state, values = saved
        if has_moved is None:
            has_moved = values is None or values != self._values()
        has_normal = False
        if not isinstance(state, dict):
            if has_moved:
                np.random.seed(0)  # clears a normal variate cached by samples
                ctypes.memmove(self._address, state, _STATE_BYTES + 4)
        else:
            has_normal = bool(state["has_gauss"])
            if has_normal or has_moved:
                np.random.set_state(state)
        self._values_without_normal = None if has_normal else values

    def _values(self) -> list[int] | None:
        return [cell.value for cell in self._cells] if self.is_known else None


class UnimportedNumpy:
    """Stands for NumPy's generator until ``numpy.random`` is imported, which takes 10 ms.

    Its import is treated like a draw, because code that imports it may draw before it is seeded.
    """

    is_imported = False
    is_known = True

    @property
    def value(self) -> bool:
        return "numpy.random" in sys.modules

    def cells(self) -> list[Any]:
        return [self, self]

    def cached_normal(self) -> Any:
        return None

    def save(self, into: Any = None) -> Any:
        return None, None

    def restore(self, saved: Any, *, has_moved: bool | None = None) -> None:
        if self.value:
            np.random.seed()  # as after the import


class TorchGenerator:
    """The generator behind ``torch.rand()`` on the CPU."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        offset = _torch_offset()
        self.is_known = offset is not None
        if offset is not None:
            address = generator._cdata + offset
            self._head, self._normals = map(_TorchMark.from_address, (address, address + 2520))
            # The seed and the number of words that are left, which both representations start with.
            self.is_known = self._head.raw[:12] == bytes(generator.get_state()[:12].numpy())

    def marks(self) -> tuple[bytes, bytes]:
        """Return bytes that differ after each use.

        These are the seed, the index and the first word, and the cached normal variates.
        """
        if self.is_known:
            return self._head.raw, self._normals.raw
        state = bytes(self._generator.get_state().numpy())
        return state[:64], state[-64:]


def _copy_state(address: int, into: Any) -> Any:
    into = StateBuffer() if into is None else into
    ctypes.memmove(into, address, _STATE_BYTES + 4)
    return into


def save_generators() -> bytes:
    """Return the states of Python's and NumPy's generators, including cached normal variates.

    Two results are equal if nothing was drawn or seeded in between. Takes 60 microseconds.
    """
    return pickle.dumps((random.getstate(), np.random.mtrand._rand.get_state(legacy=False)))


def restore_generators(saved: bytes) -> None:
    """Restore both generators to the result of :func:`save_generators`."""
    python, numpy = pickle.loads(saved)
    random.setstate(python)
    np.random.set_state(numpy)


@functools.lru_cache(maxsize=1)
def python_generator() -> PythonGenerator:
    return PythonGenerator()


def numpy_generator() -> NumpyGenerator:
    """Return the current generator, which ``np.random.set_bit_generator`` can replace."""
    return _numpy_generator(np.random.mtrand._rand._bit_generator)


def numpy_generator_if_imported() -> NumpyGenerator | UnimportedNumpy:
    return numpy_generator() if "numpy.random" in sys.modules else UnimportedNumpy()


@functools.lru_cache(maxsize=1)
def _numpy_generator(bits: Any) -> NumpyGenerator:
    return NumpyGenerator(bits)


def torch_generator() -> TorchGenerator:
    """Return torch's default generator."""
    import torch

    return _torch_generator(torch.default_generator)


@functools.lru_cache(maxsize=1)
def _torch_generator(generator: Any) -> TorchGenerator:
    return TorchGenerator(generator)


def replaced_bit_generator() -> type | None:
    """Return the class passed to ``np.random.set_bit_generator``; None if NumPy's default."""
    if "numpy.random" not in sys.modules:  # NumPy imports it on first use, which takes 8 ms
        return None
    kind = type(np.random.mtrand._rand._bit_generator)
    return None if kind is np.random.MT19937 else kind


def use_bit_generator(kind: type | None) -> None:
    """In a worker, use the class that :func:`replaced_bit_generator` returned in the parent."""
    if kind is not None and kind is not replaced_bit_generator():
        numpy_random: Any = np.random  # NumPy's type stubs lack the function
        numpy_random.set_bit_generator(kind())


def _holds_python_state(address: int) -> bool:
    """Return True if the memory holds an int index and uint32 state[624], equal to ``getstate``."""
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


_TorchMark = ctypes.c_char * 24
_TORCH_STATE_BYTES = 5056
"""Length of the result of torch's ``get_state``."""


@functools.lru_cache(maxsize=1)
def _torch_offset() -> int | None:
    """Return the offset of the state in a CPU generator of torch, or None if it is not found.

    In memory: seed (8 bytes), words left (4), a flag (4), index (4), 624 words, 4 unused bytes, and
    two optional normal variates of 8 and 16 bytes. In ``get_state``, index and words have 8 bytes.
    A new generator is compared, because this sets its index and variates.
    """
    import torch

    generator = torch.Generator("cpu")
    generator.manual_seed(20261115)
    tensor = generator.get_state()
    address = getattr(generator, "_cdata", None)
    if address is None or tensor.numel() != _TORCH_STATE_BYTES or sys.byteorder != "little":
        return None
    state: Any = tensor.numpy()
    struct.pack_into("<iiQ", state, 8, 100, 1, 524)
    struct.pack_into("<d8xi", state, 5024, 0.7, 1)
    struct.pack_into("<f?", state, 5048, 0.3, True)
    generator.set_state(tensor)
    offset = ctypes.string_at(address, 256).find(state[:12].tobytes())
    if offset < 0:
        return None
    found = ctypes.string_at(address + offset, 2544)
    words = state[16:5016].view(np.uint64).astype(np.uint32).tobytes()
    is_equal = (
        found[16:2516] == words
        and struct.pack("<f", 0.3) in found[2520:2528]
        and struct.pack("<d", 0.7) in found[2528:]
    )
    return offset if is_equal else None


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the caller's generators at the end of the block.

    Example:
        >>> import random
        >>> random.seed(1); expected = random.random(); random.seed(1)
        >>> with preserved_generators():
        ...     random.seed(99)
        >>> random.random() == expected
        True
    """
    import torch

    python, numpy = python_generator(), numpy_generator_if_imported()
    python_state, numpy_state = python.save(), numpy.save()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        python.restore(python_state)
        numpy.restore(numpy_state)
        torch.default_generator.set_state(torch_state)


class KeptStates:
    """Copies of the global generators, made again only if one of them was used since.

    Used only if the states of Python's and NumPy's are known in memory.
    """

    def __init__(self) -> None:
        import torch

        self._python, self._numpy = python_generator(), numpy_generator_if_imported()
        self._cells = *self._python.cells(), self._python.seed_cell(), *self._numpy.cells()
        self._torch, self._torch_marks = torch.default_generator, torch_generator().marks
        self._buffers = StateBuffer(), StateBuffer()
        self._marks: Any = None

    def keep(self) -> None:
        """Copy the states, and clear cached normal variates. Pairs with :meth:`restore`."""
        marks = [cell.value for cell in self._cells], self._torch_marks()
        if marks != self._marks or self._python.cached_normal() is not None:
            of_python, of_numpy = self._buffers
            self._of_python, self._of_numpy = (
                self._python.save(of_python),
                self._numpy.save(of_numpy),
            )
            self._of_torch, self._marks = self._torch.get_state(), marks

    def restore(self, *, has_moved: bool) -> None:
        """Undo :meth:`keep`. ``has_moved``: True if numbers were drawn since."""
        has_normals = self._of_python[1] is not None or isinstance(self._of_numpy[0], dict)
        if has_moved or has_normals:
            self._python.restore(self._of_python, has_moved=has_moved)
            self._numpy.restore(self._of_numpy, has_moved=has_moved)
            self._marks = None  # they do not show whether the caller uses a cached variate
        if has_moved:
            self._torch.set_state(self._of_torch)


# -- reads of a state ------------------------------------------------------------------------------


class StateReads:
    """Shows whether a state was read: Python's or NumPy's (``of_globals``), and torch's.

    Each read stores a new object, so two values are equal only if nothing was read in between. Two
    threads that count in the same variable could lose a read.
    """

    def __init__(self) -> None:
        self.of_globals = self.of_torch = object()
        self.num_users = 0
        self._lock = threading.Lock()
        self._has_numpy: bool | None = None
        self._readers: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Namespace and name of each function that reads a state, the function, and the watched
        version of it. Kept, because each batch without workers replaces and restores them."""

    def start(self) -> None:
        """Start watching reads. Pairs with :meth:`stop`; several users can watch at a time."""
        with self._lock:
            self.num_users += 1
            if self.num_users > 1:
                return
            has_numpy = "numpy.random" in sys.modules
            if has_numpy is not self._has_numpy or self._are_replaced():
                found = [reader for reader in _READERS if reader[0] in sys.modules]
                self._readers = [_find_reader(*reader) for reader in found]
                self._has_numpy = has_numpy
            for namespace, name, _, watched in self._readers:
                namespace[name] = watched

    def _are_replaced(self) -> bool:
        """Return True if the user has replaced a function since the functions were found."""
        for namespace, name, original, _ in self._readers:
            if namespace[name] is not original:
                return True
        return False

    def stop(self) -> None:
        with self._lock:
            self.num_users -= 1
            if self.num_users == 0:
                for namespace, name, original, _ in self._readers:
                    namespace[name] = original


state_reads = StateReads()

_READERS = (
    ("random", "getstate", "of_globals"),
    ("numpy.random", "get_state", "of_globals"),
    ("torch", "initial_seed", "of_torch"),
    ("torch", "get_rng_state", "of_torch"),
    ("torch.random", "initial_seed", "of_torch"),
    ("torch.random", "get_rng_state", "of_torch"),
)


@contextmanager
def watching_state_reads() -> Iterator[None]:
    """Watch for calls that read a generator's state (such as ``random.getstate``) in the block."""
    state_reads.start()
    try:
        yield
    finally:
        state_reads.stop()


def _find_reader(module_name: str, name: str, mark: str) -> tuple[dict[str, Any], str, Any, Any]:
    namespace = vars(sys.modules[module_name])
    original = namespace[name]
    return namespace, name, original, _watched(original, mark)


def _watched(original: Callable[..., Any], mark: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **keywords: Any) -> Any:
        setattr(state_reads, mark, object())
        return original(*args, **keywords)

    return read
