"""Finds the tensors in a batch, nested in containers and objects, and applies functions to them."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

Function = Callable[[torch.Tensor], torch.Tensor]
_MAX_PARTS = 100_000
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, type, types.ModuleType)


def move_tensors(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return the batch with every tensor, and every object with a ``to`` method, on ``device``."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), device)


def map_tensors(batch: Any, function: Function, device: torch.device | None = None) -> Any:
    """Return the batch with ``function`` applied to every tensor.

    Containers keep their types. Other leaves are unchanged.

    Args:
        device: The device that ``function`` moves tensors to. Objects with a ``to`` method are
            moved there too.

    Example:
        >>> Point = __import__("collections").namedtuple("Point", "x y")
        >>> batch = {"p": Point(torch.zeros(2), "name"), "n": 3}
        >>> map_tensors(batch, lambda tensor: tensor + 1)
        {'p': Point(x=tensor([1., 1.]), y='name'), 'n': 3}
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, (str, bytes, type)) or batch is None:  # classes may have a "to" method
        return batch
    if isinstance(batch, Mapping):
        values = {key: map_tensors(value, function, device) for key, value in batch.items()}
        return _like_mapping(batch, values)
    moves_itself = isinstance(batch, tuple) and callable(getattr(type(batch), "to", None))
    if isinstance(batch, (list, tuple)) and not moves_itself:  # like torch's PackedSequence
        return _like_sequence(batch, [map_tensors(value, function, device) for value in batch])
    if dataclasses.is_dataclass(batch):
        return _like_dataclass(batch, function, device)
    can_move = device is not None and callable(getattr(batch, "to", None))
    return batch.to(device) if can_move else batch


def _like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return values
    try:
        if isinstance(batch, MutableMapping):
            like = copy.copy(batch)  # keeps default factories and attributes of a BatchEncoding
            for key, value in values.items():
                like[key] = value
            return like
        return type(batch)(values)  # type: ignore[call-arg]
    except Exception:  # its constructor takes something else; torch also returns a dict then
        return values


def _like_sequence(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if type(batch) is list:
        return values
    if type(batch) is tuple:
        return tuple(values)
    try:
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    except Exception:  # its constructor takes something else
        return values if isinstance(batch, list) else tuple(values)


def _like_dataclass(batch: Any, function: Function, device: torch.device | None) -> Any:
    """Return a copy with the fields mapped. ``__post_init__`` is not called again."""
    like = copy.copy(batch)
    for item in dataclasses.fields(batch):
        if hasattr(batch, item.name):
            value = map_tensors(getattr(batch, item.name), function, device)
            object.__setattr__(like, item.name, value)  # works for frozen dataclasses too
    return like


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch, including those inside objects with their own ``to`` method.

    Example:
        >>> [t.tolist() for t in tensors_in([torch.ones(1), {"a": (torch.zeros(1), "x")}])]
        [[1.0], [0.0]]
    """
    found: list[torch.Tensor] = []
    seen: dict[
        int, Any
    ] = {}  # holds the objects, because an id is unique only while its object lives
    left = [batch]
    while left and len(seen) < _MAX_PARTS:
        part = left.pop()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            found.append(part)
        else:
            left += reversed(_inside(part))
    return found


def _inside(part: Any) -> list[Any]:
    if isinstance(part, Mapping):
        inside = list(part.values())
    elif isinstance(part, (list, tuple)):
        inside = list(part)
    elif dataclasses.is_dataclass(part):
        inside = [getattr(part, item.name, None) for item in dataclasses.fields(part)]
    else:
        inside = []
    return inside + list(getattr(part, "__dict__", {}).values())


def copy_arrays(batch: Any) -> Any:
    """Return the batch with NumPy arrays copied.

    Arrays stay in CPU memory, and the slot they are in will be reused.
    """
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if isinstance(batch, dict):
        for key, value in batch.items():
            batch[key] = copy_arrays(value)
    elif isinstance(batch, list):
        batch[:] = [copy_arrays(value) for value in batch]
    elif type(batch) is tuple:
        return tuple(copy_arrays(value) for value in batch)
    return batch
