"""How must the result lie in memory? As torch predicts it, or ``torch.compile`` reads it wrong.

Compiled code is made for the strides that torch's own rules give: ``_select_conv_backend`` names
the library that would have run, and ``_conv_determine_backend_memory_format`` how its results lie.
The first also checks shapes, with torch's own errors.
"""

from __future__ import annotations

from typing import Any

import torch

_select: Any = torch._C._select_conv_backend
_format_of: Any = getattr(torch._C, "_conv_determine_backend_memory_format", None)
"""Not there before torch 2; nothing is compiled there either."""

EMPTY_BACKENDS = frozenset({"Empty", "MkldnnEmpty"})


def backend_of(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, sizes: Any, arguments: tuple[Any, ...]
) -> Any:
    """Which library would run it? Raises what torch raises for shapes that do not fit.

    Args:
        sizes: Those of the bias in a backward call, or None.
        arguments: Stride, padding, dilation, transposed, output padding and groups.
    """
    if b is None and sizes is not None and _format_of is not None:
        return _select(x, w, None, *arguments, sizes)
    return _select(x, w, b, *arguments)


def is_empty(backend: Any) -> bool:
    """Is this a convolution of nothing, which no library is asked for?"""
    return str(backend).rpartition(".")[2] in EMPTY_BACKENDS


def is_channels_last(x: torch.Tensor, w: torch.Tensor, backend: Any) -> bool:
    """Will the results have their channels innermost?"""
    if w.dim() == 3:
        x, w = x.contiguous().unsqueeze(2), w.unsqueeze(2)
    if _format_of is None:
        kind = torch.channels_last if w.dim() == 4 else torch.channels_last_3d
        return any(not t.is_contiguous() and t.is_contiguous(memory_format=kind) for t in (x, w))
    return _format_of(x, w, backend) in (torch.channels_last, torch.channels_last_3d)


def settle(t: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """``t`` in exactly that layout; itself where it lies so already."""
    if not channels_last:
        return t.contiguous()
    if t.dim() == 3:
        return t.unsqueeze(2).contiguous(memory_format=torch.channels_last).squeeze(2)
    kind = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=kind)
