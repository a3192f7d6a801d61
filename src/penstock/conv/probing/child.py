"""Child process of the probe: runs the steps one by one and reports each result.

::

    probe.run_steps, in the parent          this process
    steps  --stdin, JSON-->                 torch, the GPU
           <--stdout, a line each--         begin 4 / done 4 {...} / begin 5 / (crash, or hang)

The reference is computed in float64 on the CPU with Penstock's own im2col, so a broken library is
never compared with itself.

Tested by ``tests/faults/conv/probing/test_probe.py``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from penstock.conv.algorithms import col2im, im2col
from penstock.conv.convolution import (
    ConvolutionRunner,
    geometry_of,
    memory_cap_from_environment,
    to_layout,
)
from penstock.conv.dispatcher_hook import DispatcherHook
from penstock.conv.geometry import Geometry, transposed_size
from penstock.conv.probing.steps import KINDS, TOLERANCES, ProbeStep
from penstock.machine.child_process import end_with_parent

MARK = "penstock-probe:"
BATCH, CHANNELS, SIZE = 2, 16, {1: (33,), 2: (12, 14), 3: (6, 7, 8)}
CAP_BYTES = 1 << 26
NUM_TIMED = 3
ABSENT = "not implemented for"
"""Part of torch's error if it has no kernel for a dtype, such as float16 on the CPU before torch
2.1."""


def main() -> None:
    """Read the steps from stdin and run them."""
    request = json.loads(sys.stdin.read())
    end_with_parent(request["parent"])
    _prepare(request["device"], request["setup"])
    report("ready", 0)
    for number, key in request["steps"]:
        report("begin", number)
        report("done", number, attempt(ProbeStep.from_key(key), request["device"]))
    report("end", 0)


def report(word: str, number: int, more: Any = None) -> None:
    """Print a line for the parent. Libraries may print other lines in between."""
    sys.stdout.write(f"\n{MARK}{json.dumps([word, number, more])}\n")
    sys.stdout.flush()


def _prepare(device: str, setup: str) -> None:
    torch.set_num_threads(1)  # for such small shapes, more threads are only overhead
    if setup == "library off":
        torch.backends.cudnn.enabled = False
        if device == "cpu":
            torch._C._set_mkldnn_enabled(False)
    elif setup == "bypass":
        runner = ConvolutionRunner(memory_cap_from_environment())
        hook = DispatcherHook(runner, on_loss=lambda names: None)
        hook.install((device,))
    torch.zeros(1, device=device)


def attempt(step: ProbeStep, device: str) -> dict[str, Any]:
    """Run one step. Returns its verdict, note and milliseconds."""
    try:
        run, truth, scale = (_norm if step.kind == "batch norm" else _convolution)(step, device)
    except Exception as error:
        return {"word": "raises", "note": f"(while preparing the step) {error}"[:300], "ms": 0.0}
    try:
        result = run()
        seen = result.double().cpu()
        started_s = time.perf_counter()
        for _ in range(NUM_TIMED):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        ms = (time.perf_counter() - started_s) / NUM_TIMED * 1e3
    except Exception as error:
        note = str(error).strip()[:300]
        word = "absent" if isinstance(error, RuntimeError) and ABSENT in note else "raises"
        return {"word": word, "note": note, "ms": 0.0}
    if seen.shape != truth.shape:
        note = f"shape {tuple(seen.shape)} instead of {tuple(truth.shape)}"
        return {"word": "wrong", "note": note, "ms": ms}
    off = float(((seen - truth).abs() / scale.clamp_min(1e-30)).max())
    if not off <= TOLERANCES[step.dtype]:
        return {
            "word": "wrong",
            "note": f"off by {off:.2g} times the sum of absolute products",
            "ms": ms,
        }
    return {"word": "right", "note": "", "ms": ms}


# -- convolutions ----------------------------------------------------------------------------------


def _convolution(step: ProbeStep, device: str) -> Any:
    """Return the step as a function, its exact result, and the scale for errors."""
    options = KINDS[step.kind]
    num, groups = options.get("num_dims", 2), options.get("groups", 1)
    is_transposed = options.get("is_transposed", False)
    kernel, stride, padding, dilation = (
        [options.get(name, 1)] * num for name in ("kernel", "stride", "padding", "dilation")
    )
    generator = torch.Generator().manual_seed(7)
    dtype = getattr(torch, step.dtype)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = make(BATCH, CHANNELS, *SIZE[num])
    w = make(CHANNELS, CHANNELS // groups, *kernel)
    g = geometry_of(x, w, (stride, padding, dilation, False, [0] * num, groups))
    assert g is not None
    y = make(BATCH, CHANNELS, *g.out_size)
    truth, scale = (
        _reference(g, step, is_transposed, *(change(t.double()) for t in (x, w, y)))
        for change in (lambda t: t, torch.abs)
    )
    x, w, y = (_placed(step, device, t) for t in (x, w, y))
    output_padding = [0] * num
    if is_transposed:
        least = transposed_size(g.out_size, g.kernel, g.stride, g.padding, g.dilation, (0,) * num)
        output_padding = [n - e for n, e in zip(g.in_size, least, strict=True)]
    arguments = (stride, padding, dilation, is_transposed, output_padding, groups)
    source, error = (y, x) if is_transposed else (x, y)
    if step.which == "forward":
        return lambda: torch.convolution(source, w, None, *arguments), truth, scale
    mask = [step.which == "input gradient", step.which == "weight gradient", False]

    def run() -> torch.Tensor:
        found: Any = torch.ops.aten.convolution_backward
        dx, dw, _ = found(error, source, w, None, *arguments, mask)
        return dx if mask[0] else dw  # type: ignore[no-any-return]

    return run, truth, scale


def _reference(
    g: Geometry,
    step: ProbeStep,
    is_transposed: bool,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    if step.which == "weight gradient":
        return im2col.prepare_weight_gradient(g, x, y, CAP_BYTES)(x, y)
    if (step.which == "forward") != is_transposed:
        return im2col.prepare_forward(g, x, w, CAP_BYTES)(x, w)
    return col2im.prepare_input_gradient(g, y, w, CAP_BYTES)(y, w)


def _placed(step: ProbeStep, device: str, t: torch.Tensor) -> torch.Tensor:
    return to_layout(t.to(device), channels_last=step.layout == "channels_last")


# -- batch norm ------------------------------------------------------------------------------------


def _norm(step: ProbeStep, device: str) -> Any:
    """Return the step for training-mode batch norm: output, input gradient or weight gradient."""
    generator = torch.Generator().manual_seed(7)
    dtype = getattr(torch, step.dtype)
    x, error = (torch.randn((4, CHANNELS, 8, 8), generator=generator).to(dtype) for _ in range(2))
    gain = torch.rand(CHANNELS, generator=generator) + 0.5
    truth = _norm_reference(step.which, x.double(), error.double(), gain.double())
    x, error = (_placed(step, device, t) for t in (x, error))
    gain = gain.to(device)

    def run() -> torch.Tensor:
        source, weight = x.detach().requires_grad_(), gain.detach().requires_grad_()
        y = torch.nn.functional.batch_norm(source, None, None, weight, None, True, 0.1, 1e-5)
        if step.which == "forward":
            return y.detach()
        wanted = source if step.which == "input gradient" else weight
        (found,) = torch.autograd.grad(y, wanted, error)
        return found

    return run, truth, truth.abs().max().expand_as(truth)


def _norm_reference(
    which: str, x: torch.Tensor, error: torch.Tensor, gain: torch.Tensor
) -> torch.Tensor:
    """Compute batch norm and its derivatives from elementary operations, which call no library."""
    x, gain = x.requires_grad_(), gain.requires_grad_()
    axes = (0, 2, 3)
    centred = x - x.mean(axes, keepdim=True)
    spread = (centred.square().mean(axes, keepdim=True) + 1e-5).rsqrt()
    y = centred * spread * gain.view(1, -1, 1, 1)
    if which == "forward":
        return y.detach()
    (found,) = torch.autograd.grad(y, x if which == "input gradient" else gain, error)
    return found
