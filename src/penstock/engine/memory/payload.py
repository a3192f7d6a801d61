"""Batches that no layout can hold: pickle 5 in the slot, with the buffers beside the stream.

    worker: write(value, slot) -- stream and buffers in the slot --> parent: read(slot view)

Large arrays and tensors are never copied through the pickle stream. A tensor that already lies in
the slot (``default_collate`` put it there, see :mod:`penstock.engine.loading.slot_collate`) is
not copied at all. A class from ``__main__`` costs 0.7 ms each time it is pickled by value; the
worker sends back the identity that cloudpickle gave it on the way in, and the parent finds its own
class by it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from penstock.engine.memory.shared_file import round_up

_GRAIN = 64
_SMALL_BYTES = 512
"""Buffers below this stay in the stream: a view costs more than the copy."""


@dataclass(frozen=True)
class PayloadLocation:
    """Where the parts of a payload lie: in the slot when ``inline`` is None, else in ``inline``."""

    stream_bytes: int
    spans: tuple[tuple[int, int], ...]
    num_bytes: int
    inline: bytes | None = None


def reduce_tensor(tensor: Any) -> Any:
    """How a plain CPU tensor is pickled: dtype, shape, and its bytes as a buffer.

    Returns None for tensors that only torch's own pickling understands.
    """
    import torch

    from penstock.engine.memory.batch_layout import is_plain_tensor

    if not is_plain_tensor(tensor) or type(tensor) is torch.nn.Parameter:
        return None
    kind = None if type(tensor) is torch.Tensor else type(tensor)
    state = dict(vars(tensor)) or None
    plain = tensor.detach().as_subclass(torch.Tensor)
    # As it lies in memory: channels_last and permuted tensors keep their strides.
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    lying = plain.permute(order)
    if not lying.is_contiguous():
        order, lying = list(range(plain.dim())), plain.contiguous()
    raw = None
    if plain.numel():
        raw = pickle.PickleBuffer(lying.reshape(-1).view(torch.uint8).numpy())
    return _tensor_from, (raw, tensor.dtype, tuple(lying.shape), tuple(order), kind, state)


def _tensor_from(
    raw: Any,
    dtype: Any,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    kind: Any,
    state: dict[str, Any] | None,
) -> Any:
    import torch

    if raw is None:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        if isinstance(raw, bytes):
            raw = bytearray(raw)  # in the stream after all: torch wants writable memory
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    if order != tuple(range(len(order))):
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    if kind is not None:
        tensor = tensor.as_subclass(kind)
    if state:
        tensor.__dict__.update(state)
    return tensor


def _class_by_id(tracker_id: str) -> Any:
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker_id]


class _ByNamePickler(pickle.Pickler):
    """For a forked worker: it has the parent's own modules, so its classes are found by name."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = reduce_tensor(obj) if isinstance(obj, _ResultPickler.tensor) else None
        return NotImplemented if reduced is None else reduced


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    from_parent: frozenset[str] = frozenset()
    tensor: Any = ()
    is_forked = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
            tracker_id = known.get(obj)
            if tracker_id is not None and tracker_id in _ResultPickler.from_parent:
                return _class_by_id, (tracker_id,)
        elif isinstance(obj, _ResultPickler.tensor):
            reduced = reduce_tensor(obj)
            if reduced is not None:
                return reduced
        elif _lost_its_slots(obj):
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


def dump(value: Any, buffer_callback: Any = None, on_retry: Any = None) -> memoryview:
    """One pickle stream, with the parent's own classes by name or as identities."""
    if _ResultPickler.is_forked:
        stream = io.BytesIO()
        try:
            _ByNamePickler(stream, protocol=5, buffer_callback=buffer_callback).dump(value)
            return stream.getbuffer()
        except Exception:  # a local class, say: by value then
            if on_retry is not None:
                on_retry()
    stream = io.BytesIO()
    _ResultPickler(stream, protocol=5, buffer_callback=buffer_callback).dump(value)
    return stream.getbuffer()


def write(value: Any, slot: np.ndarray, start: int = 0) -> PayloadLocation:
    """Pickle ``value`` into ``slot`` from ``start`` on; inline bytes when it does not fit.

    Buffers that already lie inside the slot are only pointed at.

    Called from: the worker that fills the slot.
    """
    import torch

    _ResultPickler.tensor = torch.Tensor
    memory = memoryview(slot)  # type: ignore[arg-type]
    buffers: list[memoryview] = []

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _SMALL_BYTES:
            return True
        buffers.append(view)
        return False

    content = dump(value, keep_apart, buffers.clear)
    base, spans, end = _address(memory), [], round_up(start, _GRAIN)
    for view in buffers:
        offset = _address(view) - base
        if not 0 <= offset <= memory.nbytes - view.nbytes:
            offset, end = end, round_up(end + view.nbytes, _GRAIN)
        spans.append((offset, view.nbytes))
    num_bytes = end + content.nbytes
    if num_bytes <= memory.nbytes:
        for (offset, length), view in zip(spans, buffers, strict=True):
            if _address(view) != base + offset:
                memory[offset : offset + length] = view
        memory[end:num_bytes] = content
        return PayloadLocation(end, tuple(spans), num_bytes)
    parts, spans, offset = [bytes(content)], [], content.nbytes
    for view in buffers:
        parts.append(bytes(view))
        spans.append((offset, view.nbytes))
        offset += view.nbytes
    return PayloadLocation(content.nbytes, tuple(spans), num_bytes, b"".join(parts))


def read(payload: PayloadLocation, slot: Any) -> Any:
    """Rebuild the value in the parent; its buffers are views of ``slot`` or of the inline bytes."""
    if payload.inline is not None:
        whole = memoryview(bytearray(payload.inline))
        stream = whole[: payload.stream_bytes]
    else:
        whole = memoryview(slot)
        stream = whole[payload.stream_bytes : payload.num_bytes]
    buffers = [whole[offset : offset + length] for offset, length in payload.spans]
    return pickle.loads(stream, buffers=buffers)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0
