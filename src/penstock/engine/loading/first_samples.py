"""Digest of the first samples of an iterable dataset, to find workers that deliver the same ones.

    worker: ObservedWorkerInfo notes whether the dataset asks which worker it is in
    worker: digest_samples(first batch) -> Reply.first_samples
    parent: engine/parent/stream_checks.py compares them before the first batch

Tested by ``tests/integration/engine/parent/test_stream_checks.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.worker import WorkerInfo

from penstock.order.global_generators import save_generators

_MAX_SAMPLES = 4
_MAX_LEAF_BYTES = 1 << 16
_CHANCE_BYTES = 64
"""Samples of fewer bytes that were drawn at random may be equal by chance."""


class FirstSamples(NamedTuple):
    """The first samples of one worker.

    Args:
        has_asked: True if the dataset read its worker's number or the number of workers.
        digest: None if the samples cannot be compared.
    """

    has_asked: bool
    digest: bytes | None


class ObservedWorkerInfo(WorkerInfo):
    """The result of ``get_worker_info()``. Notes whether the worker's number was read."""

    has_asked = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            ObservedWorkerInfo.has_asked = True
        return super().__getattribute__(name)


def generator_states() -> tuple[bytes, bytes]:
    """Return the states of Python's, NumPy's and torch's generators, to see whether any draws."""
    return save_generators(), torch.default_generator.get_state().numpy().tobytes()


def digest_samples(samples: Any, *, is_random: bool) -> bytes | None:
    """Return a digest of the first samples of a batch. None if they cannot be compared.

    Args:
        is_random: True if random numbers were drawn for them.

    Example:
        >>> one, other = [torch.ones(9), "a"], [torch.ones(9), "b"]
        >>> digest_samples(one, is_random=False) == digest_samples(other, is_random=False)
        False
        >>> digest_samples([1], is_random=True) is None
        True
    """
    digest = hashlib.blake2b(digest_size=16)
    first = samples
    if isinstance(samples, list):
        digest.update(str(len(samples)).encode())
        first = samples[:_MAX_SAMPLES]
    try:
        num_bytes = _add(digest, first)
    except Exception:  # objects of the user's classes
        return None
    return None if is_random and num_bytes < _CHANCE_BYTES else digest.digest()


def _add(digest: Any, value: Any) -> int:
    """Add a value to a digest. Returns the bytes of its content."""
    if isinstance(value, Mapping):
        return sum(_add(digest, part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        return sum(_add(digest, part) for part in value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype.str} {value.shape}".encode())
        content = value.tobytes()
    elif isinstance(value, (bytes, bytearray)):
        content = bytes(value)
    elif value is None or isinstance(value, (str, int, float, complex, np.generic)):
        content = f"{type(value).__name__} {value!r}".encode()
    else:
        raise TypeError(f"{type(value)} cannot be compared")
    digest.update(content[:_MAX_LEAF_BYTES])
    return len(content)
