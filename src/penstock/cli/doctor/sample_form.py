"""Describes the structure of a sample in one line, and compares the structures of samples.

Tested by ``tests/integration/cli/doctor/test_command.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.cli.doctor.contents import device_of, is_array

_SHOWN_ITEMS = 6
_MAX_DEPTH = 6


def form_of(sample: Any, depth: int = _MAX_DEPTH) -> str:
    """Return a sample's structure in one line.

    Example:
        >>> form_of(({"name": "cat", "box": [1, 2]}, 3.5))
        '({name: str, box: [int, int]}, float)'
    """
    if is_array(sample):
        numbers = ", ".join(str(int(length)) for length in sample.shape)
        dtype = str(sample.dtype).removeprefix("torch.")
        return f"{type(sample).__name__} {dtype} [{numbers}]"
    if depth == 0:
        return "..."
    if isinstance(sample, Mapping):
        items = [f"{key}: {form_of(item, depth - 1)}" for key, item in _few(sample.items())]
        return "{" + ", ".join(items + _more(sample)) + "}"
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        values = {item.name: getattr(sample, item.name) for item in dataclasses.fields(sample)}
        items = [f"{key}={form_of(item, depth - 1)}" for key, item in _few(values.items())]
        return f"{type(sample).__name__}({', '.join(items + _more(values))})"
    if isinstance(sample, (list, tuple)):
        items = [form_of(item, depth - 1) for item in _few(sample)] + _more(sample)
        return f"[{', '.join(items)}]" if isinstance(sample, list) else f"({', '.join(items)})"
    return "None" if sample is None else type(sample).__name__


def _few(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_SHOWN_ITEMS), strict=False)]


def _more(items: Any) -> list[str]:
    hidden = len(items) - _SHOWN_ITEMS
    return [f"{hidden} more"] if hidden > 0 else []


def skeleton_of(sample: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a value that is equal for samples that the default collate can stack.

    Example:
        >>> skeleton_of([1, "a"]) == skeleton_of([2, "b"]) != skeleton_of([1])
        True
    """
    if is_array(sample):
        return tuple(int(length) for length in sample.shape)
    if depth == 0 or isinstance(sample, (str, bytes)):
        return type(sample).__name__
    if isinstance(sample, Mapping):
        return {str(key): skeleton_of(item, depth - 1) for key, item in sample.items()}
    if isinstance(sample, (list, tuple)):
        return [skeleton_of(item, depth - 1) for item in sample]
    if isinstance(sample, (bool, int, float)):
        return "number"
    return type(sample).__name__


def devices_in(sample: Any) -> set[str]:
    """Return the GPUs that hold tensors of a sample.

    Example:
        >>> devices_in([1, "a"])
        set()
    """
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        return set().union(*map(devices_in, sample))
    device = device_of(sample)
    return set() if device is None else {device}
