"""Finds the random generators held by a dataset or collate_fn, and sets them for each sample.

Examples are ``self.rng = np.random.default_rng()`` in a dataset, the transforms of albumentations
and MONAI, and a module's own ``random.Random(0)``. These are not the global generators that are set
for each sample. They are found by a walk over the objects that the code can reach
(:mod:`penstock.order.object_walk`), and are set in place from the sample's key and their path.
Unmodified code then draws the same numbers in any worker. A generator that cannot be set is listed
with the reason.

The walk takes less than a millisecond for most datasets. It is repeated after the first sample,
which may have created generators. A generator that the code creates in each sample
(``np.random.default_rng()`` inside ``__getitem__``) cannot be set. Use ``penstock.rng()`` instead.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import pickle
import random
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.named_tuple import NamedTuple
from penstock.order.keys import mix64
from penstock.order.object_walk import (
    CONTAINERS,
    MAX_DEPTH,
    MAX_OBJECTS,
    ObjectWalk,
    module_of,
    plain_items,
    plain_length,
)
from penstock.user_objects import own_attributes

_TORCH_GENERATOR = ("torch._C", "Generator")
_MAKERS = (
    {"default_rng", "Generator", "RandomState", "Random", "SystemRandom", "SeedSequence"}
    | {"PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937"}
    | {"urandom", "uuid1", "uuid4", "token_bytes", "token_hex", "randbits", "randbelow"}
    | {"globals", "eval", "exec"}
)
"""Names in code that creates generators, or reads randomness from the operating system."""
_MAY_DRAW = _MAKERS | {"random"}
_STATE_READERS = {
    *("bit_generator", "state", "getstate", "setstate", "get_state", "set_state", "seed_seq"),
    *("copy", "deepcopy", "jumped", "spawn", "initial_seed", "clone_state", "__getstate__"),
}
"""Names in code that may copy a generator, or restore its state after drawing."""
SLOW_SEARCH_S = 0.05
_PLAIN = (str, bytes, int, float, complex, type(None))
_MAX_HOLDERS = 64
_CHECKED_ITEMS = 256
_CHECKED_BYTES = 1 << 16

State = Any
"""A generator's state. It can be compared with ``==`` and restored."""
Contents = dict[tuple[str, str], Any]
"""Maps (path of an object, name in the object) to a value that changes when the item does."""


class GeneratorAccess(NamedTuple):
    """Functions that seed a generator, and save and restore its state.

    Args:
        save: None if the state cannot be read.
    """

    seed: Callable[[int], object]
    save: Callable[[], State] | None = None
    restore: Callable[[State], object] | None = None


class FoundGenerator(NamedTuple):
    """A generator found by the walk.

    Args:
        path: Its path, starting from the dataset: ``dataset.transform.rng``.
        kind: Its class, or the library that owns it.
        why_not: The reason it cannot be set. None if it can.
    """

    path: str
    kind: str
    why_not: str | None = None
    access: GeneratorAccess | None = None

    @property
    def can_be_set(self) -> bool:
        return self.access is not None

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})" + (f": {self.why_not}" if self.why_not else "")


class DatasetGenerators:
    """The generators of a dataset (or collate_fn), set together before each sample.

    Args:
        root: The object where the search begins.
        path: Its name in messages.
        is_worker: True in a worker process, where torch's ``get_worker_info()`` is set. Stops
            pipelines from seeding themselves there.
        states: States by path, for generators that a worker process created again because it
            imported their module. See :func:`name_generators`.
        names: Names from the parent. See :class:`NamedGenerators`.

    Called in the process and thread that loads, on that process's copies of the objects. Changes
    albumentations' transforms of one pipeline to share one pair of generators.

    Example:
        >>> class Data:
        ...     def __init__(self):
        ...         self.rng = np.random.default_rng()
        >>> data = Data()
        >>> own = DatasetGenerators(data)
        >>> [str(one) for one in own.found]
        ['dataset.rng (numpy.random.Generator)']
        >>> own.set(7); first = data.rng.random(); own.set(7)
        >>> data.rng.random() == first
        True
    """

    def __init__(
        self,
        root: Any,
        *,
        path: str = "dataset",
        is_worker: bool = False,
        states: Mapping[str, State] | None = None,
        names: NamedGenerators | None = None,
    ) -> None:
        self.path, self._root, self._is_worker = path, root, is_worker
        self.found: list[FoundGenerator] = []
        self.is_complete = True
        self.makes_generators = False
        """True if code that a sample can run references a generator factory."""
        self.names_random = False
        """True if that code references ``random``, of Python or NumPy."""
        self.reads_states = False
        """True if that code references something that copies or restores a generator's state."""
        self._known: dict[int, Any] = {}  # an id is unique only while its object is alive
        self._given = names.by_root.get(path, []) if names is not None else []
        self._names = {id(value): name for name, value in self._given}
        self._setters: list[tuple[Callable[[int], object], int]] = []
        self._search_s = 0.0
        self.search()
        for one in self.found:
            if states and one.path in states and one.access and one.access.restore:
                one.access.restore(states[one.path])

    def __bool__(self) -> bool:
        return bool(self._setters)

    @property
    def may_draw(self) -> bool:
        """False if a sample seems to draw nothing from generators of Python and NumPy."""
        return bool(self.found) or self.makes_generators or self.names_random

    def search(self) -> list[FoundGenerator]:
        """Search for generators. Returns those not found before.

        A slow search is not repeated, unless the code creates generators.
        """
        if self._search_s > SLOW_SEARCH_S and not self.makes_generators:
            return []
        started = time.perf_counter()
        walk = ObjectWalk(_is_generator, _barren_of(self._root))
        new: list[FoundGenerator] = []
        reached = list(walk.find(self.path, self._root))
        # Names of generators that are not reached are free: another thread's, for example.
        taken = {self._names[id(value)] for _, value in reached if id(value) in self._names}
        for path, value in reached:
            if id(value) not in self._known:
                self._known[id(value)] = value
                name = self._names.get(id(value)) or _unique(path, taken)
                self._names[id(value)] = name
                one = _recognise(name, value, self._is_worker)
                new += [one] if one is not None else []
        paths = {one.path for one in self.found}
        new += [one for one in _of_libraries(walk.modules) if one.path not in paths]
        self.found += new
        for one in new:
            if one.access is not None:
                digest = hashlib.blake2b(one.path.encode(), digest_size=8).digest()
                self._setters.append((one.access.seed, int.from_bytes(digest, "little")))
        self.is_complete = self.is_complete and walk.is_complete
        self.makes_generators = not _MAKERS.isdisjoint(walk.names)
        self.names_random = "random" in walk.names
        self.reads_states = not _STATE_READERS.isdisjoint(walk.names)
        self._search_s = time.perf_counter() - started
        return new

    def set(self, seed: int) -> None:
        """Set every generator from 64 bits of the sample. Each one gets different bits."""
        for seed_one, salt in self._setters:
            seed_one(mix64(seed ^ salt))

    # -- states ----------------------------------------------------------------------------------

    def save(self) -> list[State]:
        """Return the states of all generators that can be read."""
        return [one.access.save() for one in self._readable()]

    def restore(self, states: list[State]) -> None:
        """Undo what was drawn since :meth:`save`."""
        for one, state in zip(self._readable(), states, strict=False):
            one.access.restore(state)

    def moved_since(self, states: list[State]) -> list[str]:
        """Return the generators that were drawn from since :meth:`save`."""
        pairs = zip(self._readable(), states, strict=False)
        return [str(one) for one, state in pairs if one.access.save() != state]

    def set_unreadable(self, seed: int) -> None:
        """Set the generators whose state cannot be read."""
        readable = {id(one.access.seed) for one in self._readable()}
        for seed_one, salt in self._setters:
            if id(seed_one) not in readable:
                seed_one(mix64(seed ^ salt))

    def _readable(self) -> list[Any]:
        return [one for one in self.found if one.access is not None and one.access.save is not None]

    # -- changes to the dataset ------------------------------------------------------------------

    def contents(self, *, only_data: bool = False) -> Contents:
        """Return the current contents of the dataset's nearest objects, for :func:`changed_paths`.

        Plain values are excluded, because they often change (counters).

        Args:
            only_data: Include only arrays, tensors and containers, not open files, for example.
        """
        walk = ObjectWalk(_is_generator, _barren_of(self._root))
        deque(walk.find(self.path, self._root, _MAX_HOLDERS), maxlen=0)
        items = (item for holder in walk.holders for item in _contents_of(*holder))
        return {place: held for place, held, is_data in items if is_data or not only_data}


def changed_paths(before: Contents, after: Contents) -> list[str]:
    """Return the paths at which objects present before have different contents."""
    return [
        holder + name
        for (holder, name), held in after.items()
        if (holder, "") in before and before.get((holder, name)) != held
    ]


class NamedGenerators(NamedTuple):
    """The names of generators, for a process that receives copies of them.

    A generator's numbers depend on its name, which is its path in the parent. The path can differ
    in a worker, because a class that is pickled by value loses its qualified name and the order of
    its attributes. Sent in the same pickle as the dataset, this names the copies.

    Args:
        by_root: Pairs of name and generator, by ``"dataset"`` or ``"collate_fn"``.
    """

    by_root: dict[str, list[tuple[str, Any]]]


def name_generators(**roots: Any) -> tuple[NamedGenerators, dict[str, State], bool]:
    """Name the generators of a dataset and a collate_fn. Called by the parent before workers start.

    Returns the names, and the states by name of generators in modules, which a worker process may
    import again. Pairs with ``names`` and ``states`` of :class:`DatasetGenerators`. The last value
    is False if a sample seems to draw nothing from generators of Python and NumPy.
    """
    names = NamedGenerators({})
    states: dict[str, State] = {}
    may_draw = False
    for path, root in roots.items():
        taken: set[str] = set()
        walk = ObjectWalk(_is_generator, _barren_of(root))
        found = walk.find(path, root)
        pairs = names.by_root[path] = [(_unique(place, taken), value) for place, value in found]
        may_draw = may_draw or bool(pairs) or not _MAY_DRAW.isdisjoint(walk.names)
        for name, value in pairs:
            if name.startswith((f"{path}.", f"{path}[")):
                continue
            one = _recognise(name, value, is_worker=False)
            if one is not None and one.access is not None and one.access.save is not None:
                states[name] = one.access.save()
    return names, states, may_draw


def _unique(path: str, taken: set[str]) -> str:
    """Return a name that no other generator has, and reserve it."""
    names = (path if number == 1 else f"{path}#{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


_barren: dict[int, tuple[weakref.ref[Any], dict[int, int]]] = {}
"""Large containers without generators, by dataset. Each epoch without workers searches again."""


def _barren_of(root: Any) -> dict[int, int]:
    known = _barren.get(id(root))
    if known is not None and known[0]() is root:
        return known[1]
    containers: dict[int, int] = {}
    with suppress(TypeError):  # the object does not support weak references
        key = id(root)
        _barren[key] = weakref.ref(root, lambda _: _barren.pop(key, None)), containers
    return containers


def describe_search_limit(path: str) -> str:
    return (
        f"{path} was not searched completely for generators, because it holds more than "
        f"{MAX_OBJECTS:,} objects or is nested deeper than {MAX_DEPTH} levels. Draws from a "
        "generator that was not found depend on which worker loads the sample"
    )


def _contents_of(path: str, value: Any) -> Iterator[tuple[tuple[str, str], Any, bool]]:
    """Yield (place, identity, is_data), starting with the object itself."""
    items: list[tuple[str, Any]] = []
    if issubclass(type(value), CONTAINERS):
        length = plain_length(value)
        yield (path, ""), length, True
        if length <= _CHECKED_ITEMS:
            items = [(f"[{key}]", item) for key, item in plain_items(value)]
    else:
        yield (path, ""), None, True
        items = [(f".{name}", item) for name, item in own_attributes(value).items()]
    for name, item in items:
        if not (issubclass(type(item), _PLAIN) or _is_generator(item)):
            yield (path, name), _identity(item), _is_data(item)


def _is_data(value: Any) -> bool:
    torch = sys.modules.get("torch")
    kinds = (*CONTAINERS, np.ndarray, *([torch.Tensor] if torch is not None else []))
    return issubclass(type(value), kinds)


def _identity(value: Any) -> Any:
    """Return a value that also changes with an array's elements."""
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor and value.device.type == "cpu":
        with suppress(RuntimeError, TypeError):  # a layout or dtype that NumPy does not support
            return id(value), _checksum(value.detach().numpy())
    if issubclass(type(value), np.ndarray) and not value.dtype.hasobject:
        return id(value), _checksum(value)
    return id(value)


def _checksum(array: Any) -> int:
    flat = np.ndarray.reshape(array, -1)
    return zlib.crc32(flat[:: 1 + flat.nbytes // _CHECKED_BYTES].tobytes())


# -- recognizing and setting generators ------------------------------------------------------------


_all_kinds: tuple[type, ...] = ()
"""Classes of generators, with NumPy's. Empty until ``numpy.random`` is imported."""


def _generator_kinds() -> tuple[type, ...]:
    """Return the classes of generators that can exist now.

    NumPy imports ``numpy.random`` on first use. Importing it takes a third of the time of importing
    the loader, so it is left to the process that loads samples.
    """
    global _all_kinds
    if not _all_kinds:
        # Without the class it is not imported, or another thread is importing it.
        if not hasattr(sys.modules.get("numpy.random"), "RandomState"):
            return (random.Random,)
        numpy = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
        _all_kinds = (*numpy, random.Random)
    return _all_kinds


def _is_generator(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, _generator_kinds()) or (module_of(kind), kind.__name__) == _TORCH_GENERATOR:
        return True
    return module_of(kind).startswith("albumentations.") and _takes_states(value)


def _recognise(path: str, value: Any, is_worker: bool) -> FoundGenerator | None:
    """Return the generator at ``path``. None for the global ones, which are set separately."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.random.Generator):
        return _settable(path, "numpy.random.Generator", _bits_access(value.bit_generator))
    if isinstance(value, np.random.BitGenerator):
        return _settable(path, kind, _bits_access(value))
    if isinstance(value, np.random.RandomState):
        if value is np.random.mtrand._rand:
            return None
        return _settable(path, "numpy.random.RandomState", _random_state_access(value))
    if isinstance(value, random.SystemRandom):
        why_not = "it draws from the operating system"
        return FoundGenerator(path=path, kind="random.SystemRandom", why_not=why_not)
    if isinstance(value, random.Random):
        if value is random._inst:
            return None
        return _settable(path, "random.Random", _python_access(value))
    if kind == "torch._C.Generator":
        return _recognise_torch(path, value)
    return _settable(path, "albumentations", _share_generators(value, is_worker))


def _settable(path: str, kind: str, access: GeneratorAccess) -> FoundGenerator:
    try:
        state = access.save() if access.save is not None else None
    except Exception:  # a class that can be seeded but not read
        access, state = GeneratorAccess(seed=access.seed), None
    try:
        access.seed(0)
        if access.restore is not None:
            access.restore(state)
    except Exception as error:  # another library's class can raise anything
        return FoundGenerator(path=path, kind=kind, why_not=f"setting it fails: {error!r}")
    return FoundGenerator(path=path, kind=kind, access=access)


def _recognise_torch(path: str, value: Any) -> FoundGenerator | None:
    import torch

    if value is torch.default_generator:
        return None
    if value.device.type != "cpu":
        return FoundGenerator(
            path=path, kind="torch.Generator", why_not=f"it is on device {value.device}"
        )

    def save() -> bytes:
        return bytes(value.get_state().numpy())

    def restore(state: bytes) -> None:
        value.set_state(torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy()))

    access = GeneratorAccess(seed=value.manual_seed, save=save, restore=restore)
    return _settable(path, "torch.Generator", access)


def _python_access(value: random.Random) -> GeneratorAccess:
    return GeneratorAccess(seed=value.seed, save=value.getstate, restore=value.setstate)


def _bits_access(bits: Any) -> GeneratorAccess:
    """Return the access to one of NumPy's bit generators, which is set in place."""

    def restore(state: bytes) -> None:
        bits.state = pickle.loads(state)

    def seed_any(seed: int) -> None:
        bits.state = type(bits)(seed).state  # 20 microseconds, the fastest that works for all

    is_pcg = type(bits) in (np.random.PCG64, np.random.PCG64DXSM)
    return GeneratorAccess(
        seed=_pcg_seeder(bits) if is_pcg else seed_any,
        save=lambda: pickle.dumps(bits.state),
        restore=restore,
    )


def _pcg_seeder(bits: Any) -> Callable[[int], object]:
    name = type(bits).__name__

    def seed_pcg(seed: int) -> None:
        high, low = mix64(seed + 1), mix64(seed + 2)
        inner = {"state": seed << 64 | high, "inc": low << 64 | high | 1}
        bits.state = {"bit_generator": name, "state": inner, "has_uint32": 0, "uinteger": 0}

    return seed_pcg


def _random_state_access(value: np.random.RandomState) -> GeneratorAccess:
    """A RandomState also caches a normal variate, which seeding must clear."""
    bits: Any = value._bit_generator
    by_bits = _bits_access(bits).seed

    def seed_twister(seed: int) -> None:
        value.seed(seed & 0xFFFFFFFF)

    def seed_other(seed: int) -> None:
        by_bits(seed)
        state: Any = value.get_state(legacy=False)
        value.set_state({**state, "has_gauss": 0, "gauss": 0.0})

    def restore(state: bytes) -> None:
        value.set_state(pickle.loads(state))

    is_twister = type(bits) is np.random.MT19937
    return GeneratorAccess(
        seed=seed_twister if is_twister else seed_other,
        save=lambda: pickle.dumps(value.get_state(legacy=False)),
        restore=restore,
    )


# -- libraries -------------------------------------------------------------------------------------


def _takes_states(value: Any) -> bool:
    """Return True for a pipeline or transform instance of albumentations 1.4.22 or newer.

    Older versions draw from the global generators. Classes, which code can reference, do not count.
    """
    if isinstance(value, type):
        return False
    try:
        parameters = inspect.signature(value.set_random_state).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return {"random_generator", "py_random"} <= set(parameters)


def _share_generators(pipeline: Any, is_worker: bool) -> GeneratorAccess:
    """Make all transforms of a pipeline share one pair of generators, instead of two each.

    It is the pipeline's own pair, so that repeating this changes nothing. Threads share a dataset,
    and each of them calls this.
    """
    generator, python = _pair_of(pipeline)
    pipeline.set_random_state(generator, python)
    if is_worker and hasattr(pipeline, "_check_worker_seed"):
        # In a worker, AlbumentationsX replaces the pair whenever torch's seed has changed, which
        # here is before each sample. Without workers it does not, so the numbers would differ.
        pipeline._check_worker_seed = _keep
    numpy_access = _bits_access(generator.bit_generator)

    def seed_both(seed: int) -> None:
        numpy_access.seed(seed)
        python.seed(seed)

    def save() -> State:
        return pickle.dumps(generator.bit_generator.state), python.getstate()

    def restore(state: State) -> None:
        generator.bit_generator.state = pickle.loads(state[0])
        python.setstate(state[1])

    return GeneratorAccess(seed=seed_both, save=save, restore=restore)


def _pair_of(pipeline: Any) -> tuple[np.random.Generator, random.Random]:
    generator = getattr(pipeline, "random_generator", None)
    python = getattr(pipeline, "py_random", None)
    if not isinstance(generator, np.random.Generator):
        generator = np.random.default_rng(0)
    if not isinstance(python, random.Random) or python is random._inst:
        python = random.Random(0)
    return generator, python


def _keep() -> None:
    """Replaces a pipeline's own seeding."""


def _of_libraries(modules: set[str]) -> list[FoundGenerator]:
    """Return the libraries with their own generator that the walked code imports."""
    found: list[FoundGenerator] = []
    used = {name.partition(".")[0] for name in modules}
    opencv: Any = sys.modules.get("cv2")
    if "cv2" in used and hasattr(opencv, "setRNGSeed"):
        set_opencv = opencv.setRNGSeed
        access = GeneratorAccess(seed=lambda seed: set_opencv(seed & 0x7FFFFFFF))
        found.append(_settable("cv2", "cv2", access))
    imgaug: Any = sys.modules.get("imgaug.random")
    if "imgaug" in used and hasattr(imgaug, "seed"):
        seed_imgaug = imgaug.seed
        access = GeneratorAccess(seed=lambda seed: seed_imgaug(seed & 0x7FFFFFFF))
        found.append(_settable("imgaug", "imgaug", access))
    return found
