"""Overrides convolution in torch's dispatcher, below autograd and autocast.

::

    nn.Conv2d, F.conv2d, TorchScript, compiled code, third-party operators
      -> autocast -> autograd -> vmap ...                         (all untouched)
           -> aten::convolution        \\
           -> aten::_convolution        >  the device's key: Penstock's kernel, or torch's
           -> aten::convolution_backward/

Autograd attaches the derivative of a convolution above this level. It calls
``convolution_backward``, so training passes through here as well. Double backward consists of
convolutions again. torch's own kernels stay registered under ``CompositeExplicitAutograd``. Calls
that Penstock does not compute are sent there.

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.conv.algorithms.aten import library_setting
from penstock.conv.convolution import ConvolutionRunner
from penstock.machine.collect import machine

OPERATORS = ("convolution", "_convolution", "convolution_backward")
KEYS = {"cpu": "CPU", "cuda": "CUDA"}
CHECK_EVERY = 512
"""Number of calls between checks that the other operator still reaches the hook."""

_aten: Any = torch.ops.aten
_c: Any = torch._C
_cuda: Any = torch.cuda
_native_key: Any = _c.DispatchKey.CompositeExplicitAutograd
"""The key of torch's own kernels. ``OpOverload._op_dk`` calls them without going through the key
that the hook overrides."""
_tracing_state: Any = _c._get_tracing_state


def default_devices() -> tuple[str, ...]:
    """Return the GPU if there is one that this torch is built for, else the CPU. Opens no GPU."""
    is_gpu_build = torch.version.cuda or getattr(torch.version, "hip", None)
    has_gpu = is_gpu_build and any(gpu.vendor in ("nvidia", "amd") for gpu in machine().gpus)
    return ("cuda",) if has_gpu else ("cpu",)


class DispatcherHook:
    """Registers Penstock's kernels for some devices, from :meth:`install` to :meth:`remove`.

    Args:
        runner: Computes the calls. Those that it leaves are passed to torch.
        on_loss: Called with the names of operators that another library has overridden.
    """

    def __init__(self, runner: ConvolutionRunner, on_loss: Callable[[list[str]], None]) -> None:
        self.runner = runner
        self.num_native = 0
        self._on_loss = on_loss
        self._library: Any = None
        self._devices: tuple[str, ...] = ()
        self._canary: set[str] | None = None  # operators that a canary call reached, while it runs
        self._canary_thread = 0
        self._canary_lock = threading.Lock()
        self._num_calls = 0
        self._lost: set[str] = set()

    @property
    def is_installed(self) -> bool:
        return self._library is not None

    def install(self, devices: Sequence[str]) -> None:
        """Register the kernels.

        Raises:
            RuntimeError: With torch 1.13, if another library already overrides a key.
        """
        self._devices = tuple(devices)
        make: Any = torch.library.Library
        library = make("aten", "IMPL")
        kernels = (self._convolution, self._convolution_flagged, self._backward)
        try:
            with warnings.catch_warnings():
                # Overriding a kernel is intended here. CUDA has one for the backward pass.
                warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
                for device in devices:
                    for name, kernel in zip(OPERATORS, kernels, strict=True):
                        library.impl(name, kernel, KEYS[device])
        except BaseException:
            _destroy(library)
            raise
        self._library = library

    def remove(self) -> None:
        """Remove the kernels. torch then gives its original results, bit for bit."""
        if self._library is not None:
            _destroy(self._library)
            self._library = None
        self.runner.plans.clear()

    # -- the kernels -------------------------------------------------------------------------------

    def _convolution(self, x: Any, w: Any, b: Any, *arguments: Any) -> Any:
        if _tracing_state() is not None:
            # A traced module must record torch's operator, not the operations in our kernel.
            return _aten._convolution(x, w, b, *arguments, *_flags())
        if self._canary is not None and self._is_canary("convolution"):
            return x.new_empty(0)
        return self._forward(x, w, b, arguments)

    def _convolution_flagged(self, x: Any, w: Any, b: Any, *arguments: Any) -> Any:
        if self._canary is not None and self._is_canary("_convolution"):
            return x.new_empty(0)
        return self._forward(x, w, b, arguments[:6], arguments[6:])

    def _forward(
        self, x: Any, w: Any, b: Any, arguments: tuple[Any, ...], flags: Any = None
    ) -> Any:
        self._num_calls += 1
        if not self._num_calls % CHECK_EVERY:
            self._check_other("convolution_backward", x)
        y = self.runner.forward(x, w, b, arguments)
        if y is None:
            self.num_native += 1
            operator = _aten._convolution.default
            return operator._op_dk(_native_key, x, w, b, *arguments, *(flags or _flags()))
        return y

    def _backward(self, dy: Any, x: Any, w: Any, sizes: Any, *rest: Any) -> Any:
        if self._canary is not None and self._is_canary("convolution_backward"):
            return x.new_empty(0), x.new_empty(0), x.new_empty(0)
        self._num_calls += 1
        if not self._num_calls % CHECK_EVERY:
            self._check_other("convolution", x)
        gradients = self.runner.backward(dy, x, w, sizes, rest)
        if gradients is None:
            self.num_native += 1
            operator = _aten.convolution_backward.default
            with library_setting:
                return operator._op_dk(_native_key, dy, x, w, sizes, *rest)
        return gradients

    # -- canary calls ------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Return the operators that another library has overridden, found by tiny test calls."""
        if self._library is None:
            return []
        pairs = [(name, device) for device in self._devices for name in OPERATORS]
        return [f"aten::{name} ({device})" for name, device in pairs
                if not self._is_reached(name, device)]  # fmt: skip

    def _is_canary(self, name: str) -> bool:
        """Return True if this is a canary call. Other threads may be computing convolutions."""
        canary = self._canary
        if canary is None or self._canary_thread != threading.get_ident():
            return False
        canary.add(name)
        return True

    def _is_reached(self, name: str, device: str) -> bool:
        """Return True if a tiny call of the operator reaches this hook."""
        if device == "cuda" and not _cuda.is_initialized():
            return True  # nothing has run there; do not open a GPU just to check
        tiny = torch.zeros((1, 1, 1, 1), device=device)
        arguments = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        canary = set[str]()
        with self._canary_lock, torch.no_grad():
            self._canary_thread = threading.get_ident()
            self._canary = canary
            try:
                if name == "convolution":
                    _aten.convolution(tiny, tiny, None, *arguments)
                elif name == "_convolution":
                    _aten._convolution(tiny, tiny, None, *arguments, *_flags())
                else:
                    _aten.convolution_backward(tiny, tiny, tiny, None, *arguments, [True] * 3)
            except Exception:
                pass  # the overriding library may not support this call
            finally:
                self._canary = None
        return name in canary

    def _check_other(self, name: str, x: torch.Tensor) -> None:
        """Check that the other operator still reaches this hook."""
        if name in self._lost:
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the graph would record the tiny call
        if self._canary_lock.locked():
            return  # another thread is checking
        if not self._is_reached(name, x.device.type):
            self._lost.add(name)
            self._on_loss([f"aten::{name} ({x.device.type})"])


def _flags() -> tuple[bool, bool, bool, bool]:
    """Return the flags that ``aten::convolution`` passes to ``aten::_convolution``."""
    is_fixed = _c._get_cudnn_deterministic() or torch.are_deterministic_algorithms_enabled()
    with library_setting:
        is_on = _c._get_cudnn_enabled()
    return (_c._get_cudnn_benchmark(), is_fixed, is_on, _c._get_cudnn_allow_tf32())


def _destroy(library: Any) -> None:
    if hasattr(library, "_destroy"):
        library._destroy()
    else:  # torch 1.13: the registration ends with the object that holds it
        library.__del__()
        library._op_impls = set()
