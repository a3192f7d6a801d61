"""A faster module for inference: TensorRT, else Inductor, else channels_last with autocast.

The first rung that builds, gives eager mode's outputs within its tolerance and is not slower is
handed out; what was left on the way is in the report, with the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.conv.optimization.compilers import RUNGS, CannotHere, Inputs, Rung, device_of
from penstock.errors import BadArgument

NUM_WARM, NUM_TIMED = 3, 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done.

    Attributes:
        rung: What runs: ``"tensorrt"``, ``"inductor"``, ``"autocast"``, or ``"eager"`` if nothing
            was better.
        ran_on: Device, type, and how many graphs were compiled, with breaks between them.
        build_s: Seconds for building it, the first call included.
        ms_before: Milliseconds of a call in eager mode; ``ms_after`` of the module handed out.
        largest_error: Relative to the largest output of eager mode.
        fell_from: Rungs that were left, with the reason.
    """

    rung: str
    ran_on: str
    build_s: float
    ms_before: float
    ms_after: float
    largest_error: float
    fell_from: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.rung} on {self.ran_on}: {self.ms_before:.2f} -> {self.ms_after:.2f} ms, "
            f"built in {self.build_s:.1f} s, largest error {self.largest_error:.1e}"
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.fell_from]
        return "\n".join(lines)


def optimize(
    model: nn.Module, example_inputs: Any, target: str = "auto"
) -> tuple[nn.Module, Report]:
    """Make a model faster for inference, and say what was done.

    Args:
        model: In evaluation mode, on the device where it is to run.
        example_inputs: A tensor or a tuple of inputs, of the shapes to come.
        target: ``"auto"`` tries TensorRT, Inductor and autocast; or begin at one of
            ``"tensorrt"``, ``"inductor"``, ``"autocast"``.

    Returns:
        A module whose outputs were checked against eager mode, and the report.

    Raises:
        BadArgument: An unknown target, or a model in training mode.

    Example:
        >>> module, report = optimize(nn.Linear(2, 2).eval(), torch.ones(1, 2), target="autocast")
        >>> module(torch.ones(1, 2)).shape
        torch.Size([1, 2])
        >>> report.rung in ("autocast", "eager")
        True
    """
    if target != "auto" and target not in RUNGS:
        known = ", ".join(map(repr, ("auto", *RUNGS)))
        raise BadArgument(
            f"target={target!r} is not known; it is one of {known}",
            remedy='penstock.conv.optimize(model, inputs, target="auto")',
        )
    if model.training:
        raise BadArgument(
            "the model is in training mode, and this is for inference",
            remedy="penstock.conv.optimize(model.eval(), inputs)",
        )
    inputs: Inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    names = [*RUNGS] if target == "auto" else [*RUNGS][[*RUNGS].index(target) :]
    device = device_of(model, inputs)
    with torch.no_grad():
        expected = model(*inputs)
        ms_before = _time_ms(lambda: model(*inputs), device)
        fell: list[tuple[str, str]] = []
        for name in names:
            try:
                return _climb(RUNGS[name], model, inputs, expected, ms_before, tuple(fell))
            except CannotHere as reason:
                fell.append((name, str(reason)))
            except Exception as error:  # a compiler's own, of any kind
                text = " ".join(str(error).split())
                fell.append((name, f"{type(error).__name__}: {text[:200]}"))
    report = Report(
        rung="eager",
        ran_on=_describe(device, expected),
        build_s=0.0,
        ms_before=ms_before,
        ms_after=ms_before,
        largest_error=0.0,
        fell_from=tuple(fell),
    )
    return model, report


def _climb(
    rung: Rung,
    model: nn.Module,
    inputs: Inputs,
    expected: Any,
    ms_before: float,
    fell: tuple[tuple[str, str], ...],
) -> tuple[nn.Module, Report]:
    """Build, check and time one rung; raises CannotHere if it is wrong or slower."""
    device = device_of(model, inputs)
    counted = _graphs()
    started_s = time.perf_counter()
    module = rung.make(model, inputs)
    found = _copied(module(*inputs))
    _wait(device)
    build_s = time.perf_counter() - started_s
    error = _largest_error(found, expected)
    if not error <= rung.tolerance:
        raise CannotHere(f"its outputs are off by {error:.1e}, and {rung.tolerance:g} is allowed")
    ms_after = _time_ms(lambda: module(*inputs), device)
    if ms_after > ms_before:
        raise CannotHere(f"it takes {ms_after:.2f} ms, and eager mode {ms_before:.2f} ms")
    graphs, breaks = (after - before for after, before in zip(_graphs(), counted, strict=True))
    ran_on = _describe(device, found)
    if graphs:
        ran_on += f", {graphs} graph{'s' if graphs > 1 else ''}, {breaks} breaks"
    report = Report(
        rung=rung.name,
        ran_on=ran_on,
        build_s=build_s,
        ms_before=ms_before,
        ms_after=ms_after,
        largest_error=error,
        fell_from=fell,
    )
    return module, report


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if torch.is_tensor(outputs):
        return [outputs]
    if isinstance(outputs, dict):
        return [t for key in outputs for t in _tensors(outputs[key])]
    if isinstance(outputs, (list, tuple)):
        return [t for item in outputs for t in _tensors(item)]
    return []


def _copied(outputs: Any) -> list[torch.Tensor]:
    """Replayed graphs write the next outputs over these."""
    return [t.detach().clone() for t in _tensors(outputs)]


def _largest_error(found: Any, expected: Any) -> float:
    ours, theirs = _tensors(found), _tensors(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    errors = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        scale = float(b.abs().max()) if b.numel() else 0.0
        if b.numel():
            off = float((a.double() - b.double()).abs().max())
            errors.append(off / scale if scale else off)
    return max(errors, key=lambda value: (value != value, value))  # nan counts as the largest


def _time_ms(run: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls."""
    for _ in range(NUM_WARM):
        run()
    times = []
    for _ in range(NUM_TIMED):
        _wait(device)
        started_s = time.perf_counter()
        run()
        _wait(device)
        times.append((time.perf_counter() - started_s) * 1e3)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _graphs() -> tuple[int, int]:
    """Graphs compiled and breaks between them, as torch counts them."""
    if "torch._dynamo.utils" not in sys.modules:  # seconds to import; nothing was compiled
        return 0, 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def _describe(device: torch.device, outputs: Any) -> str:
    types = dict.fromkeys(str(t.dtype).rpartition(".")[2] for t in _tensors(outputs))
    return f"{device.type} ({', '.join(types) or 'no tensors'})"
