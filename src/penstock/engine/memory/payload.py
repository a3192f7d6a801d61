"""Payloads: batches that no layout can hold, pickled into a slot with out-of-band buffers.

    worker: write(value, slot) -- stream and buffers in the slot --> parent: read(slot view)

Large arrays and tensors are never copied through the pickle stream. Tensors that share memory in
the worker share it in the parent (:mod:`penstock.engine.memory.storage_blocks`). A tensor that is
already in the slot, because ``default_collate`` wrote it there, is not copied at all (see
:mod:`penstock.engine.loading.slot_collate`). Pickling a class from ``__main__`` by value costs
0.7 ms each time. The worker sends cloudpickle's tracker id of the class instead, and the parent
uses it to find its own class.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from typing import Any

import cloudpickle
import numpy as np

from penstock.engine.memory.shared_file import round_up
from penstock.named_tuple import NamedTuple

_GRAIN = 64
_SMALL_BYTES = 512
"""Smaller buffers stay in the stream, because a view costs more than the copy."""


class PayloadLocation(NamedTuple):
    """Location of the parts of a payload: in the slot if ``inline`` is None, else in ``inline``."""

    stream_start: int
    blocks: tuple[tuple[int, int], ...]
    """Start and length of each block of memory that holds tensors."""
    places: tuple[Any, ...]
    """The position of each tensor in the blocks."""
    spans: tuple[tuple[int, int], ...]
    """Start and length of every other buffer."""
    num_bytes: int
    inline: bytes | None = None


def _class_by_id(tracker_id: str) -> Any:
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker_id]


class _ByNamePickler(pickle.Pickler):
    """Pickles classes by name. For forked workers, which have the parent's own modules."""

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
            return _with_slots(obj)
        return super().reducer_override(obj)


def _lost_its_slots(obj: Any) -> bool:
    """Return True if cloudpickle gave the class of ``obj`` a dict in place of ``__slots__``.

    The parent's own class has no dict.
    """
    kind: Any = type(obj)
    return (
        "__slots__" in vars(kind)
        and "__setstate__" not in vars(kind)
        and "__dict__" not in vars(kind)["__slots__"]
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and hasattr(obj, "__dict__")
        and kind in cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    )


def _with_slots(obj: Any) -> Any:
    """Reduce an object whose values are in a dict here, and in slots in the parent."""
    function, arguments, _, *items = obj.__reduce_ex__(4)
    return function, arguments, (None, vars(obj)) if vars(obj) else None, *items


def remember_parent_classes() -> None:
    """Record which by-value classes came from the parent. Only those are sent back as an id.

    Called by a worker after it has unpickled its objects.
    """
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    _ResultPickler.from_parent = frozenset(known.keys())


def prefer_references() -> None:
    """Pickle classes by name. Called by a worker that was forked from the parent itself."""
    _ResultPickler.is_forked = True


def is_forked() -> bool:
    """Return True if this worker was forked from the parent and so has its modules."""
    return _ResultPickler.is_forked


def _reduce_memory(obj: Any, collector: Any) -> Any:
    """Reduce a tensor or storage. Return None for other objects, which use their own reducers."""
    if collector is not None:
        return collector.reduce(obj) if isinstance(obj, collector.kinds) else None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return None
    from penstock.engine.memory.tensor_reducers import reduce_tensor

    return reduce_tensor(obj)


def dump(
    value: Any, buffer_callback: Any = None, collector: Any = None, on_retry: Any = None
) -> bytes:
    """Pickle ``value`` to a stream. The parent's own classes are stored by name or id.

    Args:
        collector: Receives the tensors. If None, they are pickled into the stream.
        on_retry: Called before the value is pickled a second time.
    """
    if _ResultPickler.is_forked:
        try:
            return _dump_by(_ByNamePickler, value, buffer_callback, collector)
        except Exception:  # for example a local class: retry by value
            if on_retry is not None:
                on_retry()
    return _dump_by(_ResultPickler, value, buffer_callback, collector)


def _dump_by(kind: Any, value: Any, buffer_callback: Any, collector: Any) -> bytes:
    stream = io.BytesIO()
    pickler = kind(stream, protocol=5, buffer_callback=buffer_callback)
    pickler.collector = collector
    pickler.dump(value)
    return stream.getvalue()  # not a copy


def write(value: Any, slot: np.ndarray, start: int = 0) -> PayloadLocation:
    """Pickle ``value`` into ``slot`` from offset ``start``, or to inline bytes if it does not fit.

    Memory that is already in the slot is referenced, not copied. Called by the worker that fills
    the slot.
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
    num_bytes, inline = end + len(content), None
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


def _pack_inline(content: bytes, sources: list[Any]) -> tuple[bytes, list[Any], int]:
    """Return all parts as one bytes object, the spans of the buffers, and the stream's offset."""
    parts, spans, end = [], [], 0
    for address, length in sources:
        spans.append((end, length))
        parts.append(ctypes.string_at(address, length).ljust(round_up(length, _GRAIN), b"\0"))
        end += len(parts[-1])
    return b"".join([*parts, content]), spans, end


def read(payload: PayloadLocation, slot: Any) -> Any:
    """Rebuild the value. Its buffers are views of ``slot`` or of the inline bytes."""
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
