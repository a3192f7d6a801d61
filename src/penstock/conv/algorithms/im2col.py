"""Convolution as a matrix product over columns (im2col), in chunks under a memory cap.

A column holds the input values that the kernel covers at one output position. The columns of a
chunk are a view of the padded input (``as_strided``), copied once into a buffer that all chunks of
the call reuse. The product is written directly into its part of the output. In channels_last layout
the copy moves runs of channels, and the product is channels_last too, so there is no other copy.

Error: sums of ``C/groups * taps`` products, summed by torch's matrix product. For half types it
sums in float32 and rounds once, and a weight gradient adds the chunks in float32.

On GPUs where Triton runs, a kernel can write the columns (``prepare_*``). torch's own copy of the
view takes several times as long.

Memory in addition to inputs and results, in elements, for ``b`` samples and ``r`` rows of the first
spatial axis in a chunk: ``b * r * positions_per_row * taps * C  +  b * padded_rows * C``. The
second term applies only with padding. The total is at most ``cap``, or one row of one sample if
that is larger.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch

from penstock.conv.algorithms.triton_launch import Launch, five, kernels, three
from penstock.conv.geometry import (
    INPUT_GRADIENT,
    Geometry,
    Pass,
    Prepared,
    dense,
    sum_dtype,
    turned,
)


@dataclass(frozen=True)
class _Chunk:
    """A range of samples, and a range of their output rows."""

    samples: slice
    rows: slice

    @property
    def num_samples(self) -> int:
        return int(self.samples.stop - self.samples.start)

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def columns_bytes(g: Geometry, num_bytes: int) -> int:
    """Return the memory that all columns together would take.

    Example:
        >>> from penstock.conv.geometry import Geometry
        >>> g = Geometry(batch=1, in_channels=2, out_channels=4, groups=1, in_size=(4, 4),
        ...              out_size=(4, 4), kernel=(3, 3), stride=(1, 1), padding=(1, 1),
        ...              dilation=(1, 1))
        >>> columns_bytes(g, 4)
        1152
    """
    return g.batch * g.num_positions * g.in_channels * g.num_taps * num_bytes


def _chunks(g: Geometry, cap_bytes: int, row_bytes: int) -> Iterator[_Chunk]:
    """Split the output so that the columns of each part stay under the cap."""
    rows = g.out_size[0]
    sample_bytes = row_bytes * rows
    if sample_bytes <= cap_bytes:
        step = max(1, min(g.batch, cap_bytes // max(1, sample_bytes)))
        for start in range(0, g.batch, step):
            yield _Chunk(slice(start, min(start + step, g.batch)), slice(0, rows))
        return
    step = max(1, cap_bytes // max(1, row_bytes))
    for sample, start in product(range(g.batch), range(0, rows, step)):
        yield _Chunk(slice(sample, sample + 1), slice(start, min(start + step, rows)))


def _row_bytes(g: Geometry, num_bytes: int) -> int:
    return columns_bytes(g, num_bytes) // max(1, g.batch * g.out_size[0])


class _Window:
    """Views of the padded input, one chunk at a time, in a shared buffer.

    The axes are ``[samples, *spatial, channels]`` in either memory layout.
    """

    def __init__(self, g: Geometry, x: torch.Tensor) -> None:
        self.g = g
        self.x = x.movedim(1, -1)
        self.buffer: torch.Tensor | None = None

    def padded(self, chunk: _Chunk) -> torch.Tensor:
        """Return the input rows that the kernel reads for this chunk, with their padding."""
        g = self.g
        first = chunk.rows.start * g.stride[0]
        seen = (chunk.num_rows - 1) * g.stride[0] + (g.kernel[0] - 1) * g.dilation[0] + 1
        if not any(g.padding):
            return self.x[chunk.samples, first : first + seen]
        shape = (chunk.num_samples, seen, *g.padded_size[1:], g.in_channels)
        buffer, is_new = self.take(shape)
        low = first - g.padding[0]  # in rows of the unpadded input
        top, bottom = max(low, 0), min(low + seen, g.in_size[0])
        if not is_new and (top > low or bottom < low + seen):
            buffer.zero_()
        if bottom > top:
            place = (slice(None), slice(top - low, bottom - low), *g.unpadded_slices[1:])
            buffer[place] = self.x[chunk.samples, top:bottom]
        return buffer

    def take(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
        """Return the buffer, and whether it is new because the shape is different."""
        is_new = self.buffer is None or tuple(self.buffer.shape) != shape
        if is_new and self.g.is_channels_last:
            self.buffer = self.x.new_zeros(shape)
        elif is_new:
            self.buffer = self.x.new_zeros((shape[0], shape[-1], *shape[1:-1])).movedim(1, -1)
        assert self.buffer is not None
        return self.buffer, is_new

    def columns(self, chunk: _Chunk) -> torch.Tensor:
        """Return a view ``[samples, *out, *kernel, channels]``. Nothing is copied here."""
        g, seen = self.g, self.padded(chunk)
        strides = seen.stride()
        outer = [step * stride for step, stride in zip(strides[1:-1], g.stride, strict=True)]
        taps = [step * dilation for step, dilation in zip(strides[1:-1], g.dilation, strict=True)]
        size = (chunk.num_samples, chunk.num_rows, *g.out_size[1:], *g.kernel, g.in_channels)
        return seen.as_strided(
            size, (strides[0], *outer, *taps, strides[-1]), seen.storage_offset()
        )


# -- forward ---------------------------------------------------------------------------------------


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``y`` as ``[batch, out_channels, *out_size]``, in the geometry's memory layout."""
    if g.is_channels_last and (g.groups == 1 or x.is_cuda):
        return _forward_last(g, x, w, cap_bytes)
    return _forward_first(g, x, w, cap_bytes)


def _forward_last(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``[positions, taps * C] @ [taps * C, O]`` in channels_last, all groups together."""
    depth = g.num_taps * g.group_in
    # [O, C/g, *kernel] -> [g, taps * C/g, O/g]
    kernels = w.reshape(g.groups, g.group_out, g.group_in, g.num_taps).permute(0, 3, 2, 1)
    kernels = kernels.reshape(g.groups, depth, g.group_out)
    y = x.new_empty((g.batch, *g.out_size, g.out_channels))
    window, buffer = _Window(g, x), None
    for chunk in _chunks(g, cap_bytes, _row_bytes(g, x.element_size())):
        num = chunk.num_samples * chunk.num_rows * prod(g.out_size[1:])
        buffer = _fitting(buffer, x, num * depth * g.groups)
        cells = buffer[: num * depth * g.groups]
        _fill_last(g, cells, window.columns(chunk))
        part = y[chunk.samples, chunk.rows]
        if g.groups == 1:
            torch.mm(cells.view(num, depth), kernels[0], out=part.view(num, g.out_channels))
        else:
            products = torch.bmm(cells.view(g.groups, num, depth), kernels)
            part.view(num, g.groups, g.group_out).copy_(products.transpose(0, 1))
    return y.movedim(-1, 1)


def _fill_last(g: Geometry, cells: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy a view of columns into the buffer, as ``[groups, positions, taps, C/groups]``."""
    places, taps = columns.shape[: g.num_dims + 1], columns.shape[g.num_dims + 1 : -1]
    grouped = columns.view(*columns.shape[:-1], g.groups, g.group_in)
    last = grouped.dim() - 1
    order = (last - 1, *range(last - 1), last)
    cells.view(g.groups, *places, *taps, g.group_in).copy_(grouped.permute(order))


def _forward_first(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``[O, C * taps] @ [C * taps, positions]`` in contiguous layout, for each sample."""
    depth = g.group_in * g.num_taps
    kernels = w.reshape(g.groups, g.group_out, depth)
    y = x.new_empty((g.batch, g.out_channels, *g.out_size))
    window, buffer = _Window(g, x), None
    for chunk in _chunks(g, cap_bytes, _row_bytes(g, x.element_size())):
        num, places = chunk.num_samples, chunk.num_rows * prod(g.out_size[1:])
        buffer = _fitting(buffer, x, num * places * depth * g.groups)
        cells = buffer[: num * places * depth * g.groups]
        _fill_first(g, cells, window.columns(chunk), is_grouped=g.groups > 1)
        part = y[chunk.samples, :, chunk.rows]
        if g.groups == 1:
            columns = cells.view(num, depth, places)
            if part.is_contiguous():
                out = part.view(num, g.out_channels, places)
                torch.bmm(kernels.expand(num, -1, -1), columns, out=out)
            else:  # some rows of one sample
                part.copy_(torch.bmm(kernels.expand(num, -1, -1), columns).view(part.shape))
        else:
            products = torch.bmm(kernels, cells.view(g.groups, depth, num * places))
            products = products.view(g.out_channels, num, *part.shape[2:])
            part.copy_(products.transpose(0, 1))
    return y


def _fill_first(
    g: Geometry, cells: torch.Tensor, columns: torch.Tensor, *, is_grouped: bool
) -> None:
    """Copy into ``[groups, C/groups, taps, samples, positions]``.

    Without ``is_grouped`` the samples come first.
    """
    n = g.num_dims
    taps, places = tuple(range(n + 1, 2 * n + 1)), tuple(range(1, n + 1))
    order = (2 * n + 1, *taps, 0, *places) if is_grouped else (0, 2 * n + 1, *taps, *places)
    view = columns.permute(order)
    cells.view(view.shape).copy_(view)


def _fitting(buffer: torch.Tensor | None, x: torch.Tensor, num: int) -> torch.Tensor:
    return x.new_empty(num) if buffer is None or buffer.numel() < num else buffer


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` of a convolution with stride 1: ``dy`` convolved with the taps in reverse."""
    back = turned(g)
    for axis, missing in enumerate(back.padding, 2):
        if missing < 0:  # the outermost positions of dy saw padding only
            dy = dy.narrow(axis, -missing, dy.shape[axis] + 2 * missing)
    padding = tuple(max(0, p) for p in back.padding)
    grouped = w.reshape(g.groups, g.group_out, g.group_in, *g.kernel).transpose(1, 2)
    taps = grouped.flip([*range(3, g.num_dims + 3)])
    taps = taps.reshape(g.in_channels, g.group_out, *g.kernel)
    return forward(replace(back, in_size=tuple(dy.shape[2:]), padding=padding), dy, taps, cap_bytes)


# -- weight gradient -------------------------------------------------------------------------------


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dw`` as ``[O, C/groups, *kernel]``, never holding all columns in memory.

    Copies follow the memory layout: runs of channels in channels_last, runs of positions otherwise.
    In the second case the samples are multiplied one by one if that takes less memory than a copy
    of ``dy``, which is then read in place. The sums are shorter too, and rounded less.
    """
    dw: torch.Tensor | None = None
    is_last = g.is_channels_last and g.groups == 1
    by_sample = not is_last and g.group_out <= g.num_positions
    window, buffer = _Window(g, x), None
    for chunk in _chunks(g, cap_bytes, _row_bytes(g, x.element_size())):
        places = chunk.num_rows * prod(g.out_size[1:])
        num_cells = chunk.num_samples * places * g.num_taps * g.in_channels
        buffer = _fitting(buffer, x, num_cells)
        cells, errors = buffer[:num_cells], dy[chunk.samples, :, chunk.rows]
        num = places if by_sample else chunk.num_samples * places
        if is_last:
            _fill_last(g, cells, window.columns(chunk))
            matrix = cells.view(1, num, -1).transpose(1, 2)
            errors = errors.movedim(1, -1).reshape(1, num, g.out_channels)
        else:
            _fill_first(g, cells, window.columns(chunk), is_grouped=not by_sample)
            errors = errors if by_sample else errors.transpose(0, 1)
            errors = errors.reshape(-1, g.group_out, num).transpose(1, 2)
            matrix = cells.view(len(errors), -1, num)
        part = torch.bmm(matrix, errors)
        if by_sample:
            part = part.view(chunk.num_samples, g.groups, *part.shape[1:])
            part = part[0] if len(part) == 1 else part.sum(0, dtype=sum_dtype(x))
        dw = part.to(sum_dtype(x)) if dw is None else dw.add_(part)
    assert dw is not None
    return _shape_weights(g, dw, is_last=is_last).to(x.dtype)


def _shape_weights(g: Geometry, dw: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    """Reshape ``[groups, depth, O/groups]`` to ``[O, C/groups, *kernel]``.

    With ``is_last``, the depth is ordered by tap, then by channel.
    """
    if is_last:
        parts = dw.view(g.groups, g.num_taps, g.group_in, g.group_out).permute(0, 3, 2, 1)
    else:
        parts = dw.view(g.groups, g.group_in, g.num_taps, g.group_out).permute(0, 3, 1, 2)
    return parts.reshape(g.out_channels, g.group_in, *g.kernel)


# -- columns written by one kernel, in Triton ------------------------------------------------------

GATHERED_PER_PROGRAM = 4096
MAX_POSITIONS = 1 << 31
"""The kernel indexes positions and the elements of a sample with 32 bits."""


def can_triton(g: Geometry, which: Pass, dtype: torch.dtype) -> bool:
    """Return True if a kernel can write the columns: in channels_last, with one group.

    Input gradients are not among them: implicit products were faster for all layers measured.
    """
    largest = g.batch * max(g.in_channels * prod(g.in_size), g.out_channels * g.num_positions)
    return (
        dtype in (torch.float32, torch.float16, torch.bfloat16)
        and (g.is_channels_last and g.groups == 1 and not g.is_pointwise)
        and which != INPUT_GRADIENT
        and g.in_channels % 16 == 0
        and largest < MAX_POSITIONS
    )


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``[positions, taps * C] @ [taps * C, O]``."""
    depth = g.num_taps * g.in_channels
    is_last = w.movedim(1, -1).is_contiguous()
    gathers = _plan_gathers(g, x, cap_bytes)
    shape = (g.batch, g.out_channels, *g.out_size)
    strides = g.strides(g.out_channels, g.out_size)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ordered = w if is_last else w.movedim(1, -1).contiguous()
        weights, (first, *others) = ordered.as_strided((depth, g.out_channels), (1, depth)), gathers
        cells = first.new_cells(x)
        if not others:
            return torch.mm(first.fill(x, cells), weights).as_strided(shape, strides)
        y = x.new_empty((gathers[-1].rows[1], g.out_channels))
        for gather in gathers:
            torch.mm(gather.fill(x, cells), weights, out=y[slice(*gather.rows)])
        return y.as_strided(shape, strides)

    return run


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``[O, positions] @ [positions, taps * C]``. Chunks are added in float32."""
    matrix = (g.out_channels, g.batch * g.num_positions)
    shape = (g.out_channels, g.in_channels, *g.kernel)
    strides = g.strides(g.in_channels, g.kernel)
    settle = dense(g, dy, g.out_channels, g.out_size)
    gathers = _plan_gathers(g, x, cap_bytes)

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        errors, (first, *others) = settle(dy).as_strided(matrix, (1, matrix[0])), gathers
        cells = first.new_cells(x)
        if not others:
            return torch.mm(errors, first.fill(x, cells)).as_strided(shape, strides)
        dw = torch.zeros((matrix[0], first.depth), dtype=sum_dtype(x), device=x.device)
        for gather in gathers:
            dw += torch.mm(errors[:, slice(*gather.rows)], gather.fill(x, cells))
        return dw.to(x.dtype).as_strided(shape, strides)

    return run


@dataclass(frozen=True)
class _Gather:
    """Writes the columns ``[positions, depth]`` of a range of positions."""

    rows: tuple[int, int]
    depth: int
    launch: Launch

    def new_cells(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((self.rows[1] - self.rows[0], self.depth))

    def fill(self, x: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        num = self.rows[1] - self.rows[0]
        self.launch(x, cells)
        return cells if len(cells) == num else cells[:num]


def _plan_gathers(g: Geometry, x: torch.Tensor, cap_bytes: int) -> list[_Gather]:
    """Return what writes the columns, in ranges of positions under the memory cap."""
    block_c = min(256, g.in_channels & -g.in_channels)
    block_r = GATHERED_PER_PROGRAM // block_c
    depth, num_rows = g.in_channels * g.num_taps, g.batch * g.num_positions
    each = max(1, min(num_rows, cap_bytes // (depth * x.element_size())))
    offset = three(tuple(-p for p in g.padding), 0)
    found = []
    for first in range(0, num_rows, each):
        num = min(each, num_rows - first)
        launch = Launch(
            kernels().gather_columns,
            (-(-num // block_r) * g.num_taps, g.in_channels // block_c),
            (
                *(first, num, *three(g.out_size, 1), *three(g.in_size, 1), g.in_channels),
                *(*three(g.kernel, 1), *three(g.stride, 1), *three(g.dilation, 0), *offset),
                *five(x.stride()),
            ),
            {"DEEP": g.num_dims == 3, "BLOCK_R": block_r, "BLOCK_C": block_c},
        )
        found.append(_Gather((first, first + num), depth, launch))
    return found
