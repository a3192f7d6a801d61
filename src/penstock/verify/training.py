"""Checks that training a small model twice gives the same bits on this machine.

    seeds -> model and data -> forward, backward, step, forward, ...    every tensor hashed
    seeds -> model and data -> forward, backward, step, forward, ...    again; compared in order

The model has common layers (convolution, normalization, pooling, linear) and two operations that
accelerators are known to sum in the order of arrival: the gradient of a bilinear resize, and an
index_add. Each device trains with torch's defaults, and with ``seed_all(deterministic=True)``.

Tested by ``tests/integration/verify/test_comparison.py``.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.order.seeding import seeded
from penstock.verify.hashing import digest
from penstock.verify.verdict import Row, Verdict, describe_error

NUM_STEPS = 8
NUM_SAMPLES = 16
NUM_CLASSES = 10
MODES = {"default": False, "deterministic=True": True}

Trace = list[tuple[str, bytes]]
"""The computed tensors in order: a name, and a hash of the bits."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device to train on, and its display name."""

    kind: str
    name: str


def verify_training(
    tell: Callable[[str], None] = lambda device: None, modes: Mapping[str, bool] = MODES
) -> Verdict:
    """Train twice on each device of this machine, and compare.

    Args:
        tell: Called with the name of each training before it runs.
        modes: Maps a name to whether torch uses deterministic algorithms.

    Example:
        >>> verdict = verify_training(modes={"default": False})
        >>> verdict.rows[0].setting
        'cpu, default'
    """
    rows = []
    for device in find_devices():
        for mode, is_deterministic in modes.items():
            tell(f"{device.name}, {mode}")
            rows.append(_compare(device, mode, is_deterministic))
    return Verdict(rows=tuple(rows), notes=tuple(_advice(rows)))


def find_devices() -> list[Device]:
    """Return the CPU, and the accelerators that torch can use."""
    import torch

    found = [Device(kind="cpu", name="cpu")]
    if torch.cuda.is_available():
        found.append(Device(kind="cuda", name=torch.cuda.get_device_name(0)))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append(Device(kind="xpu", name=torch.xpu.get_device_name(0)))
    if torch.backends.mps.is_available():
        found.append(Device(kind="mps", name="mps"))
    return found


def _compare(device: Device, mode: str, is_deterministic: bool) -> Row:
    setting, start_s = f"{device.name}, {mode}", time.perf_counter()
    try:
        first, second = (train(device.kind, is_deterministic) for _ in range(2))
    except Exception as error:
        return Row(setting=setting, outcome="failed", note=describe_error(error))
    where = first_difference(first, second)
    return Row(
        setting=setting,
        outcome="same" if where is None else "differs",
        digest=digest([bits for _, bits in first]).hex(),
        num_batches=NUM_STEPS,
        num_samples=NUM_STEPS * NUM_SAMPLES,
        took_s=time.perf_counter() - start_s,
        note="" if where is None else f"first difference: {where}",
    )


def first_difference(first: Trace, second: Trace) -> str | None:
    """Return the name of the first tensor that differs between two trainings.

    Example:
        >>> first_difference([("loss", b"a"), ("conv", b"b")], [("loss", b"a"), ("conv", b"c")])
        'conv'
    """
    for (name, one), (_, other) in zip(first, second, strict=True):
        if one != other:
            return name
    return None


def _advice(rows: list[Row]) -> Iterator[str]:
    outcomes = {row.setting: row.outcome for row in rows}
    for row in rows:
        device, _, mode = row.setting.rpartition(", ")
        is_cured = outcomes.get(f"{device}, deterministic=True") == "same"
        if mode == "default" and row.outcome == "differs" and is_cured:
            yield f"{device}: use penstock.seed_all(0, deterministic=True) to get the same bits."


# -- one training ----------------------------------------------------------------------------------


def train(kind: str, is_deterministic: bool) -> Trace:
    """Train for a few steps. Returns the hash of every activation, gradient and weight."""
    import torch
    from torch.nn import functional

    trace: Trace = []
    step = 0

    def note(name: str, value: Any) -> None:
        trace.append((f"step {step}, {name}", digest(value)))

    def note_outputs(name: str, layer: Any) -> None:
        layer.register_forward_hook(
            lambda _layer, _inputs, output: note(f"the output of {name}", output)
        )

    # Some torch versions warn about an operation without a deterministic form before they raise.
    with seeded(0, deterministic=is_deterministic), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _make_model().to(kind)
        for name, layer in model.named_children():
            note_outputs(name, layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        numbers = np.random.RandomState(0)  # the data does not depend on torch
        for step in range(NUM_STEPS):  # noqa: B007 - note() reads it
            images = numbers.standard_normal((NUM_SAMPLES, 3, 32, 32)).astype(np.float32)
            labels = numbers.randint(0, NUM_CLASSES, NUM_SAMPLES)
            optimizer.zero_grad()
            output = model(torch.from_numpy(images).to(kind))
            loss = functional.cross_entropy(output, torch.from_numpy(labels).to(kind))
            note("the loss", loss)
            loss.backward()  # type: ignore[no-untyped-call]
            parameters = list(model.named_parameters())
            for name, weight in reversed(parameters):  # backward starts at the last layer
                note(f"the gradient of {name}", weight.grad)
            optimizer.step()
            for name, weight in parameters:
                note(f"the new {name}", weight)
    return trace


def _make_model() -> Any:
    import torch
    from torch import nn

    class IndexAdd(nn.Module):
        """Sums all pixels of the image into 64 bins, many into each."""

        def forward(self, images: Any) -> Any:
            flat = images.flatten(1)
            bins = torch.arange(flat.shape[1], device=flat.device) * 7919 % 64
            return torch.zeros(len(flat), 64, device=flat.device).index_add(1, bins, flat) / 50

    layers = {
        "convolution": nn.Conv2d(3, 16, 3, padding=1),
        "normalisation": nn.BatchNorm2d(16),
        "activation": nn.ReLU(),
        "pooling": nn.MaxPool2d(2),
        "depthwise": nn.Conv2d(16, 16, 3, padding=1, groups=16),
        "resize": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        "second_convolution": nn.Conv2d(16, 32, 3, stride=2),
        "index_add": IndexAdd(),
        "linear": nn.Linear(64, NUM_CLASSES),
    }
    return nn.Sequential(OrderedDict(layers))
