"""Pickles the dataset and functions once for all workers, with large buffers out of band.

    parent: PickledObjects(objects).to_shared_file() -> PickleFile
    worker: unpickling.unpickle_objects(PickleFile.location) -> objects

Lambdas, closures, local classes and everything from ``__main__``, a notebook or a module that a
worker cannot import are pickled by value (cloudpickle). Arrays and tensors are stored outside the
pickle stream, as buffers that every worker maps copy-on-write. multiprocessing primitives are sent
as with spawn, open handles are reopened, and sockets are rejected. The error for an object that
cannot be pickled names the attribute.
"""

from __future__ import annotations

import importlib
import io
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context as mp_context
from multiprocessing import reduction
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from penstock.engine.memory.messages import PickleLocation
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.pickling import reducers
from penstock.engine.pickling.by_value import ByValueModules
from penstock.engine.pickling.dynamic_attributes import computes_attributes, reduce_by_class
from penstock.engine.pickling.handles import (
    HandleReducer,
    is_handle_class,
    reduce_reopenable,
)
from penstock.engine.pickling.process_bound import connections_of_queue, is_suspect, why_bound
from penstock.engine.pickling.reloads import count_reloads
from penstock.engine.pickling.unpickling import InheritedFd
from penstock.errors import CannotTravel, MissingExtra
from penstock.machine.host import free_memory_bytes
from penstock.named_tuple import NamedTuple
from penstock.order.dataset_generators import NamedGenerators

if TYPE_CHECKING:
    from penstock.engine.pickling.inherited_arrays import ServerMemory
    from penstock.engine.pickling.shared_arrays import SharedBuffer

LARGE_BYTES = 64 << 20
"""Larger buffers may be shared with this process. glibc always allocates blocks above 32 MiB with
mmap. Below 64 MiB, a copy is cheap."""
_BUFFER_GRAIN = 64
_MAX_FDS = 200
"""A message to the fork server can carry 250 descriptors, including the engine's own."""


class PickleFile(NamedTuple):
    """The parent's view of pickled objects in shared memory. Must be closed."""

    file: SharedFile
    location: PickleLocation
    fds: list[int]
    kept: list[Any]
    """Owners of the descriptors, which stay open while workers can be started."""
    notes: tuple[str, ...]
    """Messages for the user about open handles and large arrays."""

    def close(self) -> None:
        self.file.close()
        self.kept.clear()


class _SpawningProcess:
    """Replaces the Popen object that multiprocessing expects while it spawns a process."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.kept: list[Any] = []

    @property
    def is_full(self) -> bool:
        """True if no descriptor can be added. Objects are then sent as copies where possible."""
        return len(self.fds) >= _MAX_FDS

    def duplicate_for_child(self, fd: int) -> int:
        if sys.platform == "win32":  # pragma: no cover
            raise RuntimeError("handles cannot be sent to workers on Windows")
        self.fds.append(fd)
        return len(self.fds) - 1

    DupFd = staticmethod(InheritedFd)

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = mp_context.get_spawning_popen()
        mp_context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            mp_context.set_spawning_popen(before)


class DatasetPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler with out-of-band tensors and multiprocessing's reducers."""

    def __init__(self, file: Any, buffer_callback: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.modules: set[str] = set()
        self.by_value = ByValueModules()
        self.large_tensors: list[Any] = []
        self.handles = HandleReducer()
        self.process = _SpawningProcess()
        self._classes: dict[type, tuple[bool, bool]] = {}
        self._guarded_pipes: dict[int, Any] = {}
        self._reducers = _process_reducers()
        self.named: dict[int, Any] = {}
        """Generators whose names are sent, by id."""
        self._met: set[int] = set()

    def dump(self, obj: Any) -> None:
        with self.process.entered(), self.by_value:
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if id(obj) in self.named:
            self._met.add(id(obj))
        elif kind is NamedGenerators:
            return NamedGenerators, (self._met_only(obj.by_root),)
        is_named = issubclass(kind, (type, FunctionType, reducers.Cached))
        name = getattr(obj if is_named else kind, "__module__", None)
        if isinstance(name, str):
            self._add_module(obj.__name__ if issubclass(kind, ModuleType) else name)
        if obj is random._inst:
            return getattr, (random, "_inst")  # the worker's own generator, not a copy
        if kind.__name__ == "RandomState" and obj is np.random.mtrand._rand:
            return getattr, (np.random.mtrand, "_rand")
        if issubclass(kind, ModuleType) and kind is not ModuleType:
            reduced = _reduce_module(obj)
            if reduced is not None and obj.__name__ not in self.by_value.names:
                return reduced
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            reduced = _reduce_tensor(obj)
            if reduced is not None:
                if obj.numel() * obj.element_size() >= LARGE_BYTES:
                    self.large_tensors.append(obj)
                return reduced
        reopened = reduce_reopenable(obj)
        if reopened is not None:
            return reopened
        is_suspected, is_dynamic = self._classes.get(kind) or self._classify(kind)
        if is_suspected:
            self._refuse_bound(obj)
        if is_dynamic:
            reduced = reduce_by_class(obj)
            return super().reducer_override(obj) if reduced is None else reduced
        reduced = reducers.reduce(obj) or self.handles.reduce(obj)
        if reduced is not None:
            return reduced
        reducer = self._reducers.get(kind)
        if reducer is not None and not _is_unshared_storage(obj):
            return reducer(obj)
        synchronize = sys.modules.get("multiprocessing.synchronize")
        if synchronize is not None and isinstance(obj, synchronize.SemLock):
            _refuse_fork_primitive(obj)
        return super().reducer_override(obj)

    def _met_only(self, by_root: dict[str, Any]) -> dict[str, Any]:
        """Leave out generators that no pickled object refers to: those in imported modules."""
        return {
            root: [pair for pair in pairs if id(pair[1]) in self._met]
            for root, pairs in by_root.items()
        }

    def _refuse_bound(self, obj: Any) -> None:
        for pipe in connections_of_queue(obj):
            self._guarded_pipes[id(pipe)] = pipe
        if id(obj) not in self._guarded_pipes:
            reason = why_bound(obj)
            if reason:
                raise TypeError(reason)

    def _classify(self, kind: type) -> tuple[bool, bool]:
        """Return whether instances may be bound to a process, and whether to reduce by class."""
        has_reducer = kind in self.dispatch_table or kind in self._reducers or is_handle_class(kind)
        found = (is_suspect(kind), computes_attributes(kind) and not has_reducer)
        self._classes[kind] = found
        return found

    def _add_module(self, name: str) -> None:
        if name not in self.modules:
            self.modules.add(name)
            self.by_value.check(name)


def _reduce_module(module: ModuleType) -> Any:
    """Reduce a module of a class of its own, such as ``torch.backends.cudnn``, by its name."""
    name = module.__name__
    if sys.modules.get(name) is module:
        return importlib.import_module, (name,)
    package, _, last = name.rpartition(".")  # torch.ops is only an attribute of torch
    parent = sys.modules.get(package)
    return (getattr, (parent, last)) if getattr(parent, last, None) is module else None


def _is_unshared_storage(obj: Any) -> bool:
    """Return True for storages that torch would move to shared memory in place."""
    if not type(obj).__name__.endswith("Storage"):
        return False
    inner = getattr(obj, "_untyped_storage", None) or getattr(obj, "_storage", None) or obj
    return not inner.is_shared()


def _reduce_tensor(obj: Any) -> Any:
    if obj.device.type not in ("cpu", "meta"):
        raise TypeError(f"a tensor on {obj.device} cannot be sent to a worker process")
    import torch
    from torch.multiprocessing import reductions

    from penstock.engine.memory import tensor_reducers

    # A shared tensor uses torch's reducer, so that writes are visible everywhere. Quantized tensors
    # do not, because that reducer loses their scales.
    if not _is_shared(obj) or obj.is_quantized or tensor_reducers.has_own_pickling(obj):
        return tensor_reducers.reduce_tensor(obj)
    if obj.is_conj() or obj.is_neg():  # lost by torch's reducer
        return tensor_reducers.reduce_special(obj)
    if type(obj) is not torch.Tensor and type(obj) is not torch.nn.Parameter:  # class lost too
        return tensor_reducers.reduce_subclass(obj)
    return reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]


def _is_shared(tensor: Any) -> bool:
    try:
        return bool(tensor.is_shared())
    except (NotImplementedError, RuntimeError):  # for example sparse tensors, which have no storage
        return False


def _process_reducers() -> dict[type, Callable[[Any], Any]]:
    """Return the reducers of multiprocessing and torch for connections, heaps and storages.

    Tensors are not included, because torch reduces only shared ones. See :func:`_reduce_tensor`.
    """
    registered: dict[type, Callable[[Any], Any]] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return {
        kind: reducer
        for kind, reducer in registered.items()
        if not kind.__module__.startswith("torch") or kind.__name__.endswith("Storage")
    }


def _refuse_fork_primitive(lock: Any) -> None:
    is_fork = getattr(lock, "_is_fork_ctx", None)
    if is_fork is None:  # Python 3.10 and early 3.11 do not store the context
        name = getattr(lock._semlock, "name", None)
        is_fork = name is None
    if is_fork:
        raise TypeError(
            f"a {type(lock).__name__} created in the fork context works only in forked processes"
        )


class PickledObjects:
    """Objects as a pickle stream, created once for all workers.

    Large buffers still refer to the user's own memory.

    Args:
        objects: Objects by the names used in error messages, such as ``{"dataset": dataset}``.

    Raises:
        CannotTravel: An object cannot be pickled. The message names the attribute.
        MissingExtra: An object of Penstock needs a library that is not installed.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        main = sys.modules.get("__mp_main__")
        if main is not None:  # a spawned child, where the user's script has this name
            cloudpickle.register_pickle_by_value(main)
        self.stream = io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        pickler = DatasetPickler(self.stream, self.buffers.append)
        names = objects.get("generator_names")
        if names is not None:
            pairs = itertools.chain(*names.by_root.values())
            pickler.named = {id(generator): generator for _, generator in pairs}
        try:
            pickler.dump(objects)
        except MissingExtra:  # an image folder without a decoder
            raise
        except Exception as error:
            from penstock.engine.pickling.error_path import explain

            explained = explain(objects, error, _dump_and_discard)
            raise explained from (None if explained is error else error)
        self._process = pickler.process
        self.notes = pickler.handles.notes
        self._large_tensors = pickler.large_tensors
        modules = _importable(pickler.modules - pickler.by_value.names)
        if not objects.get("waits_for_numpy", True):
            modules.add("numpy.random")
        self.modules = tuple((name, count_reloads(name)) for name in sorted(modules))
        """What the fork server imports before it forks workers, and the number of reloads."""

    def to_shared_file(self, server_memory: ServerMemory | None = None) -> PickleFile:
        """Copy the stream and buffers to shared memory, except what the fork server holds already.

        If a copy of a large buffer does not fit in memory, the buffer is shared with this process
        if that is safe. See :mod:`penstock.engine.pickling.shared_arrays`.
        """
        # Not getbuffer(): Python 3.14 reports a view that is garbage together with its stream.
        content, fds = self.stream.getvalue(), self._process.fds
        views = [buffer.raw() for buffer in self.buffers]
        inherited = {} if server_memory is None else server_memory.find(views)
        large = [
            place
            for place, view in enumerate(views)
            if view.nbytes >= LARGE_BYTES and place not in inherited
        ]
        shared, notes = self._share(views, large) if large else ({}, list(self.notes))
        starts = {place: one.start for place, one in shared.items()} | dict.fromkeys(inherited, 0)
        file, location = _write_pickle(content, views, self.modules, starts)
        separate = tuple((place, len(fds) + order) for order, place in enumerate(shared))
        return PickleFile(
            file=file,
            location=location._replace(separate=separate, inherited=tuple(inherited.items())),
            fds=[*fds, *(buffer.file.fd for buffer in shared.values())],
            kept=[*self._process.kept, *shared.values()],
            notes=tuple(notes),
        )

    def for_other_machines(self) -> tuple[bytes, list[np.ndarray], tuple[tuple[str, int], ...]]:
        """Return the arguments of :class:`PickledBuffers` on another machine.

        Raises:
            CannotTravel: The objects hold memory or locks that only processes of this machine can
                share.
        """
        if self._process.fds:
            raise CannotTravel(
                "the dataset holds shared tensors, pipes or locks, which cannot leave this machine",
                likely="a tensor was moved to shared memory, or a multiprocessing object is kept.",
                remedy="tensor.clone() before the loader is made, or DataLoader(..., pool='auto')",
            )
        arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in self.buffers]
        return self.stream.getvalue(), arrays, self.modules

    def _share(
        self, views: list[memoryview], large: list[int]
    ) -> tuple[dict[int, SharedBuffer], list[str]]:
        """Return the buffers that need no copy, by position, and notes on large buffers."""
        from penstock.engine.pickling import shared_arrays

        shared: dict[int, SharedBuffer] = {}
        notes = list(self.notes)
        budget = shared_arrays.CopyBudget(free_memory_bytes())
        for place in large:
            view = views[place]
            copied = f"a buffer of {view.nbytes / 1e9:.2f} GB is copied once for all workers"
            why = budget.why_share(view.nbytes)
            if not why:
                notes.append(copied)
                continue
            outcome: SharedBuffer | str = "too many descriptors"
            if len(self._process.fds) + len(shared) < _MAX_FDS:
                outcome = shared_arrays.share_buffer(view, self._large_tensors)
            if isinstance(outcome, str):
                notes.append(f"{copied}, although {why}. It cannot be shared: {outcome}")
            else:
                shared[place] = outcome
                notes.append(
                    f"a buffer of {view.nbytes / 1e9:.2f} GB is not copied ({why}): shared memory "
                    "is mapped over the array in this process"
                )
        return shared, notes


class PickledBuffers(NamedTuple):
    """The objects of a :class:`PickledObjects` from another machine."""

    stream: bytes
    arrays: list[np.ndarray]
    modules: tuple[tuple[str, int], ...]

    def to_shared_file(self, server_memory: ServerMemory | None = None) -> PickleFile:
        """Copy the stream and buffers to shared memory."""
        file, location = _write_pickle(self.stream, self.arrays, self.modules, {})
        return PickleFile(file=file, location=location, fds=[], kept=[], notes=())


def _write_pickle(
    stream: bytes, buffers: Sequence[Any], modules: Any, starts: dict[int, int]
) -> tuple[SharedFile, PickleLocation]:
    """Write a pickle to a new file. ``starts``: offsets of buffers that are elsewhere."""
    file = SharedFile.create()
    file.append(stream)
    spans = []
    for place, buffer in enumerate(buffers):
        start = starts[place] if place in starts else file.append(buffer, _BUFFER_GRAIN)
        spans.append((start, buffer.nbytes))
    num_bytes = file.num_bytes
    file.settle()
    location = PickleLocation(
        handle=file.handle(),
        stream_bytes=len(stream),
        spans=tuple(spans),
        num_bytes=num_bytes,
        modules=modules,
    )
    return file, location


def _dump_and_discard(value: Any) -> None:
    DatasetPickler(io.BytesIO(), lambda buffer: None).dump(value)


def _importable(names: set[str]) -> set[str]:
    skip = {"__main__", "__mp_main__", "builtins"}
    return {
        name
        for name in names - skip
        if getattr(sys.modules.get(name), "__spec__", None) is not None
        and not name.startswith(("penstock.", "torch."))
    }
