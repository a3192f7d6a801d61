"""A small network with every kind of convolution, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1, groups=2),
        nn.ConvTranspose2d(8, 4, 3, 2, 1, 1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(4, 2, 1),
    )


X = torch.linspace(-1, 1, 2 * 3 * 10 * 12).reshape(2, 3, 10, 12).sin()
NUM_LAYERS = 5


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_close(ours: list[torch.Tensor], native: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(ours, native, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
