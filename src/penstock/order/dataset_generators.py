"""Generators that a dataset holds itself: find them, and set them for each sample.

``self.rng = np.random.default_rng()`` in a dataset, albumentations' and MONAI's transforms, a
module's own ``random.Random(0)``: none of them is one of the global generators that are set for
each sample. They are found by a walk over what the dataset holds (attributes, containers, closures,
module globals), and set in place from the sample's key, so unmodified code draws the same whichever
worker runs it. A generator that cannot be set is listed with the reason.

The walk is bounded in objects, depth and items per container, because a dataset may hold a million
paths or half a library. It takes a few milliseconds, once per worker, and neither calls nor copies
anything.

A generator that code makes anew in each sample (``np.random.default_rng()`` inside ``__getitem__``)
is not found: that is what ``penstock.rng()`` replaces.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from penstock.order.keys import GOLDEN, mix64

MAX_OBJECTS = 5000
MAX_DEPTH = 8
MAX_ITEMS = 64
"""Of a list or dictionary: transforms come in short ones, samples in long ones."""

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray, np.generic)
_OPAQUE = (types.ModuleType, type, range, memoryview)
_LIBRARIES = frozenset(
    ("builtins", "torch", "torchvision", "numpy", "collections", "functools", "penstock")
)
"""Their classes hold no generators in their modules that a sample would draw from."""
_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)

Setter = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class FoundGenerator:
    """One that was found.

    Args:
        path: Where, from the dataset on: ``dataset.transform.rng``.
        kind: Its class, or the library that owns it.
        why_not: Why it cannot be set; None: it can.
    """

    path: str
    kind: str
    why_not: str | None = None
    setter: Setter | None = field(default=None, repr=False, compare=False)

    @property
    def can_be_set(self) -> bool:
        return self.setter is not None

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})" + (f": {self.why_not}" if self.why_not else "")


class DatasetGenerators:
    """The dataset's own generators, to be set together before each sample.

    Called from: the process and thread that loads; the objects are that process' copies. Changes
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

    def __init__(self, dataset: Any, *, is_worker: bool = False) -> None:
        self.found = find_generators(dataset, is_worker=is_worker)
        self._setters = [one.setter for one in self.found if one.setter is not None]

    def __bool__(self) -> bool:
        return bool(self._setters)

    def set(self, seed: int) -> None:
        """Set every one of them from 64 bits of the sample's own. Each gets other bits."""
        for setter in self._setters:
            seed += GOLDEN
            setter(mix64(seed))


def find_generators(dataset: Any, *, is_worker: bool = False) -> list[FoundGenerator]:
    """List the generators that ``dataset`` holds, in its attributes, closures and modules.

    Args:
        dataset: Where the walk begins; its path is ``dataset``.
        is_worker: In a worker process, where torch's ``get_worker_info()`` is set: a pipeline that
            would seed itself there is told not to.
    """
    found: list[FoundGenerator] = []
    walk = _Walk()
    queue: deque[tuple[str, Any, int]] = deque([("dataset", dataset, 0)])
    while queue and len(walk.seen) < MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if not walk.enter(value):
            continue
        one = _recognise(path, value, is_worker)
        if one is not None:
            found.append(one)
        elif depth < MAX_DEPTH:
            queue.extend((*item, depth + 1) for item in walk.inside(path, value))
    return found + _of_libraries(walk.modules)


# -- walking over what a dataset holds -------------------------------------------------------------


class _Walk:
    """Objects that were visited, and ``modules`` that their code imports."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.modules: set[str] = set()
        self._kept: list[Any] = []  # an id is only unique while its object lives

    def enter(self, value: Any) -> bool:
        """Is this an object to look at, for the first time?"""
        if isinstance(value, (_PLAIN, _OPAQUE)) or id(value) in self.seen or _is_tensor(value):
            return False
        if getattr(type(value), "draws_nothing", False) is True:  # mapped files of a packed set
            return False
        self.seen.add(id(value))
        self._kept.append(value)
        return True

    def inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The paths and values that an object holds."""
        if isinstance(value, dict):
            for key, item in islice(value.items(), MAX_ITEMS):
                yield f"{path}[{key!r}]", item
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            for place, item in enumerate(islice(value, MAX_ITEMS)):
                yield f"{path}[{place}]", item
        elif isinstance(value, functools.partial):
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif hasattr(value, "__self__"):  # a bound method, of Python's or of a compiled class
            yield f"{path}.__self__", value.__self__
            yield f"{path}.__func__", getattr(value, "__func__", None)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        else:
            for name, item in islice(_attributes(value), MAX_ITEMS):
                yield f"{path}.{name}", item
            yield from self._of_classes(type(value))

    def _of_classes(self, cls: type) -> Iterator[tuple[str, Any]]:
        """Generators in the class body, and in the globals that its methods name."""
        for base in cls.__mro__:
            if id(base) in self.seen or base.__module__.partition(".")[0] in _LIBRARIES:
                continue
            self.seen.add(id(base))  # classes live on
            self.modules.add(base.__module__)
            for name, item in base.__dict__.items():
                function = getattr(item, "__func__", item)  # of a class method or a static one
                if isinstance(item, _GENERATORS):
                    yield f"{base.__qualname__}.{name}", item
                elif isinstance(function, types.FunctionType):
                    yield from self._of_function(f"{base.__qualname__}.{name}", function)

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=False):
            try:
                yield f"{path}.{name}", cell.cell_contents
            except ValueError:
                pass  # not filled yet
        for item in (function.__defaults__, function.__kwdefaults__):
            if item is not None:
                yield f"{path}.<defaults>", item
        for name in _global_names(function.__code__):
            item = function.__globals__.get(name)
            if isinstance(item, types.ModuleType):
                self.modules.add(item.__name__)
            elif isinstance(item, _GENERATORS) or type(item).__module__ == "torch._C":
                yield f"{function.__module__}.{name}", item


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from held.items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(cls.__dict__.get(name), types.MemberDescriptorType):
                try:
                    yield name, getattr(value, name)
                except AttributeError:
                    pass  # a slot without a value


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


# -- recognising and setting generators ------------------------------------------------------------


def _recognise(path: str, value: Any, is_worker: bool) -> FoundGenerator | None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.random.Generator):
        return _settable(path, "numpy.random.Generator", _bits_setter(value.bit_generator))
    if isinstance(value, np.random.BitGenerator):
        return _settable(path, kind, _bits_setter(value))
    if isinstance(value, np.random.RandomState):
        if value is np.random.mtrand._rand:  # the global one, which is set anyway
            return None
        bits = value._bit_generator
        return _settable(path, "numpy.random.RandomState", _bits_setter(bits, value))
    if isinstance(value, random.SystemRandom):
        why_not = "it asks the operating system"
        return FoundGenerator(path=path, kind="random.SystemRandom", why_not=why_not)
    if isinstance(value, random.Random):
        if value is random._inst:
            return None
        return _settable(path, "random.Random", value.seed)
    if kind == "torch._C.Generator":
        return _recognise_torch(path, value)
    if kind.startswith("albumentations.") and _takes_states(value):
        return _settable(path, "albumentations", _share_generators(value, is_worker))
    return None


def _settable(path: str, kind: str, setter: Setter) -> FoundGenerator:
    try:
        setter(0)
    except Exception as error:  # another library's class: it may refuse in any way
        return FoundGenerator(path=path, kind=kind, why_not=f"setting it fails: {error!r}")
    return FoundGenerator(path=path, kind=kind, setter=setter)


def _recognise_torch(path: str, value: Any) -> FoundGenerator | None:
    import torch

    if value is torch.default_generator:
        return None
    if value.device.type != "cpu":
        return FoundGenerator(
            path=path, kind="torch.Generator", why_not=f"it lives on {value.device}"
        )
    return _settable(path, "torch.Generator", value.manual_seed)


def _bits_setter(bits: Any, owner: np.random.RandomState | None = None) -> Setter:
    """How to set a bit generator in place. A RandomState also clears its cached normal."""
    if type(bits) in (np.random.PCG64, np.random.PCG64DXSM):
        name = type(bits).__name__

        def set_pcg(seed: int) -> None:
            high, low = mix64(seed + 1), mix64(seed + 2)
            inner = {"state": seed << 64 | high, "inc": low << 64 | high | 1}
            bits.state = {"bit_generator": name, "state": inner, "has_uint32": 0, "uinteger": 0}

        return set_pcg
    if owner is not None and type(bits) is np.random.MT19937:
        return lambda seed: owner.seed(seed & 0xFFFFFFFF)

    def set_any(seed: int) -> None:
        bits.state = type(bits)(seed).state  # 20 microseconds: there is no shorter way for all

    return set_any


# -- libraries -------------------------------------------------------------------------------------


def _takes_states(value: Any) -> bool:
    """Is this a pipeline (or transform) of albumentations 1.4.22 or newer? Older ones draw from the
    global generators."""
    try:
        parameters = inspect.signature(value.set_random_state).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return {"random_generator", "py_random"} <= set(parameters)


def _share_generators(pipeline: Any, is_worker: bool) -> Setter:
    """Give all transforms of a pipeline one pair of generators: two to set instead of two each.

    It is the pipeline's own pair, so that doing this again changes nothing: threads share a
    dataset, and each of them does it.
    """
    generator, python = _pair_of(pipeline)
    pipeline.set_random_state(generator, python)
    if is_worker and hasattr(pipeline, "_check_worker_seed"):
        # AlbumentationsX replaces the pair whenever torch's seed has changed in a worker, which
        # here is before each sample; without workers it does not, and the numbers would differ.
        pipeline._check_worker_seed = _keep
    set_numpy = _bits_setter(generator.bit_generator)

    def set_both(seed: int) -> None:
        set_numpy(seed)
        python.seed(seed)

    return set_both


def _pair_of(pipeline: Any) -> tuple[np.random.Generator, random.Random]:
    generator = getattr(pipeline, "random_generator", None)
    python = getattr(pipeline, "py_random", None)
    if not isinstance(generator, np.random.Generator):
        generator = np.random.default_rng(0)
    if not isinstance(python, random.Random) or python is random._inst:
        python = random.Random(0)
    return generator, python


def _keep() -> None:
    """Stands in for a pipeline's own seeding."""


def _of_libraries(modules: set[str]) -> list[FoundGenerator]:
    """Libraries with a generator of their own that the walked-over code imports."""
    found: list[FoundGenerator] = []
    used = {name.partition(".")[0] for name in modules}
    opencv: Any = sys.modules.get("cv2")
    if "cv2" in used and hasattr(opencv, "setRNGSeed"):
        set_opencv = opencv.setRNGSeed
        found.append(_settable("cv2", "cv2", lambda seed: set_opencv(seed & 0x7FFFFFFF)))
    imgaug: Any = sys.modules.get("imgaug.random")
    if "imgaug" in used and hasattr(imgaug, "seed"):
        seed_imgaug = imgaug.seed
        found.append(_settable("imgaug", "imgaug", lambda seed: seed_imgaug(seed & 0x7FFFFFFF)))
    return found
