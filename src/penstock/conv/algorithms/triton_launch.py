"""Is Triton there, and how are its kernels started at little cost?

Triton looks at every argument of every call to find the compiled kernel, 40 numbers for a
convolution, which takes longer than many of them take on a fast GPU. Those numbers depend on shapes
alone, so a :class:`Launch` keeps them, and from the second call on the compiled kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.conv.geometry import Geometry

ALIGNMENT = 16
"""Bytes; Triton compiles for pointers that are multiples of it, and anew for others."""


class Launch:
    """A kernel on its grid, with its numbers; calling it takes the tensors.

    For the GPU that is current at its first call, as one of Triton's compiled kernels is.

    Args:
        numbers: The arguments behind the tensors.
        constants: Those that are compiled in, in the kernel's order.
        options: Of the compiler: warps and stages.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        numbers: Sequence[int],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._numbers = tuple(numbers)
        self._constants = constants
        self._options = options
        self._rest = (*self._numbers, *constants.values())
        self._start: Callable[..., Any] | None = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        is_aligned = not bits % ALIGNMENT
        if is_aligned and self._start is not None:
            self._start(*addresses, *self._rest)
            return
        compiled = self._kernel[self._grid](
            *tensors, *self._numbers, **self._constants, **self._options
        )
        if is_aligned and _takes_constants():
            self._start = _start_of(compiled, self._grid)


def _start_of(compiled: Any, grid: tuple[int, ...]) -> Callable[..., Any] | None:
    """How Triton's compiled kernel is started; None where this is not one (its interpreter).

    It takes addresses: of a tensor Triton would ask for it again, and the driver whose it is.
    """
    if compiled is None or not hasattr(type(compiled), "__getitem__"):
        return None
    start: Callable[..., Any] = compiled[grid]
    run, function, packed = (
        getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")
    )
    if run is None or function is None or _raw_stream is None:
        return start

    def start_at_once(*arguments: int) -> None:
        """As ``start`` does, past hooks that nobody has put anything into."""
        if _is_idle(runtime.launch_enter_hook) and _is_idle(runtime.launch_exit_hook):
            stream = _raw_stream(_current_device())
            try:
                run(*grid, stream, function, packed, None, None, None, *arguments)
                return
            except TypeError:  # a version that is started in another way
                pass
        start(*arguments)

    try:
        from triton.knobs import runtime
    except ImportError:  # before 3.4
        return start
    return start_at_once


def _is_idle(hook: Any) -> bool:
    """Would a profiler's hook do nothing? It is a chain of calls since Triton 3.5."""
    return hook is None or not getattr(hook, "calls", True)


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def _takes_constants() -> bool:
    """Are constants among the arguments of a compiled kernel? Since Triton 3.3."""
    global _is_recent
    if _is_recent is None:
        import triton

        numbers = triton.__version__.split(".")[:2]
        _is_recent = all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) >= (3, 3)
    return _is_recent


_is_recent: bool | None = None


# -- is it there? ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def kernels() -> Any:
    """The module with the kernels, or None without Triton."""
    try:
        from penstock.conv.algorithms import implicit_kernels as triton_kernels
    except Exception:  # absent, or of a version that cannot be imported beside this torch
        return None
    return triton_kernels


_trouble = ""


def is_there() -> bool:
    """Can Triton's kernels be used?"""
    return not _trouble and kernels() is not None


def give_up(error: Exception) -> None:
    """A kernel failed on this card: none of Triton's is offered any more."""
    global _trouble
    _trouble = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"Triton's kernels do not run here and are left out ({_trouble[:200]}); convolutions go on "
        "with matrix products alone.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_interpreted() -> bool:
    """Are kernels run by Triton's interpreter, on the CPU (``TRITON_INTERPRET=1``)?"""
    module = kernels()
    return module is not None and type(module.gather_gemm).__name__ == "InterpretedFunction"


# -- shapes, as kernels want them ------------------------------------------------------------------


def power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def two(values: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Height and width; ``missing`` is the height of one axis."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def four(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The strides of a tensor of one axis or two, as those of two."""
    n, c, *rest = strides
    return (n, c, 0, rest[0]) if len(rest) == 1 else (n, c, rest[0], rest[1])


Make = Callable[[torch.Tensor], torch.Tensor]


def empty(g: Geometry, channels: int, size: tuple[int, ...], dtype: torch.dtype) -> Make:
    """Makes results ``[batch, channels, *size]`` beside a tensor, laid out as the geometry says."""
    shape = (g.batch, channels, *size)
    high, wide = two(size, 1)
    if g.is_channels_last:
        strides = (high * wide * channels, 1, wide * channels, channels)
    else:
        strides = (channels * high * wide, high * wide, wide, 1)
    fitting = strides if len(size) == 2 else (*strides[:2], strides[3])

    def make(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(shape, fitting, dtype=dtype, device=like.device)

    return make
