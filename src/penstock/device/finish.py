"""Bytes to floats on the device: images travel as uint8, a quarter of what float32 takes.

A byte has 256 values, so everything that normalising does to a channel is a table of 256 floats. It
is computed once, on the CPU, by the same operations as torchvision's: so the result is theirs to
the last bit, also on GPUs, where dividing by a number is done another way and rounds differently.

On a GPU with Triton one kernel reads each byte once and writes the result in its type and memory
format, mirrored where that is asked for; without, torch looks the same table up. For the CPU see
:mod:`penstock.device.finish_cpu`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.device.buffer_pool import BufferPool
from penstock.device.finish_cpu import Arithmetic, compute
from penstock.device.nested import change_tensors
from penstock.errors import BadArgument

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def finish(
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.preserve_format,
    flip: int | str | None = None,
    scaling: str = "multiply",
) -> Finish:
    """What turns batches of uint8 images into what a model takes, on the device.

    Every uint8 tensor of shape (batch, channels, height, width) in a batch is changed; all else
    stays. Give it to ``DataLoader(..., device=, finish=)``, or call it with a batch.

    Args:
        mean, std: One number per channel, of values scaled to 0..1, as torchvision's ``Normalize``.
            None: scale to 0..1 only.
        dtype: Of the result.
        memory_format: ``torch.channels_last`` is what convolutions like best.
        flip: The field of the batch (its place or key) that holds one truth value per image:
            those are mirrored left to right. The dataset draws it, so it stays reproducible.
        scaling: ``"multiply"``: bytes times 1/255, as ``v2.ToDtype(scale=True)`` does it.
            ``"divide"``: bytes by 255, as ``ToTensor`` does it. Some values differ in the last bit.

    Example:
        >>> import torch, penstock
        >>> images = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
        >>> normalise = penstock.finish(mean=[0.5], std=[0.5])
        >>> normalise((images, torch.tensor([7])))
        (tensor([[[[-1.,  1.]]]]), tensor([7]))
    """
    BadArgument.unless_one_of("scaling", scaling, ("multiply", "divide"), "penstock.finish")
    if dtype not in _FLOATS:
        raise BadArgument(
            f"dtype={dtype} is no floating-point type",
            remedy="penstock.finish(dtype=torch.float32)",
        )
    return Finish(_make_arithmetic(mean, std, scaling), dtype, memory_format, flip)


class Finish:
    """Made by :func:`finish`. Holds the table, on each device that it was used on.

    Args:
        arithmetic: What becomes of a byte, in each channel.
    """

    def __init__(
        self,
        arithmetic: Arithmetic,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        flip: int | str | None,
    ) -> None:
        if memory_format not in _FORMATS:
            raise BadArgument(
                f"memory_format={memory_format} is not known here",
                remedy="penstock.finish(..., memory_format=torch.channels_last)",
            )
        self._arithmetic = arithmetic
        self._table = table = arithmetic.make_table(dtype)
        self._tables: dict[torch.device, torch.Tensor] = {table.device: table}
        self._memory_format = memory_format
        self._flip = flip
        self._shelf = BufferPool()

    def __call__(self, batch: Any) -> Any:
        """The batch with its images finished."""
        mirrored = None if self._flip is None else self._field(batch)
        return change_tensors(batch, lambda tensor: self._image(tensor, mirrored))

    def _field(self, batch: Any) -> torch.Tensor:
        try:
            field = batch[self._flip]
        except (KeyError, IndexError, TypeError) as error:
            raise BadArgument(
                f"flip={self._flip!r}: the batch has no such field ({type(error).__name__})",
                remedy="penstock.finish(..., flip=2) for the third field of each sample",
            ) from None
        return torch.as_tensor(field).to(torch.bool).reshape(-1)

    def _image(self, tensor: torch.Tensor, mirrored: torch.Tensor | None) -> torch.Tensor:
        if tensor.dtype is not torch.uint8 or tensor.ndim != 4:
            return tensor
        table = self._table_on(tensor.device)
        if table.shape[0] not in (1, tensor.shape[1]):
            raise BadArgument(
                f"mean and std have {table.shape[0]} channels, images {tensor.shape[1]} "
                f"(a tensor of shape {tuple(tensor.shape)})",
                remedy="penstock.finish(mean=[0.5], std=[0.5]) serves any number of channels",
            )
        if mirrored is not None and len(mirrored) != len(tensor):
            raise BadArgument(
                f"flip={self._flip!r} has {len(mirrored)} values for {len(tensor)} images",
                remedy="one truth value per sample",
            )
        if tensor.device.type == "cpu" and not tensor.is_cuda:
            out = self._shelf.empty_like(tensor, table.dtype, self._memory_format)
            return compute(tensor, self._arithmetic, mirrored, out)
        look_up = _fused.look_up() if tensor.is_cuda and tensor.numel() else None
        if look_up is not None:
            out = _empty_like(tensor, table.dtype, self._memory_format)
            flags = None if mirrored is None else mirrored.to(tensor.device)
            try:
                look_up(tensor, table, flags, out)
                return out
            except Exception as error:  # Triton's own, or a compiler's that it needs and misses
                done = _look_up(tensor, table, mirrored, self._memory_format)
                _fused.give_up(error)
                return done
        return _look_up(tensor, table, mirrored, self._memory_format)

    def _table_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = self._table.to(device)
        return self._tables[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {self._table.device: self._table}}


def _make_arithmetic(
    mean: Sequence[float] | None, std: Sequence[float] | None, scaling: str
) -> Arithmetic:
    means, stds = _checked("mean", mean, 0.0), _checked("std", std, 1.0)
    if mean is None and std is None:
        return Arithmetic((), (), scaling == "divide")
    if len({len(values) for values in (mean, std) if values is not None}) > 1:
        raise BadArgument(
            f"mean has {len(means)} channels and std {len(stds)}",
            remedy="one number per channel in both",
        )
    if any(value == 0 for value in stds):
        raise BadArgument(f"std={list(stds)} would divide by 0", remedy="std above 0")
    channels = max(len(means), len(stds))
    means, stds = means * (channels // len(means)), stds * (channels // len(stds))
    return Arithmetic(tuple(means), tuple(stds), scaling == "divide")


def _checked(name: str, values: Any, default: float) -> list[float]:
    if values is None:
        return [default]
    try:
        numbers = [] if isinstance(values, str) else [float(value) for value in values]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise BadArgument(
            f"{name}={values!r} is no list of numbers, one per channel",
            remedy="penstock.finish(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])",
        )
    return numbers


def _empty_like(
    images: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format
) -> torch.Tensor:
    return torch.empty_like(images, dtype=dtype, memory_format=memory_format)


def _look_up(
    images: torch.Tensor,
    table: torch.Tensor,
    mirrored: torch.Tensor | None,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """The table by torch's own operations, by channel to keep what lies between small."""
    out = _empty_like(images, table.dtype, memory_format)
    if mirrored is not None:
        where = mirrored.to(images.device)[:, None, None, None]
        images = torch.where(where, images.flip(3), images)
    for channel in range(images.shape[1]):
        row = table[channel if table.shape[0] > 1 else 0]
        indices = images[:, channel].to(torch.int32)
        out[:, channel] = torch.nn.functional.embedding(indices, row[:, None]).squeeze(-1)
    return out


LookUp = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor], None]


class _Fused:
    """One kernel for all of it, where Triton works. It shows only when it is first used."""

    def __init__(self) -> None:
        self._is_given_up = False

    def look_up(self) -> LookUp | None:
        if self._is_given_up:
            return None
        try:
            from penstock.device.finish_kernel import look_up
        except ImportError:
            return None
        return look_up

    def give_up(self, error: Exception) -> None:
        """Torch's operations do it from now on; said once."""
        self._is_given_up = True
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"penstock.finish: Triton cannot be used here ({reason}). torch's own operations do "
            "the same, more slowly. A C compiler (apt install gcc) is what is often missing.",
            stacklevel=2,
        )


_fused = _Fused()
