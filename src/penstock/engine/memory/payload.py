"""Batches that no layout can hold: pickle 5 in the slot, with the buffers beside the stream.

    worker: write(value, slot) -- stream and buffers in the slot --> parent: read(slot view)

Large arrays and tensors are never copied through the pickle stream, and tensors that share memory
share it again (:mod:`penstock.engine.memory.storage_blocks`). A tensor that already lies in the
slot (``default_collate`` put it there, see :mod:`penstock.engine.loading.slot_collate`) is not
copied at all. A class from ``__main__`` costs 0.7 ms each time it is pickled by value; the worker
sends back the identity that cloudpickle gave it on the way in, and the parent finds its own class
by it.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from penstock.engine.memory.shared_file import round_up

_GRAIN = 64
_SMALL_BYTES = 512
"""Buffers below this stay in the stream: a view costs more than the copy."""


@dataclass(frozen=True, kw_only=True)
class PayloadLocation:
    """Where the parts of a payload lie: in the slot when ``inline`` is None, else in ``inline``."""

    stream_start: int
    blocks: tuple[tuple[int, int], ...]
    """Start and length of each piece of memory that tensors lie in."""
    places: tuple[Any, ...]
    """Where in the blocks each tensor begins."""
    spans: tuple[tuple[int, int], ...]
    """Start and length of every other buffer."""
    num_bytes: int
    inline: bytes | None = None


def _class_by_id(tracker_id: str) -> Any:
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker_id]


class _ByNamePickler(pickle.Pickler):
    """For a forked worker: it has the parent's own modules, so its classes are found by name."""

    collector: Any = None

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce_memory(obj, self.collector)
        return NotImplemented if reduced is None else reduced


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    from_parent: frozenset[str] = frozenset()
    collector: Any = None
    is_forked = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
            tracker_id = known.get(obj)
            if tracker_id is not None and tracker_id in _ResultPickler.from_parent:
                return _class_by_id, (tracker_id,)
            return super().reducer_override(obj)
        reduced = _reduce_memory(obj, self.collector)
        if reduced is not None:
            return reduced
        if _lost_its_slots(obj):
            return copyreg.__newobj__, (type(obj),), (None, vars(obj))  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _lost_its_slots(obj: Any) -> bool:
    """cloudpickle rebuilds a class with ``__slots__`` as one with a dict; the parent's has none."""
    kind = type(obj)
    return (
        "__slots__" in vars(kind)
        and "__setstate__" not in vars(kind)
        and "__dict__" not in vars(kind)["__slots__"]
        and hasattr(obj, "__dict__")
        and kind in cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    )


def remember_parent_classes() -> None:
    """Note which by-value classes came from the parent: only those may go back as an identity.

    Called from: a worker, after it unpickled its objects.
    """
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    _ResultPickler.from_parent = frozenset(known.keys())


def prefer_references() -> None:
    """Pickle classes by name. Called from: a worker that was forked from the parent itself."""
    _ResultPickler.is_forked = True


def is_forked() -> bool:
    """Was this worker forked from the parent itself, so that it has the parent's modules?"""
    return _ResultPickler.is_forked


def _reduce_memory(obj: Any, collector: Any) -> Any:
    """How a tensor or storage is pickled; None for other objects, which know that themselves."""
    if collector is not None:
        return collector.reduce(obj) if isinstance(obj, collector.kinds) else None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    from penstock.engine.memory.tensor_reducers import reduce_tensor

    return reduce_tensor(obj)


def dump(
    value: Any, buffer_callback: Any = None, collector: Any = None, on_retry: Any = None
) -> memoryview:
    """One pickle stream, with the parent's own classes by name or as identities.

    Args:
        collector: Takes the tensors; None: they are pickled into the stream.
        on_retry: Called before the value is pickled a second time.
    """
    if _ResultPickler.is_forked:
        try:
            return _dump_by(_ByNamePickler, value, buffer_callback, collector)
        except Exception:  # a local class, say: by value then
            if on_retry is not None:
                on_retry()
    return _dump_by(_ResultPickler, value, buffer_callback, collector)


def _dump_by(kind: Any, value: Any, buffer_callback: Any, collector: Any) -> memoryview:
    stream = io.BytesIO()
    pickler = kind(stream, protocol=5, buffer_callback=buffer_callback)
    pickler.collector = collector
    pickler.dump(value)
    return stream.getbuffer()


def write(value: Any, slot: np.ndarray, start: int = 0) -> PayloadLocation:
    """Pickle ``value`` into ``slot`` from ``start`` on; inline bytes when it does not fit.

    Memory that already lies inside the slot is only pointed at.

    Called from: the worker that fills the slot.
    """
    from penstock.engine.memory.storage_blocks import BlockCollector, StorageBlock

    collector = BlockCollector()
    buffers: list[memoryview] = []

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALL_BYTES:
            return True
        buffers.append(view)
        return False

    def forget() -> None:
        buffers.clear()
        collector.clear()

    content = dump(value, keep_apart, collector, forget)
    blocks, places = collector.settle()
    sources = [*blocks, *(StorageBlock(_address(view), view.nbytes) for view in buffers)]
    base, spans, end = int(slot.ctypes.data), [], round_up(start, _GRAIN)
    for address, length in sources:
        offset = address - base
        if not 0 <= offset <= slot.nbytes - length:
            offset, end = end, round_up(end + length, _GRAIN)
        spans.append((offset, length))
    num_bytes, inline = end + content.nbytes, None
    if num_bytes <= slot.nbytes:
        for (offset, length), source in zip(spans, sources, strict=True):
            if source.address != base + offset:
                ctypes.memmove(base + offset, source.address, length)
        slot[end:num_bytes] = np.frombuffer(content, dtype=np.uint8)
    else:
        inline, spans, end = _pack_inline(content, sources)
    num_blocks = len(blocks)
    return PayloadLocation(
        stream_start=end,
        blocks=tuple(spans[:num_blocks]),
        places=places,
        spans=tuple(spans[num_blocks:]),
        num_bytes=num_bytes,
        inline=inline,
    )


def _pack_inline(content: memoryview, sources: list[Any]) -> tuple[bytes, list[Any], int]:
    """All parts in one string of bytes, the stream last; and where the parts lie in it."""
    parts, spans, end = [], [], 0
    for address, length in sources:
        spans.append((end, length))
        parts.append(ctypes.string_at(address, length).ljust(round_up(length, _GRAIN), b"\0"))
        end += len(parts[-1])
    return b"".join([*parts, content]), spans, end


def read(payload: PayloadLocation, slot: Any) -> Any:
    """Rebuild the value in the parent; its buffers are views of ``slot`` or of the inline bytes."""
    from penstock.engine.memory.storage_blocks import rebuilding

    if payload.inline is not None:
        whole = memoryview(bytearray(payload.inline))
        stream = whole[payload.stream_start :]
    else:
        whole = memoryview(slot)
        stream = whole[payload.stream_start : payload.num_bytes]
    buffers = [whole[offset : offset + length] for offset, length in payload.spans]
    blocks: list[Any] = [whole[offset : offset + length] for offset, length in payload.blocks]
    blocks = [bytearray(one) if one.nbytes < _SMALL_BYTES else one for one in blocks]
    with rebuilding(blocks, payload.places):
        return pickle.loads(stream, buffers=buffers)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0
