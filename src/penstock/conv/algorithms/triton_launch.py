"""Launches Triton kernels at little cost, and tells whether Triton can be used.

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
    """Whether a profiler's hook does nothing. It is a chain of calls since Triton 3.5."""
    return hook is None or not getattr(hook, "calls", True)


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


@functools.lru_cache(maxsize=1)
def _takes_constants() -> bool:
    """Whether a compiled kernel takes the constants among its arguments: since Triton 3.3."""
    import triton

    numbers = triton.__version__.split(".")[:2]
    return all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) >= (3, 3)


# -- availability ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def kernels() -> Any:
    """The module with the matrix-product kernels, or None without Triton."""
    try:
        from penstock.conv.algorithms import gemm_kernels
    except Exception:  # absent, or of a version that cannot be imported beside this torch
        return None
    return gemm_kernels


_failure = ""


def is_available() -> bool:
    """Whether Triton is installed, and no kernel has failed."""
    return not _failure and kernels() is not None


def disable(error: Exception) -> None:
    """Offer no Triton kernel any more, because one failed on this card."""
    global _failure
    _failure = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"Triton's kernels do not run here and are left out ({_failure[:200]}); convolutions go on "
        "with matrix products alone.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU (``TRITON_INTERPRET=1``)."""
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
