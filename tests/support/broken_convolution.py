"""Native convolutions that fail on purpose: they raise, return wrong numbers, crash or hang.

Torch registers its own kernels under ``CompositeExplicitAutograd``. These kernels replace them.
Every call that reaches torch's convolution meets the fault, and calls that the bypass intercepts do
not, as with a broken vendor library.

In this process: ``with breaking("all:raises") as native: ...``. ``native.num_calls`` counts the
calls that reached torch. In child processes: :func:`environment` returns an environment in which
every Python process that imports torch has the fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.paths import TESTS

VARIABLE = "BROKEN_CONVOLUTION"
MESSAGE = "miopenStatusUnknownError"
SITE = f"""
import sys
sys.path.append({str(TESTS)!r})
from support import broken_convolution
broken_convolution.break_when_torch_comes()
"""


class Native:
    """A fault, and a count of the calls that met it.

    Args:
        spec: ``"all:raises"``, or some kinds, as in ``"strided:crashes,grouped:wrong"``. The other
            kinds work.
    """

    def __init__(self, spec: str) -> None:
        self.num_calls = 0
        self.faults = dict(part.split(":") for part in spec.split(","))
        self.library: Any = None

    def install(self) -> None:
        import torch

        self.library = torch.library.Library("aten", "IMPL")
        kernels: dict[str, Callable[..., Any]] = {
            "convolution": self.forward,
            "_convolution": self.forward,
            "convolution_backward": self.backward,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its own kernel is overridden
            for name, kernel in kernels.items():
                self.library.impl(name, kernel, "CompositeExplicitAutograd")

    def remove(self) -> None:
        if hasattr(self.library, "_destroy"):
            self.library._destroy()
        else:
            self.library.__del__()
            self.library._op_impls = set()

    def forward(self, x: Any, w: Any, b: Any, *rest: Any) -> Any:
        from penstock.conv.algorithms import col2im, im2col

        g, is_transposed, factor = self.meet(x, w, rest)
        if is_transposed:
            y = col2im.prepare_input_gradient(g, x, w, 1 << 26)(x, w)
        else:
            y = im2col.prepare_forward(g, x, w, 1 << 26)(x, w)
        return (y if b is None else y + b.view(-1, *(1,) * g.num_dims)) * factor

    def backward(self, dy: Any, x: Any, w: Any, sizes: Any, *rest: Any) -> Any:
        from penstock.conv.algorithms import col2im, im2col

        g, is_transposed, factor = self.meet(x, w, rest)
        if is_transposed:
            dx = im2col.prepare_forward(g, dy, w, 1 << 26)(dy, w)
            dw = im2col.prepare_weight_gradient(g, dy, x, 1 << 26)(dy, x)
        else:
            dx = col2im.prepare_input_gradient(g, dy, w, 1 << 26)(dy, w)
            dw = im2col.prepare_weight_gradient(g, x, dy, 1 << 26)(x, dy)
        return dx * factor, dw * factor, dy.sum((0, *range(2, dy.dim())))

    def meet(self, x: Any, w: Any, rest: Any) -> tuple[Any, bool, float]:
        """Trigger the fault of this kind of convolution, or return a factor for its result."""
        from penstock.conv.convolution import geometry_of

        self.num_calls += 1
        g = geometry_of(x, w, rest[:6])
        assert g is not None
        kind = "transposed" if rest[3] else g.kind
        fault = self.faults.get(kind, self.faults.get("all"))
        if fault == "raises":
            raise RuntimeError(MESSAGE)
        if fault == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hangs":
            time.sleep(3600)
        return g, rest[3], 1.5 if fault == "wrong" else 1.0


@contextmanager
def breaking(spec: str) -> Iterator[Native]:
    """Break torch's own convolutions inside the ``with`` block."""
    native = Native(spec)
    native.install()
    try:
        yield native
    finally:
        native.remove()


def environment(spec: str, folder: Path) -> dict[str, str]:
    """Return environment variables for a child process with broken convolutions."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    paths = [str(site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        VARIABLE: spec,
        "PENSTOCK_CACHE_DIR": str(folder / "cache"),
    }


def break_when_torch_comes() -> None:
    """Break convolutions when torch is imported. Called by the child's sitecustomize."""
    spec = os.environ.get(VARIABLE)
    if not spec:
        return
    try:
        from penstock.integrations.script_runner import when_imported
    except ImportError:  # a Python without Penstock, such as a tool's
        return
    native = Native(spec)
    sys.modules[__name__].native = native  # type: ignore[attr-defined]
    when_imported("torch", native.install)
