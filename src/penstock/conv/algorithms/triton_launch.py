"""Fast launches of Triton kernels, and checks whether Triton is usable.

On every call, Triton inspects every argument to find the compiled kernel. A convolution has 40 of
them, and inspecting them takes longer than many of these kernels run on a fast GPU. The arguments
depend only on shapes, so a :class:`Launch` stores them, and from the second call on the compiled
kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

import torch

ALIGNMENT = 16
"""In bytes. Triton compiles separate kernels for pointers that are multiples of this and for other
pointers."""


class Launch:
    """A kernel with its grid and its arguments. Calling it with the tensors runs the kernel.

    Like a compiled Triton kernel, it is bound to the GPU that is current at its first call.

    Args:
        numbers: The arguments after the tensors.
        constants: The compile-time arguments, in the kernel's order.
        options: Compiler options: warps and stages.
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
        is_aligned = not functools.reduce(or_, addresses) % ALIGNMENT
        if is_aligned and self._start is not None:
            self._start(*addresses, *self._rest)
            return
        compiled = self._kernel[self._grid](
            *tensors, *self._numbers, **self._constants, **self._options
        )
        if is_aligned and _takes_constants():
            self._start = _start_of(compiled, self._grid)


def _start_of(compiled: Any, grid: tuple[int, ...]) -> Callable[..., Any] | None:
    """Return the function that starts a compiled kernel, or None under Triton's interpreter.

    The function takes addresses. For a tensor, Triton would look up the address again, and query
    the driver for the device that owns it.
    """
    if compiled is None or not hasattr(type(compiled), "__getitem__"):
        return None
    start: Callable[..., Any] = compiled[grid]
    try:
        from triton.knobs import runtime
    except ImportError:  # before 3.4
        return start
    run, function, packed = (
        getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")
    )
    if run is None or function is None or _raw_stream is None:
        return start
    ways: list[tuple[Any, tuple[Any, ...]]] = [(run, (function, packed, None, None, None))]
    sizes = [getattr(run, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if sizes == [0, 0] and hasattr(run, "launch"):  # Triton 3.6: what ``run`` calls
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        ways.append((run.launch, (function, *flags, None, None, packed, None, None, None)))

    def start_at_once(*arguments: int) -> None:
        """Do the same as ``start``, without calling empty launch hooks."""
        if _is_idle(runtime.launch_enter_hook) and _is_idle(runtime.launch_exit_hook):
            stream = _raw_stream(_current_device())
            while ways:
                launch, before = ways[-1]
                try:
                    launch(*grid, stream, *before, *arguments)
                    return
                except TypeError:  # this version of Triton has a different launch signature
                    ways.pop()
        start(*arguments)

    return start_at_once


def _is_idle(hook: Any) -> bool:
    """Return True if a profiler's hook does nothing. Since Triton 3.5 a hook is a list of calls."""
    return hook is None or not getattr(hook, "calls", True)


_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


@functools.lru_cache(maxsize=1)
def _takes_constants() -> bool:
    """Return True if compiled kernels take constants as arguments (from Triton 3.3)."""
    import triton

    numbers = triton.__version__.split(".")[:2]
    return all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) >= (3, 3)


# -- availability ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def kernels() -> Any:
    """Return the module with the matrix-product kernels, or None without Triton."""
    try:
        from penstock.conv.algorithms import gemm_kernels
    except Exception:  # not installed, or a version that cannot be imported with this torch
        return None
    return gemm_kernels


_failure = ""


def is_available() -> bool:
    """Return True if Triton is installed and no kernel has failed."""
    return not _failure and kernels() is not None


def switch_off(reason: str) -> None:
    """Stop using Triton kernels in this process."""
    global _failure
    _failure = reason


def disable(error: Exception) -> None:
    """Stop using Triton kernels in this process, because one failed on this GPU."""
    switch_off(f"{type(error).__name__}: {error}")
    warnings.warn(
        f"Triton kernels do not run on this machine and are disabled ({_failure[:200]}). "
        "Convolutions continue with matrix products only.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels on the CPU (``TRITON_INTERPRET=1``)."""
    module = kernels()
    return module is not None and type(module.gather_gemm).__name__ == "InterpretedFunction"


# -- shapes in the form that kernels take ----------------------------------------------------------


def power(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def two(values: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Return height and width. ``missing`` is the height if there is only one axis."""
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def four(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the strides of a tensor with one or two spatial axes as those of two."""
    n, c, *rest = strides
    return (n, c, 0, rest[0]) if len(rest) == 1 else (n, c, rest[0], rest[1])


def three(values: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    """Return depth, height and width. ``missing`` takes the place of axes that are not there."""
    depth, height, width = ((missing,) * 3 + values)[-3:]
    return depth, height, width


def five(strides: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """Return the strides of a tensor with one to three spatial axes as those of three."""
    return (*strides[:2], *three(strides[2:], 0))  # type: ignore[return-value]
