"""``penstock.finish``: converts uint8 images to normalized floats, on the device.

Images are copied as uint8, which takes a quarter of the bytes of float32. A byte has 256 values, so
normalizing a channel is a lookup in a table of 256 floats. The table is computed once, on the CPU,
with the same operations as torchvision. So the result equals torchvision's to the last bit, also on
GPUs, where division is implemented differently and rounds differently.

On a GPU with Triton, one kernel reads each byte once and writes the result in its dtype and memory
format, mirrored if requested. Without Triton, torch looks up the same table.

On the CPU, images are processed one at a time, so that each stays in the cache. If OpenCV is
installed, it looks up each byte in the table: one pass, in the calling thread (87 microseconds for
3 x 224 x 224, x86-64). channels_last images take 1.5 times as long. Otherwise torchvision's
operations are applied, in four passes (142 microseconds), because torch has no such lookup for the
CPU. torch runs them in several threads, which wait for each other when workers occupy the cores.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.device.buffer_pool import BufferPool
from penstock.device.nested import map_tensors
from penstock.errors import BadArgument
from penstock.machine.image_libraries import opencv

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MAX_OPENCV_CHANNELS = 4
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
    """Make a function that converts batches of uint8 images to normalized floats, on the device.

    It converts every uint8 tensor of shape (batch, channels, height, width) in a batch and leaves
    everything else unchanged. Pass it to ``DataLoader(..., device=, finish=)``, or call it with a
    batch.

    Args:
        mean, std: One number per channel, for values scaled to 0..1, as in torchvision's
            ``Normalize``. None only scales to 0..1.
        dtype: Dtype of the result.
        memory_format: Memory format of the result. Convolutions are usually fastest with
            ``torch.channels_last``.
        flip: The field of the batch (index or key) that holds one boolean per image. Images with
            True are mirrored left to right. The dataset draws it, so it stays reproducible.
        scaling: ``"multiply"`` multiplies bytes by 1/255, like ``v2.ToDtype(scale=True)``.
            ``"divide"`` divides bytes by 255, like ``ToTensor``. Some values differ in the last
            bit.

    Example:
        >>> import torch, penstock
        >>> images = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
        >>> normalize = penstock.finish(mean=[0.5], std=[0.5])
        >>> normalize((images, torch.tensor([7])))
        (tensor([[[[-1.,  1.]]]]), tensor([7]))
    """
    BadArgument.unless_one_of("scaling", scaling, ("multiply", "divide"), "penstock.finish")
    if dtype not in _FLOATS:
        raise BadArgument(
            f"dtype={dtype} must be a floating-point dtype",
            remedy="penstock.finish(dtype=torch.float32)",
        )
    return ImageFinisher(_make_normalization(mean, std, scaling), dtype, memory_format, flip)


class ImageFinisher:
    """Converts images to normalized floats. Created by :func:`finish`.

    It keeps a copy of the lookup table on each device that it was used on.

    Args:
        normalization: Maps a byte to a float, for each channel.
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
                f"memory_format={memory_format} is not supported",
                remedy="penstock.finish(..., memory_format=torch.channels_last)",
            )
        self._normalization = normalization
        self._table = table = normalization.make_table(dtype)
        self._tables: dict[torch.device, torch.Tensor] = {table.device: table}
        self._memory_format = memory_format
        self._flip = flip
        self._buffers = BufferPool()

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images converted."""
        mirrored = None if self._flip is None else self._field(batch)
        return map_tensors(batch, lambda tensor: self._image(tensor, mirrored))

    def _field(self, batch: Any) -> torch.Tensor:
        try:
            field = batch[self._flip]
        except (KeyError, IndexError, TypeError) as error:
            raise BadArgument(
                f"flip={self._flip!r}: the batch does not have this field ({type(error).__name__})",
                remedy="penstock.finish(..., flip=2) uses the third field of each sample",
            ) from None
        return torch.as_tensor(field).to(torch.bool).reshape(-1)

    def _image(self, tensor: torch.Tensor, mirrored: torch.Tensor | None) -> torch.Tensor:
        if tensor.dtype is not torch.uint8 or tensor.ndim != 4:
            return tensor
        table = self._table_on(tensor.device)
        if table.shape[0] not in (1, tensor.shape[1]):
            raise BadArgument(
                f"mean and std have {table.shape[0]} channels, but the images have "
                f"{tensor.shape[1]} (a tensor of shape {tuple(tensor.shape)})",
                remedy="penstock.finish(mean=[0.5], std=[0.5]) works for any number of channels",
            )
        if mirrored is not None and len(mirrored) != len(tensor):
            raise BadArgument(
                f"flip={self._flip!r} has {len(mirrored)} values for {len(tensor)} images",
                remedy="return one boolean per sample in this field",
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
    """torchvision's normalization of a byte: scale, then subtract and divide per channel.

    Args:
        means, stds: One number per channel. A single number applies to all channels. If empty,
            bytes are only scaled.
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]
    divides: bool

    def apply(self, values: torch.Tensor) -> None:
        """Normalize float32 values of shape (channels, ...) in place."""
        if self.divides:
            values.div_(255)
        else:
            values.mul_(1.0 / 255)
        if self.means:
            shape = (-1, *(1,) * (values.ndim - 1))
            values.sub_(_float32(self.means).view(shape))
            values.div_(_float32(self.stds).view(shape))

    @functools.lru_cache(maxsize=16)  # noqa: B019 (instances hold only a few numbers)
    def make_table(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a table (channels, 256) with the result for each byte."""
        table = _float32(range(256)).repeat(max(1, len(self.means)), 1)
        self.apply(table)
        return table.to(dtype)


def _float32(values: Iterable[float]) -> torch.Tensor:
    """Return a float32 tensor on the CPU, regardless of torch's default dtype and device."""
    return torch.tensor(list(values), dtype=torch.float32, device="cpu")


def _make_normalization(
    mean: Sequence[float] | None, std: Sequence[float] | None, scaling: str
) -> Normalization:
    means, stds = _check_channels("mean", mean, 0.0), _check_channels("std", std, 1.0)
    if mean is None and std is None:
        return Normalization((), (), scaling == "divide")
    if len({len(values) for values in (mean, std) if values is not None}) > 1:
        raise BadArgument(
            f"mean has {len(means)} channels, but std has {len(stds)}",
            remedy="give one number per channel in both",
        )
    if any(value == 0 for value in stds):
        raise BadArgument(
            f"std={list(stds)} would divide by 0", remedy="use values above 0 for std"
        )
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
            f"{name}={values!r} must be a list of numbers, one per channel",
            remedy="penstock.finish(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])",
        )
    return numbers


def _normalize_on_cpu(
    images: torch.Tensor,
    normalization: Normalization,
    mirrored: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill ``out`` from uint8 ``images``, mirroring those whose flag is set."""
    if not images.numel():
        return out
    scratch = torch.empty_like(images[0], dtype=torch.float32)
    is_in_place = out.dtype is torch.float32 and out[0].stride() == scratch.stride()
    flags = [False] * len(images) if mirrored is None else mirrored.tolist()
    look_up = _find_opencv_lookup(images[0], scratch, normalization.make_table(torch.float32))
    for image, target, is_mirrored in zip(images, out, flags, strict=True):
        values = target if is_in_place else scratch
        source = image.flip(2) if is_mirrored else image
        if look_up is not None:
            look_up(source, values)
        else:
            values.copy_(source)
            normalization.apply(values)
        if not is_in_place:
            target.copy_(values)
    return out


def _find_opencv_lookup(
    image: torch.Tensor, values: torch.Tensor, table: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """Return a function that fills ``values`` from an image of this format, or None."""
    cv2, rows = opencv(), table.numpy()
    if cv2 is None:
        return None
    if image.is_contiguous() and values.is_contiguous():

        def look_up_planes(source: torch.Tensor, values: torch.Tensor) -> None:
            planes = zip(source.numpy(), values.numpy(), strict=True)
            for channel, (plane, result) in enumerate(planes):
                cv2.LUT(plane, rows[channel if len(rows) > 1 else 0], result)

        return look_up_planes
    is_last = all(one.permute(1, 2, 0).is_contiguous() for one in (image, values))
    if not is_last or len(image) > _MAX_OPENCV_CHANNELS:
        return None
    pixel_table = rows.T.copy()[None] if len(rows) > 1 else rows

    def look_up_pixels(source: torch.Tensor, values: torch.Tensor) -> None:
        cv2.LUT(source.permute(1, 2, 0).numpy(), pixel_table, values.permute(1, 2, 0).numpy())

    return look_up_pixels


def _look_up(
    images: torch.Tensor, table: torch.Tensor, mirrored: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Fill ``out`` with torch operations, one channel at a time to keep intermediates small."""
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
    """Fill ``out`` with one Triton kernel. Returns False if Triton does not work.

    This is known from its first use.
    """
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
    except Exception as error:  # from Triton, or from a missing compiler
        _can_use_triton = False
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"penstock.finish: Triton cannot be used on this machine ({reason}). torch's own "
            "operations give the same result, more slowly. Often a C compiler is missing "
            "(apt install gcc).",
            stacklevel=2,
        )
        return False
    return True
