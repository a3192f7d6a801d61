"""The bytes of a sample, to compare two results of ``dataset[i]``.

Tested by ``tests/unit/order/test_sample_randomness.py``.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class _ValuePickler(pickle.Pickler):
    """Pickles equal samples to equal bytes: tensors by value, and without memoization."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.fast = True

    def reducer_override(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        data = plain.flatten().view(torch.uint8).numpy().tobytes()
        return tuple, ((str(value.dtype), tuple(value.shape), data),)


def bytes_of(sample: Any) -> bytes:
    """Return bytes that are equal for equal samples."""
    file = io.BytesIO()
    _ValuePickler(file).dump(sample)
    return file.getvalue()
