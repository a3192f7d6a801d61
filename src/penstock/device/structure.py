"""Batches are tensors inside tuples, mappings and objects: the same change for each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Change = Callable[[torch.Tensor], torch.Tensor]
_MAX_DEPTH = 16


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
    if isinstance(batch, (str, bytes)) or batch is None:
        return batch
    if isinstance(batch, Mapping):
        return _like_mapping(
            batch, {key: change_tensors(value, change) for key, value in batch.items()}
        )
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        if hasattr(batch, "to"):  # torch's PackedSequence
            return _by_itself(batch, change)
        return type(batch)(*(change_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        changed = [change_tensors(value, change) for value in batch]
        return changed if isinstance(batch, list) else tuple(changed)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [item.name for item in dataclasses.fields(batch) if item.init]
        return dataclasses.replace(
            batch,
            **{name: change_tensors(getattr(batch, name), change) for name in fields},
        )
    return _by_itself(batch, change) if callable(getattr(batch, "to", None)) else batch


def _like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return values
    try:
        if isinstance(batch, dict):
            like = batch.copy()  # keeps a default factory, and an encoding's other attributes
            like.update(values)
            return like
        return type(batch)(values)  # type: ignore[call-arg]
    except Exception:  # its constructor wants something else: torch hands out a dict then, too
        return values


def _by_itself(batch: Any, change: Change) -> Any:
    """An object that knows how to move: it is asked to go where a tensor of it would."""
    moved = getattr(change, "device", None)
    return batch if moved is None else batch.to(moved)


def tensors_in(batch: Any, depth: int = _MAX_DEPTH) -> list[torch.Tensor]:
    """All tensors of a batch, those inside objects that moved by themselves included.

    Example:
        >>> [t.tolist() for t in tensors_in([torch.ones(1), {"a": (torch.zeros(1), "x")}])]
        [[1.0], [0.0]]
    """
    if isinstance(batch, torch.Tensor):
        return [batch]
    if not depth or isinstance(batch, (str, bytes, int, float, type(None), np.ndarray, type)):
        return []
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        inside = list(batch)
    else:
        inside = list(getattr(batch, "__dict__", {}).values())
    return [tensor for value in inside for tensor in tensors_in(value, depth - 1)]
