"""Hashes of a batch: one for the whole, and one for each sample if it can be split.

The hash covers the classes, dtypes, shapes and bits of tensors and arrays; numbers, text and bytes;
and containers with their order (insertion order for a dictionary, none for a set). Two values have
the same hash if their contents are indistinguishable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

MAX_DEPTH = 40


def digest(value: Any) -> bytes:
    """Return an eight-byte hash of ``value``.

    Example:
        >>> digest([1, 2.0]) == digest([1, 2.0]) != digest([1.0, 2.0])
        True
        >>> digest(0.0) == digest(-0.0)
        False
    """
    state = hashlib.blake2b(digest_size=8)
    _feed(state, value, 0)
    return state.digest()


def _feed(state: Any, value: Any, depth: int) -> None:
    state.update(f"<{type(value).__name__}".encode())
    if depth > MAX_DEPTH:
        raise RecursionError(f"a batch is nested more than {MAX_DEPTH} levels deep")
    array = as_array(value)
    if array is not None:
        kind, numbers = array
        state.update(f"{kind}{numbers.shape}".encode())
        if numbers.dtype == object:
            _feed(state, numbers.tolist(), depth + 1)
        else:
            state.update(np.ascontiguousarray(numbers).tobytes())
    elif isinstance(value, float):
        state.update(struct.pack("<d", value))
    elif isinstance(value, (str, bytes, bytearray, memoryview)):
        state.update(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
    elif value is None or isinstance(value, (bool, int, complex)):
        state.update(repr(value).encode())
    elif isinstance(value, (set, frozenset)):
        state.update(b"".join(sorted(digest(item) for item in value)))
    else:
        _feed_parts(state, value, depth)
    state.update(b">")


def _feed_parts(state: Any, value: Any, depth: int) -> None:
    parts = parts_of(value)
    if parts is None:
        state.update(pickle.dumps(value, protocol=4))
        return
    for name, part in parts:
        state.update(f"{name}=".encode())
        _feed(state, part, depth + 1)


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return (name as written in code, item) for a container. None for other objects.

    Example:
        >>> parts_of({"image": 1, "label": 2})
        [("['image']", 1), ("['label']", 2)]
    """
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", item) for place, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{item.name}", getattr(value, item.name)) for item in dataclasses.fields(value)]
    if _is_image(value):
        return [(".mode", value.mode), (".size", value.size), (".pixels", value.tobytes())]
    if hasattr(value, "__dict__") and not callable(value):
        return [(f".{name}", part) for name, part in vars(value).items()]
    return None


def _is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes")


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for all leaves of a nested value.

    Example:
        >>> list(leaves_of([{"x": 1}, (2, 3)]))
        [("[0]['x']", 1), ('[1][0]', 2), ('[1][1]', 3)]
    """
    is_array = as_array(value) is not None
    parts = None if is_array or isinstance(value, (str, bytes)) else parts_of(value)
    if parts is None:
        yield path, value
    else:
        for name, part in parts:
            yield from leaves_of(part, path + name)


def as_array(value: Any) -> tuple[str, np.ndarray] | None:
    """Return (dtype, numbers) of a tensor or array, as bytes for dtypes that NumPy lacks."""
    import torch

    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), np.asarray(value)
    if not isinstance(value, torch.Tensor):
        return None
    tensor = value.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    try:
        return str(value.dtype), tensor.numpy()
    except TypeError:  # bfloat16 and similar
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype), raw.reshape(*tensor.shape, -1) if tensor.numel() else raw


# -- samples ---------------------------------------------------------------------------------------


def samples_of(batch: Any) -> list[Any] | None:
    """Return the samples of a collated batch, or the items of a list. None if it is neither.

    Example:
        >>> samples_of({"x": np.array([[1, 2], [3, 4]]), "name": ["a", "b"]})[1]
        {'x': array([3, 4]), 'name': 'b'}
    """
    heights = {
        len(leaf) for _, leaf in leaves_of(batch) if as_array(leaf) is not None and np.ndim(leaf)
    }
    if len(heights) == 1:
        return [_row(batch, place, *heights) for place in range(*heights)]
    return list(batch) if isinstance(batch, (list, tuple)) else None


def _row(value: Any, place: int, height: int) -> Any:
    if as_array(value) is not None:
        return value[place] if np.ndim(value) else value
    if isinstance(value, Mapping):
        return {key: _row(item, place, height) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        is_column = len(value) == height and not any(
            as_array(leaf) is not None for _, leaf in leaves_of(value)
        )
        return value[place] if is_column else [_row(item, place, height) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _row(part, place, height) for name, part in parts_of(value) or ()}
    return value
