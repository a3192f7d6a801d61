"""Convolution as a matrix product over columns (im2col), in chunks under a memory cap.

A column holds the input values that the kernel covers at one output position. The columns of a
chunk are a view of the padded input (``as_strided``), which is copied once. In channels_last layout
the copy moves runs of channels, and the product is channels_last too, so there is no other copy.
With several chunks, each product is copied to its part of the output.

Error: sums of ``C/groups * taps`` products, summed by torch's matrix product. For half types it
sums in float32 and rounds once, and a weight gradient adds the chunks in float32.

On GPUs where Triton runs, a kernel can write the columns (``prepare_gathered_*``). torch's own copy
of the view takes several times as long.

Memory in addition to inputs and results, in elements, for ``b`` samples and ``r`` rows of the first
spatial axis in a chunk: ``b * r * positions_per_row * (taps * C + O)  +  b * padded_rows * C``. The
last term applies only to chunks that reach into the padding, and ``O`` only with several chunks.
The columns take at most ``cap``, or one row of one sample if that is larger.

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
    Sizes,
    Step,
    dense,
    empty,
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


def _chunks(g: Geometry, cap_bytes: int, num_bytes: int) -> Iterator[_Chunk]:
    """Split the output so that the columns of each part stay under the cap."""
    rows = g.out_size[0]
    row_bytes = columns_bytes(g, num_bytes) // max(1, g.batch * rows)
    sample_bytes = row_bytes * rows
    if sample_bytes <= cap_bytes:
        step = max(1, min(g.batch, cap_bytes // max(1, sample_bytes)))
        for start in range(0, g.batch, step):
            yield _Chunk(slice(start, min(start + step, g.batch)), slice(0, rows))
        return
    step = max(1, cap_bytes // max(1, row_bytes))
    for sample, start in product(range(g.batch), range(0, rows, step)):
        yield _Chunk(slice(sample, sample + 1), slice(start, min(start + step, rows)))


@dataclass(frozen=True)
class _View:
    """A view of a tensor with known strides: its shape, and its place in the tensor's memory."""

    shape: Sizes
    strides: Sizes
    first: int = 0

    def of(self, t: torch.Tensor) -> torch.Tensor:
        return t.as_strided(self.shape, self.strides, t.storage_offset() + self.first)

    def in_order(self, *order: int) -> _View:
        """Return the view with its axes in this order."""
        shape, strides = ([values[axis] for axis in order] for values in (self.shape, self.strides))
        return _View(tuple(shape), tuple(strides), self.first)

    def grouped(self, groups: int) -> _View:
        """Split the last axis, the channels, into groups and the channels of a group."""
        each = self.shape[-1] // groups
        strides = (*self.strides[:-1], each * self.strides[-1], self.strides[-1])
        return _View((*self.shape[:-1], groups, each), strides, self.first)

    def reshaped(self, shape: Sizes) -> Step:
        """Return a function that gives the view this shape. It copies the view if it has to."""
        return lambda t: self.of(t).reshape(shape)


def _part(strides: Sizes, shape: Sizes, start: Sizes) -> _View:
    """Return a part of a tensor ``[samples, channels, *spatial]``, with the channels last."""
    strides, shape, start = ((n, *rest, c) for n, c, *rest in (strides, shape, start))
    return _View(shape, strides, sum(a * b for a, b in zip(start, strides, strict=True)))


class _Columns:
    """The columns of a chunk ``[samples, *out, *kernel, channels]``, and how they are copied.

    Args:
        strides: Those of the tensor that the columns are taken from.
    """

    def __init__(self, g: Geometry, strides: Sizes, chunk: _Chunk) -> None:
        num, channels, start = chunk.num_samples, g.in_channels, chunk.rows.start * g.stride[0]
        places = (chunk.num_rows, *g.out_size[1:])
        windows = zip(places, g.kernel, g.stride, g.dilation, strict=True)
        seen = tuple((n - 1) * s + (k - 1) * d + 1 for n, k, s, d in windows)
        # The first position of the input that the columns cover along each axis: negative in the
        # padding, and positive if the padding is negative. Then the first that is in the input.
        low = (start - g.padding[0], *(-p for p in g.padding[1:]))
        first = tuple(max(0, n) for n in low)
        ends = (min(n + s, size) for n, s, size in zip(low, seen, g.in_size, strict=True))
        inside = tuple(max(0, end - n) for end, n in zip(ends, first, strict=True))
        source = _part(strides, (num, channels, *inside), (chunk.samples.start, 0, *first))
        self._num_padded, self._pair, whole = 0, None, source
        if inside != seen:
            own = replace(g, batch=num).strides(channels, seen)
            whole = _part(own, (num, channels, *seen), (0,) * len(own))
            margins = (a - b for a, b in zip(first, low, strict=True))
            inner = _part(own, (num, channels, *inside), (0, 0, *margins))
            self._num_padded, self._pair = num * channels * prod(seen), (inner, source)
        axes = whole.strides
        outer = [step * stride for step, stride in zip(axes[1:-1], g.stride, strict=True)]
        taps = [step * dilation for step, dilation in zip(axes[1:-1], g.dilation, strict=True)]
        self.view = _View(
            (num, *places, *g.kernel, channels),
            (axes[0], *outer, *taps, axes[-1]),
            whole.first,
        )

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return a padded copy of the part of ``x`` that the columns need."""
        assert self._pair is not None
        inner, source = self._pair
        padded = x.new_zeros(self._num_padded)
        inner.of(padded).copy_(source.of(x))
        return padded

    def matrix(self, view: _View, shape: Sizes) -> Step:
        """Return a function that copies a rearranged view of the columns of ``x`` to a matrix."""
        copy = view.reshaped(shape)
        return copy if self._pair is None else lambda x: copy(self._pad(x))


# -- forward and input gradient --------------------------------------------------------------------


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``y`` as ``[batch, out_channels, *out_size]``, in the geometry's memory layout."""
    depth, is_last = g.num_taps * g.group_in, _is_last(g, x)
    shape = (g.groups, depth, g.group_out) if is_last else (g.groups, g.group_out, depth)
    strides = (depth * g.group_out, *((1, depth) if is_last else (depth, 1)))

    def settle(w: torch.Tensor) -> torch.Tensor:
        dense = (w.movedim(1, -1) if is_last else w).contiguous()
        return dense.as_strided(shape, strides)

    return _prepare(g, x, cap_bytes, settle)


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` of a convolution with stride 1: ``dy`` convolved with the taps in reverse."""
    back, is_last = turned(g), _is_last(g, dy)
    shape = (g.groups, g.group_out, g.group_in, *g.kernel)
    taps = (*range(3, g.num_dims + 3),)
    order = (0, *taps, 1, 2) if is_last else (0, 2, 1, *taps)
    depth = g.num_taps * g.group_out
    matrix = (g.groups, depth, g.group_in) if is_last else (g.groups, g.group_in, depth)

    def settle(w: torch.Tensor) -> torch.Tensor:
        return w.reshape(shape).flip(taps).permute(order).reshape(matrix)

    return _prepare(back, dy, cap_bytes, settle)


def _is_last(g: Geometry, x: torch.Tensor) -> bool:
    """Return True if the columns are copied with the channels innermost."""
    return g.is_channels_last and (g.groups == 1 or x.is_cuda)


def _prepare(g: Geometry, x: torch.Tensor, cap_bytes: int, settle: Step) -> Prepared:
    """Multiply the columns of ``x`` by the matrices that ``settle`` makes of the weights.

    These are ``[groups, depth, O/groups]`` with the channels innermost, and else ``[groups,
    O/groups, depth]``. In contiguous layout one group is multiplied sample by sample.
    """
    is_last, is_grouped, n = _is_last(g, x), g.groups > 1, g.num_dims
    spatial, taps = (*range(1, n + 1),), (*range(n + 1, 2 * n + 1),)
    strides = g.strides(g.out_channels, g.out_size)
    make = empty(g, g.out_channels, g.out_size, x.dtype)
    depth = g.num_taps * g.group_in
    steps = []
    for chunk in _chunks(g, cap_bytes, x.element_size()):
        columns = _Columns(g, x.stride(), chunk)
        num, places = chunk.num_samples, chunk.num_rows * prod(g.out_size[1:])
        shape: Sizes
        view, channel = columns.view.grouped(g.groups), 2 * n + 2
        result = _outputs(g, strides, chunk).grouped(g.groups)
        if is_last:
            view = view.in_order(channel - 1, 0, *spatial, *taps, channel)
            result, shape = result.in_order(n + 1, 0, *spatial, n + 2), (-1, num * places, depth)
        elif is_grouped:
            view = view.in_order(channel - 1, channel, *taps, 0, *spatial)
            result, shape = result.in_order(n + 1, n + 2, 0, *spatial), (-1, depth, num * places)
        else:
            view = view.in_order(0, channel, *taps, *spatial)
            result, shape = result.in_order(0, n + 2, *spatial), (num, depth, places)
        steps.append((columns.matrix(view, shape), result))
    is_whole = len(steps) == 1 and not is_grouped

    def multiply(copy: Step, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cells = copy(x)
        if is_last:
            return torch.bmm(cells, weights) if is_grouped else torch.mm(cells[0], weights[0])
        return torch.bmm(weights if is_grouped else weights.expand(len(cells), -1, -1), cells)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        weights = settle(w)
        if is_whole:
            y = multiply(steps[0][0], x, weights)
            return y.as_strided((g.batch, g.out_channels, *g.out_size), strides)
        y = make(x)
        for copy, place in steps:
            place.of(y).copy_(multiply(copy, x, weights).view(place.shape))
        return y

    return run


def _outputs(g: Geometry, strides: Sizes, chunk: _Chunk) -> _View:
    """Return the part of ``y`` or ``dy`` that belongs to a chunk, with the channels last."""
    shape = (chunk.num_samples, g.out_channels, chunk.num_rows, *g.out_size[1:])
    return _part(
        strides, shape, (chunk.samples.start, 0, chunk.rows.start, *(0,) * (g.num_dims - 1))
    )


# -- weight gradient -------------------------------------------------------------------------------


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dw`` as ``[O, C/groups, *kernel]``, never holding all columns in memory.

    Copies follow the memory layout: runs of channels in channels_last, runs of positions otherwise.
    In the second case the samples are multiplied one by one if that takes less memory than a copy
    of ``dy``, which is then read in place. The sums are shorter too, and rounded less.
    """
    is_last, n = g.is_channels_last and g.groups == 1, g.num_dims
    by_sample = not is_last and g.group_out <= g.num_positions
    spatial, taps = (*range(1, n + 1),), (*range(n + 1, 2 * n + 1),)
    steps = []
    for chunk in _chunks(g, cap_bytes, x.element_size()):
        columns = _Columns(g, x.stride(), chunk)
        num, places = chunk.num_samples, chunk.num_rows * prod(g.out_size[1:])
        shape: Sizes
        view, errors = columns.view, _outputs(g, dy.stride(), chunk)
        if is_last:  # [1, positions, taps * C], and for dy [1, positions, O]
            shape = (1, num * places, -1)
        elif by_sample:  # [samples * groups, C/groups * taps, positions]
            view = view.in_order(0, 2 * n + 1, *taps, *spatial)
            errors, shape = errors.in_order(0, n + 1, *spatial), (num * g.groups, -1, places)
        else:  # [groups, C/groups * taps, samples * positions]
            view = view.in_order(2 * n + 1, *taps, 0, *spatial)
            errors, shape = errors.in_order(n + 1, 0, *spatial), (g.groups, -1, num * places)
        steps.append((columns.matrix(view, shape), errors.reshaped(shape)))
    sums, dtype = sum_dtype(x), x.dtype
    result = replace(g, is_channels_last=is_last).strides(g.group_in, g.kernel)

    def multiply(copy: Step, settle: Step, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        cells, outs = copy(x), settle(dy)
        pair = (outs.transpose(1, 2), cells) if is_last else (outs, cells.transpose(1, 2))
        part = torch.bmm(*pair)
        if by_sample and len(part) > g.groups:
            return part.view(-1, g.groups, *part.shape[1:]).sum(0, dtype=sums)
        return part

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        first, *others = steps
        dw = multiply(*first, x, dy).to(sums)
        for step in others:
            dw.add_(multiply(*step, x, dy))
        return dw.to(dtype).as_strided((g.out_channels, g.group_in, *g.kernel), result)

    return run


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


def prepare_gathered_forward(
    g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
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


def prepare_gathered_weight_gradient(
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
