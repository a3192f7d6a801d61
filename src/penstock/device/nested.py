"""Batches are tensors inside tuples, mappings and objects: the same change for each tensor."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

Change = Callable[[torch.Tensor], torch.Tensor]
_MAX_PARTS = 100_000
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, type, types.ModuleType)


def change_tensors(batch: Any, change: Change) -> Any:
    """The batch with every tensor changed; containers keep their types, other leaves stay.

    Example:
        >>> Point = __import__("collections").namedtuple("Point", "x y")
        >>> batch = {"p": Point(torch.zeros(2), "name"), "n": 3}
        >>> change_tensors(batch, lambda tensor: tensor + 1)
        {'p': Point(x=tensor([1., 1.]), y='name'), 'n': 3}
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, (str, bytes, type)) or batch is None:  # a class has the method, too
        return batch
    if isinstance(batch, Mapping):
        return _like_mapping(
            batch, {key: change_tensors(value, change) for key, value in batch.items()}
        )
    if isinstance(batch, (list, tuple)):
        return _like_sequence(batch, change)
    if dataclasses.is_dataclass(batch):
        return _like_dataclass(batch, change)
    return _by_itself(batch, change) if callable(getattr(batch, "to", None)) else batch


def _like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return values
    try:
        if isinstance(batch, MutableMapping):
            like = copy.copy(batch)  # keeps a default factory, and an encoding's other attributes
            for key, value in values.items():
                like[key] = value
            return like
        return type(batch)(values)  # type: ignore[call-arg]
    except Exception:  # its constructor wants something else: torch hands out a dict then, too
        return values


def _like_sequence(batch: list[Any] | tuple[Any, ...], change: Change) -> Any:
    if isinstance(batch, tuple) and callable(getattr(type(batch), "to", None)):
        return _by_itself(batch, change)  # torch's PackedSequence
    changed = [change_tensors(value, change) for value in batch]
    if type(batch) is list:
        return changed
    if type(batch) is tuple:
        return tuple(changed)
    try:
        if hasattr(batch, "_fields"):
            return type(batch)(*changed)
        return type(batch)(changed)
    except Exception:  # as above
        return changed if isinstance(batch, list) else tuple(changed)


def _like_dataclass(batch: Any, change: Change) -> Any:
    """A copy with the fields changed. It is not made anew: ``__post_init__`` has done its work."""
    like = copy.copy(batch)
    for item in dataclasses.fields(batch):
        if hasattr(batch, item.name):
            value = change_tensors(getattr(batch, item.name), change)
            object.__setattr__(like, item.name, value)  # also where it is frozen
    return like


def _by_itself(batch: Any, change: Change) -> Any:
    """An object that knows how to move: it is asked to go where a tensor of it would."""
    moved = getattr(change, "device", None)
    return batch if moved is None else batch.to(moved)


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, those inside objects that moved by themselves included.

    Example:
        >>> [t.tolist() for t in tensors_in([torch.ones(1), {"a": (torch.zeros(1), "x")}])]
        [[1.0], [0.0]]
    """
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # with the objects: an id is only good while its object lives
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
