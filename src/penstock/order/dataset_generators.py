"""Generators that only the dataset knows: which are there, and how is each set for a sample?

``self.rng = np.random.default_rng()`` in a dataset, albumentations' and MONAI's transforms, a
module's own ``random.Random(0)``: none of them is one of the global generators that are set for
each sample. They are found by a bounded walk over the dataset's attributes (a few milliseconds,
once per worker) and set in place from the sample's key, so unmodified code draws the same whichever
worker runs it. What is found and cannot be set is listed with the reason.

A generator that code makes anew in each sample (``np.random.default_rng()`` inside ``__getitem__``)
is invisible here: that is what ``penstock.rng()`` replaces.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.order.keys import GOLDEN, mix64
from penstock.order.object_walk import walk

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
        dataset: What is walked over.
        is_worker: In a worker process, where torch's ``get_worker_info()`` is set: a pipeline that
            would seed itself there is told not to.
    """
    found: list[FoundGenerator] = []
    modules: set[str] = set()

    def visit(path: str, value: Any) -> bool:
        one = _recognise(path, value, is_worker)
        if one is not None:
            found.append(one)
        return one is None  # nothing to look for inside of it

    walk(dataset, visit, modules)
    return found + _of_libraries(modules)


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
    """How to set a bit generator in place. A RandomState also forgets its normal in reserve."""
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


def _of_libraries(modules: Iterable[str]) -> list[FoundGenerator]:
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
