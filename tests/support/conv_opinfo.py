"""torch's own convolution samples, as used by its test suite."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch

NAMES = tuple(f"nn.functional.conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))


def operator(name: str) -> Any:
    """Return torch's OpInfo of an operator, with its samples."""
    _provide_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing it forbids setting torch.backends flags in the whole process, which other tests do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    (found,) = (op for op in op_db if op.name == name)
    return found


def _provide_expecttest() -> None:
    """Provide expecttest, which torch's module imports for a base class that is unused here."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


def gradient_cases(
    op: Any, dtype: torch.dtype, every: int = 1
) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Yield a function and its differentiable tensors, for one of every few samples."""
    for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
        if number % every:
            continue
        given = (sample.input, *sample.args)
        inputs = [x for x in given if torch.is_tensor(x) and x.requires_grad]

        def function(*values: torch.Tensor, given: Any = given, sample: Any = sample) -> Any:
            rest = iter(values)
            filled = [next(rest) if torch.is_tensor(x) and x.requires_grad else x for x in given]
            return op(filled[0], *filled[1:], **sample.kwargs)

        yield function, inputs
