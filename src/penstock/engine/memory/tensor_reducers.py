"""Reducers for tensors: plain tensors as bytes, special ones as a plain tensor plus attributes.

A lazily conjugated or negated tensor has the bytes of its base plus a flag bit. torch 1.13 and
torch's own workers lose that bit. Here the base is pickled, and the bit is restored.

Tested by ``tests/property/engine/memory/test_storage_blocks.py``.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from penstock.engine.memory.batch_layout import is_plain_tensor


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a CPU tensor to its dtype, its shape, and its bytes as a buffer.

    Returns None for tensors that only their own reducers can pickle.
    """
    if has_own_pickling(tensor):
        return None
    if not is_plain_tensor(tensor) or type(tensor) is torch.nn.Parameter:
        return reduce_special(tensor)
    kind = None if type(tensor) is torch.Tensor else type(tensor)
    state = dict(vars(tensor)) or None
    plain = tensor.detach().as_subclass(torch.Tensor)
    # In memory order, so that channels_last and permuted tensors keep their strides.
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    ordered = plain.permute(order)
    if not ordered.is_contiguous():
        order, ordered = list(range(plain.dim())), plain.contiguous()
    raw = None
    if plain.numel():
        raw = pickle.PickleBuffer(ordered.reshape(-1).view(torch.uint8).numpy())
    return _tensor_from, (raw, tensor.dtype, tuple(ordered.shape), tuple(order), kind, state)


def _tensor_from(
    raw: Any,
    dtype: Any,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    kind: Any,
    state: dict[str, Any] | None,
) -> Any:
    if raw is None:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    else:
        if isinstance(raw, bytes):
            raw = bytearray(raw)  # stored in the stream: torch needs writable memory
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    if order != tuple(range(len(order))):
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    return finish_tensor(tensor, kind, state)


def finish_tensor(tensor: Any, kind: Any, state: dict[str, Any] | None) -> Any:
    """Give a rebuilt tensor its class and its attributes."""
    if kind is not None:
        tensor = tensor.as_subclass(kind)
    if state:
        tensor.__dict__.update(state)
    return tensor


def has_own_pickling(tensor: Any) -> bool:
    """Return True if the class defines its own pickling or may not own any memory."""
    kind: Any = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return (
        kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__
        or kind.__setstate__ is not torch.Tensor.__setstate__
        or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def reduce_special(tensor: Any) -> Any:
    """Reduce a tensor to plain tensors plus attributes. Return None if only torch can pickle it.

    The plain tensors share the memory of ``tensor`` and are pickled by the same pickler.
    """
    if type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.requires_grad:
        if tensor.is_mkldnn:
            return _mkldnn, (tensor.to_dense(),)
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
            return _sparse_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced())
        if tensor.layout in _COMPRESSED:
            parts = tuple(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])
            return _sparse_compressed, (*parts, tensor.values(), tuple(tensor.shape), tensor.layout)
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_nested:
        return None
    is_parameter = type(tensor) is torch.nn.Parameter
    if type(tensor) is not torch.Tensor and not is_parameter:
        return None if tensor.requires_grad else reduce_subclass(tensor)
    if tensor.requires_grad or is_parameter:
        if not tensor.is_leaf or tensor._backward_hooks or vars(tensor):
            return None
        return _leaf, (tensor.detach(), is_parameter, tensor.requires_grad)
    if tensor._is_zerotensor():
        return _zeros, (tuple(tensor.shape), tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        base = tensor.conj() if tensor.is_conj() else tensor
        base = torch._neg_view(base) if tensor.is_neg() else base
        return _with_bits, (base, tensor.is_conj(), tensor.is_neg())
    return None


def reduce_subclass(tensor: Any) -> Any:
    """Reduce a tensor of a user's subclass to a plain tensor, the class and its attributes."""
    plain = tensor.as_subclass(torch.Tensor)
    return finish_tensor, (plain, type(tensor), dict(vars(tensor)) or None)


# torch's own rebuild functions keep a reference to every sparse tensor, so they are not used.
_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_COMPRESSED = {
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}

_UNCHECKED: Any = {"check_invariants": False} if hasattr(torch.Tensor, "untyped_storage") else {}
"""torch 1.13 always checks."""


def _sparse_coo(indices: Any, values: Any, shape: tuple[int, ...], is_coalesced: bool) -> Any:
    made = torch.sparse_coo_tensor(indices, values, shape, **_UNCHECKED)
    return made._coalesced_(is_coalesced)


def _sparse_compressed(
    compressed: Any, plain: Any, values: Any, shape: tuple[int, ...], layout: torch.layout
) -> Any:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, dtype=values.dtype, layout=layout, **_UNCHECKED
    )


def _mkldnn(tensor: Any) -> Any:
    return tensor.to_mkldnn()


def _leaf(tensor: Any, is_parameter: bool, requires_grad: bool) -> Any:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _with_bits(tensor: Any, is_conj: bool, is_neg: bool) -> Any:
    tensor = torch._neg_view(tensor) if is_neg else tensor
    return tensor.conj() if is_conj else tensor
