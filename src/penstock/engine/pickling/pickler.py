"""How user objects reach a worker: serialised once, big buffers beside, culprits named.

    parent: serialise(objects).seal() -> Parcel (one shared file) --> each worker: unpack(parcel)

Lambdas, closures, local classes and everything from ``__main__``, a notebook or a module that only
this process can have travel by value (cloudpickle). Arrays and tensors leave the pickle stream as
buffers that every worker maps copy-on-write. multiprocessing primitives travel as under spawn, open
handles are opened again. What cannot travel is named down to its attribute.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import context as mp_context
from multiprocessing import reduction
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from penstock.engine.memory.shared_file import FileHandle, SharedFile, round_up
from penstock.engine.pickling import reducers as remade
from penstock.engine.pickling import shared_arrays as adoption
from penstock.engine.pickling.by_value import ByValue
from penstock.engine.pickling.handles import Reopener

_BUFFER_GRAIN = 64
_MAX_FDS_BESIDE = 200
"""One message to the fork server takes 250 descriptors, ours among them."""
_inherited_fds: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What a worker needs to unpack: the file, the pickle's length, and where the buffers lie."""

    handle: FileHandle
    stream_bytes: int
    spans: tuple[tuple[int, int], ...]
    num_bytes: int
    modules: tuple[tuple[str, int], ...]
    apart: tuple[tuple[int, int], ...] = ()
    """Buffers in a file of their own: which span, and which descriptor beside the parcel."""


@dataclass
class Packed:
    """The parent's side of a parcel. Pairs with :meth:`close`."""

    file: SharedFile
    parcel: Parcel
    fds: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    """Who owns these descriptors: they stay open while workers may be started."""
    notes: tuple[str, ...] = ()
    """What was done with open handles and large arrays that the user may want to know."""

    def parcel_for(self, handle: FileHandle) -> Parcel:
        return replace(self.parcel, handle=handle)

    def close(self) -> None:
        self.file.close()
        self.kept.clear()


class _InheritedFd:
    """Stands for a descriptor that travels beside the parcel; ``detach`` gives the worker's own."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return _inherited_fds[self.place]


class _Spawning:
    """Stands where multiprocessing expects the process that is being spawned."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.kept: list[Any] = []

    @property
    def is_full(self) -> bool:
        """Would one more descriptor be too many? What can travel as a copy then does."""
        return len(self.fds) >= _MAX_FDS_BESIDE

    def duplicate_for_child(self, fd: int) -> int:
        if sys.platform == "win32":  # pragma: no cover
            raise RuntimeError("handles do not travel to workers on Windows yet")
        self.fds.append(fd)
        return len(self.fds) - 1

    DupFd = staticmethod(_InheritedFd)


@contextmanager
def _spawning(stand_in: Any) -> Iterator[None]:
    before = mp_context.get_spawning_popen()
    mp_context.set_spawning_popen(stand_in)
    try:
        yield
    finally:
        mp_context.set_spawning_popen(before)


class TravelPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors as buffers and multiprocessing's own reducers."""

    def __init__(self, file: Any, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.modules: set[str] = set()
        self.by_value = ByValue()
        self.large_tensors: list[Any] = []
        self.handles = Reopener()
        self._reducers = _process_reducers()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        owner = obj if isinstance(obj, (type, FunctionType, remade.Cached)) else kind
        name = getattr(owner, "__module__", None)
        if isinstance(name, str):
            self._meet(obj.__name__ if isinstance(obj, ModuleType) else name)
        if obj is random._inst:
            return getattr, (random, "_inst")  # the worker's own, not a copy of ours
        if obj is np.random.mtrand._rand:
            return getattr, (np.random.mtrand, "_rand")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            reduced = _reduce_tensor(obj)
            if reduced is not None:
                self._note_size(obj)
                return reduced
        anew = remade.reduce(obj)
        if anew is not None:
            return anew
        reopening = self.handles.reduce(obj)
        if reopening is not None:
            return reopening
        reducer = self._reducers.get(kind)
        if reducer is not None and not _is_unshared_storage(obj):
            return reducer(obj)
        synchronize = sys.modules.get("multiprocessing.synchronize")
        if synchronize is not None and isinstance(obj, synchronize.SemLock):
            _refuse_fork_primitive(obj)
        return super().reducer_override(obj)

    def _meet(self, module: str) -> None:
        if module not in self.modules:
            self.modules.add(module)
            self.by_value.consider(module)

    def _note_size(self, tensor: Any) -> None:
        if tensor.numel() * tensor.element_size() >= adoption.MIN_BYTES:
            self.large_tensors.append(tensor)


def _is_unshared_storage(obj: Any) -> bool:
    """A storage that torch would move to shared memory under its owner's feet."""
    if not type(obj).__name__.endswith("Storage"):
        return False
    inner = getattr(obj, "_untyped_storage", None) or getattr(obj, "_storage", None) or obj
    return not inner.is_shared()


def _reduce_tensor(obj: Any) -> Any:
    if obj.device.type not in ("cpu", "meta"):
        raise TypeError(f"a tensor on {obj.device} cannot be sent to a worker process")
    if obj.is_shared():  # its owner wants writes to be seen everywhere: torch's own way
        from torch.multiprocessing import reductions

        return reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
    from penstock.engine.memory.payload import reduce_tensor

    return reduce_tensor(obj)


def _process_reducers() -> dict[type, Callable[[Any], Any]]:
    """What multiprocessing and torch register for connections, sockets, heaps and shared storages.

    Tensors are left out: only shared ones go torch's way, see :func:`_reduce_tensor`.
    """
    registered: dict[type, Callable[[Any], Any]] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return {
        kind: reducer
        for kind, reducer in registered.items()
        if not kind.__module__.startswith("torch") or kind.__name__.endswith("Storage")
    }


def _refuse_fork_primitive(lock: Any) -> None:
    is_fork = getattr(lock, "_is_fork_ctx", None)
    if is_fork is None:  # Python 3.10 and early 3.11 do not keep the context: the name tells
        name = getattr(lock._semlock, "name", None)
        is_fork = name is None
    if is_fork:
        raise TypeError(f"a {type(lock).__name__} made in the fork context exists in forks only")


def serialise(objects: dict[str, Any]) -> Serialised:
    """Turn named objects into a stream, once for all workers.

    Args:
        objects: By the names used in error messages, as in ``{"dataset": dataset}``.

    Raises:
        CannotTravel: Something inside cannot be serialised; the message names the attribute.
    """
    main = sys.modules.get("__mp_main__")
    if main is not None:  # we are in a spawned child, where the user's script has this name
        cloudpickle.register_pickle_by_value(main)
    stand_in = _Spawning()
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = TravelPickler(stream, buffer_callback=buffers.append)
    try:
        with _spawning(stand_in), pickler.by_value:
            pickler.dump(objects)
    except Exception as error:
        from penstock.engine.pickling.error_path import explain

        raise explain(objects, error) from error
    return Serialised(
        stream=stream,
        buffers=buffers,
        fds=stand_in.fds,
        kept=stand_in.kept,
        notes=pickler.handles.notes,
        large_tensors=pickler.large_tensors,
        modules=tuple(
            (name, _generation(name))
            for name in sorted(_importable(pickler.modules - pickler.by_value.names))
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Serialised:
    """Objects as a pickle stream; their large buffers still lie where the user's code put them."""

    stream: io.BytesIO
    buffers: list[pickle.PickleBuffer]
    fds: list[int]
    kept: list[Any]
    notes: list[str]
    large_tensors: list[Any]
    modules: tuple[tuple[str, int], ...]

    def seal(self) -> Packed:
        """Copy stream and buffers into shared memory. Pairs with :meth:`Packed.close`.

        A large buffer that can be shared with this process is not copied: see
        :mod:`penstock.engine.pickling.shared_arrays`.
        """
        content = self.stream.getbuffer()
        views = [buffer.raw() for buffer in self.buffers]
        adopted, notes = self._adopt(views)
        end = round_up(content.nbytes, _BUFFER_GRAIN)
        spans = []
        for place, view in enumerate(views):
            if place in adopted:
                spans.append((adopted[place].start, view.nbytes))
                continue
            spans.append((end, view.nbytes))
            end = round_up(end + view.nbytes, _BUFFER_GRAIN)
        file = SharedFile.create()
        file.grow(end)
        mapping = file.map(0, end)
        mapping[: content.nbytes] = content
        for place, ((start, length), view) in enumerate(zip(spans, views, strict=True)):
            if place not in adopted:
                mapping[start : start + length] = view
        fds = [*self.fds, *(shared.file.fd for shared in adopted.values())]
        parcel = Parcel(
            handle=file.handle(),
            stream_bytes=content.nbytes,
            spans=tuple(spans),
            num_bytes=end,
            modules=self.modules,
            apart=tuple((place, len(self.fds) + order) for order, place in enumerate(adopted)),
        )
        return Packed(file, parcel, fds, [*self.kept, *adopted.values()], tuple(notes))

    def _adopt(self, views: list[memoryview]) -> tuple[dict[int, adoption.Adopted], list[str]]:
        """The buffers that need no copy, by place; and what to say about the large ones."""
        adopted: dict[int, adoption.Adopted] = {}
        notes = list(self.notes)
        for place, view in enumerate(views):
            if view.nbytes < adoption.MIN_BYTES:
                continue
            size = f"{view.nbytes / 1e9:.2f} GB"
            outcome: adoption.Adopted | str = "too many descriptors"
            if len(self.fds) + len(adopted) < _MAX_FDS_BESIDE:
                outcome = adoption.adopt(view, self.large_tensors)
            if isinstance(outcome, str):
                notes.append(f"a buffer of {size} is copied once for all workers: {outcome}")
            else:
                adopted[place] = outcome
                notes.append(f"a buffer of {size} is shared with this process: no copy")
        return adopted, notes


def _importable(names: set[str]) -> set[str]:
    skip = {"__main__", "__mp_main__", "builtins"}
    return {
        name
        for name in names - skip
        if getattr(sys.modules.get(name), "__spec__", None) is not None
        and not name.startswith(("penstock.", "torch."))
    }


_seen_specs: dict[str, list[Any]] = {}


def _generation(name: str) -> int:
    """How often a module was reloaded since we first saw it: ``reload`` gives it a new spec."""
    spec = sys.modules[name].__spec__
    seen = _seen_specs.setdefault(name, [spec])
    if seen[-1] is not spec:
        seen.append(spec)
    return len(seen) - 1


def unpack(parcel: Parcel, fds: list[int]) -> dict[str, Any]:
    """Rebuild the objects in a worker; arrays are private views of the shared file."""
    _inherited_fds[:] = fds
    file = SharedFile.attach(parcel.handle)
    mapping = file.map(0, parcel.num_bytes, private=True)
    file.close()
    whole = memoryview(mapping)
    apart = {place: _map_apart(fds[fd], parcel.spans[place]) for place, fd in parcel.apart}
    buffers = [
        apart[place] if place in apart else whole[start : start + length]
        for place, (start, length) in enumerate(parcel.spans)
    ]
    objects: dict[str, Any] = pickle.loads(whole[: parcel.stream_bytes], buffers=buffers)
    return objects


def _map_apart(fd: int, span: tuple[int, int]) -> memoryview:
    file = SharedFile.attach(FileHandle(fd=fd))
    start, length = span
    mapping = file.map(0, start + length, private=True)
    file.close()
    return memoryview(mapping)[start : start + length]
