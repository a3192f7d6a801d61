"""torch's own samples of convolutions, as its test suite uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

NAMES = tuple(f"nn.functional.conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
REASON = "torch's own samples need expecttest: pip install expecttest"


def operator(name: str) -> Any:
    """torch's description of an operator, with its samples."""
    pytest.importorskip("expecttest", reason=REASON)
    from torch.testing._internal.common_methods_invocations import op_db

    # Importing it forbids the whole process to set torch.backends' switches, as other tests do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    (found,) = (op for op in op_db if op.name == name)
    return found


def gradient_cases(
    op: Any, dtype: torch.dtype, every: int = 1
) -> Iterator[tuple[Callable[..., Any], list[torch.Tensor]]]:
    """A function of the tensors that need a gradient, and those, of one sample in so many."""
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
