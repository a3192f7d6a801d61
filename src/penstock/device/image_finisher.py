"""``penstock.finish``: uint8 images to normalised floats, on the device.

Images are copied as uint8, a quarter of what float32 takes. A byte has 256 values, so everything
that normalising does to a channel is a table of 256 floats. It is computed once, on the CPU, by the
same operations as torchvision's: so the result is theirs to the last bit, also on GPUs, where
dividing by a number is done another way and rounds differently.

On a GPU with Triton one kernel reads each byte once and writes the result in its type and memory
format, mirrored where that is asked for; without Triton, torch looks the same table up.

On the CPU images are done one at a time, each of which stays in the cache. OpenCV, where it is
installed, looks each byte up in the table: one pass, in the calling thread (87 microseconds for
3 x 224 x 224, x86-64). Otherwise torchvision's operations are done themselves, in four passes
(142), because torch has no such look-up for the CPU. Torch does those in several threads, which
wait for each other where workers hold the cores.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.device.buffer_pool import BufferPool
from penstock.device.nested import map_tensors
from penstock.errors import BadArgument
from penstock.machine.image_libraries import opencv

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
) -> ImageFinisher:
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
    return ImageFinisher(_make_normalization(mean, std, scaling), dtype, memory_format, flip)


class ImageFinisher:
    """Made by :func:`finish`. Holds the table, on each device that it was used on.

    Args:
        normalization: From a byte to a float, in each channel.
    """

    def __init__(
        self,
        normalization: Normalization,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        flip: int | str | None,
    ) -> None:
        if memory_format not in _FORMATS:
            raise BadArgument(
                f"memory_format={memory_format} is not known here",
                remedy="penstock.finish(..., memory_format=torch.channels_last)",
            )
        self._normalization = normalization
        self._table = table = normalization.make_table(dtype)
        self._tables: dict[torch.device, torch.Tensor] = {table.device: table}
        self._memory_format = memory_format
        self._flip = flip
        self._buffers = BufferPool()

    def __call__(self, batch: Any) -> Any:
        """The batch with its images finished."""
        mirrored = None if self._flip is None else self._field(batch)
        return map_tensors(batch, lambda tensor: self._image(tensor, mirrored))

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
            out = self._buffers.empty_like(tensor, table.dtype, self._memory_format)
            return _normalize_on_cpu(tensor, self._normalization, mirrored, out)
        out = torch.empty_like(tensor, dtype=table.dtype, memory_format=self._memory_format)
        flags = None if mirrored is None else mirrored.to(tensor.device)
        if not (tensor.is_cuda and _look_up_by_triton(tensor, table, flags, out)):
            _look_up(tensor, table, flags, out)
        return out

    def _table_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = self._table.to(device)
        return self._tables[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {self._table.device: self._table}}


@dataclass(frozen=True)
class Normalization:
    """What torchvision does to a byte: scale, then subtract and divide by channel.

    Args:
        means, stds: One number per channel; one channel serves any number, none scales only.
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]
    divides: bool

    def apply(self, values: torch.Tensor) -> None:
        """In place, to float32 values of shape (channels, ...)."""
        if self.divides:
            values.div_(255)
        else:
            values.mul_(1.0 / 255)
        if self.means:
            shape = (-1, *(1,) * (values.ndim - 1))
            values.sub_(_float32(self.means).view(shape))
            values.div_(_float32(self.stds).view(shape))

    @functools.lru_cache(maxsize=16)  # noqa: B019 (it has no state but its numbers)
    def make_table(self, dtype: torch.dtype) -> torch.Tensor:
        """(channels, 256): the result of each byte, in its type."""
        table = _float32(range(256)).repeat(max(1, len(self.means)), 1)
        self.apply(table)
        return table.to(dtype)


def _float32(values: Iterable[float]) -> torch.Tensor:
    """On the CPU and of this type, whatever the user has made torch's defaults."""
    return torch.tensor(list(values), dtype=torch.float32, device="cpu")


def _make_normalization(
    mean: Sequence[float] | None, std: Sequence[float] | None, scaling: str
) -> Normalization:
    means, stds = _check_channels("mean", mean, 0.0), _check_channels("std", std, 1.0)
    if mean is None and std is None:
        return Normalization((), (), scaling == "divide")
    if len({len(values) for values in (mean, std) if values is not None}) > 1:
        raise BadArgument(
            f"mean has {len(means)} channels and std {len(stds)}",
            remedy="one number per channel in both",
        )
    if any(value == 0 for value in stds):
        raise BadArgument(f"std={list(stds)} would divide by 0", remedy="std above 0")
    channels = max(len(means), len(stds))
    means, stds = means * (channels // len(means)), stds * (channels // len(stds))
    return Normalization(tuple(means), tuple(stds), scaling == "divide")


def _check_channels(name: str, values: Any, default: float) -> list[float]:
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


def _normalize_on_cpu(
    images: torch.Tensor,
    normalization: Normalization,
    mirrored: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill ``out`` from uint8 ``images``, mirrored where their flag is set."""
    if not images.numel():
        return out
    scratch = torch.empty_like(images[0], dtype=torch.float32)
    is_in_place = out.dtype is torch.float32 and out[0].stride() == scratch.stride()
    flags = [False] * len(images) if mirrored is None else mirrored.tolist()
    cv2 = opencv() if images[0].is_contiguous() and scratch.is_contiguous() else None
    table = normalization.make_table(torch.float32).numpy()
    for image, target, is_mirrored in zip(images, out, flags, strict=True):
        values = target if is_in_place else scratch
        source = image.flip(2) if is_mirrored else image
        if cv2 is not None:
            planes = zip(source.numpy(), values.numpy(), strict=True)
            for channel, (plane, result) in enumerate(planes):
                cv2.LUT(plane, table[channel if len(table) > 1 else 0], result)
        else:
            values.copy_(source)
            normalization.apply(values)
        if not is_in_place:
            target.copy_(values)
    return out


def _look_up(
    images: torch.Tensor, table: torch.Tensor, mirrored: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Fill ``out`` by torch's own operations, by channel to keep what lies between small."""
    if mirrored is not None:
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    for channel in range(images.shape[1]):
        row = table[channel if table.shape[0] > 1 else 0]
        indices = images[:, channel].to(torch.int32)
        out[:, channel] = torch.nn.functional.embedding(indices, row[:, None]).squeeze(-1)


_can_use_triton = True


def _look_up_by_triton(
    images: torch.Tensor, table: torch.Tensor, mirrored: torch.Tensor | None, out: torch.Tensor
) -> bool:
    """Fill ``out`` by one kernel; False where Triton does not work, as its first use shows."""
    global _can_use_triton
    if not _can_use_triton or not images.numel():
        return False
    try:
        from penstock.device.triton_lookup import look_up
    except ImportError:
        _can_use_triton = False
        return False
    try:
        look_up(images, table, mirrored, out)
    except Exception as error:  # Triton's own, or a compiler's that it needs and misses
        _can_use_triton = False
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"penstock.finish: Triton cannot be used here ({reason}). torch's own operations do "
            "the same, more slowly. A C compiler (apt install gcc) is what is often missing.",
            stacklevel=2,
        )
        return False
    return True
