"""The bypass per module: it affects the layers of one model and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock import legacy
from penstock.conv import (
    FallbackConv2d,
    apply_full_patch,
    patch_modules,
    selftest,
    unpatch_modules,
)
from penstock.conv.bypass import current
from penstock.errors import BadArgument
from support import broken_convolution
from support.small_network import NUM_LAYERS, X, assert_close, gradients, net

pytestmark = pytest.mark.legacy


def test_a_patched_model_gives_the_same_gradients_without_torch_s_convolutions() -> None:
    native = gradients(net(), X)
    model = net()
    patched = patch_modules(model)
    assert patched.num_patched == NUM_LAYERS
    assert "3: ConvTranspose2d 8 -> 4, kernel (3, 3), groups 1" in str(patched)
    with broken_convolution.breaking("all:raises") as broken:
        ours = gradients(model, X)
        with pytest.raises(RuntimeError, match="miopen"):
            net()(X)  # a different model, not patched
        assert broken.num_calls == 1
    assert_close(ours, native, 1e-5)


def test_unpatching_gives_the_layers_back_to_the_bit() -> None:
    model = net()
    native = gradients(model, X)
    patch_modules(model)
    assert unpatch_modules(model) == NUM_LAYERS
    assert unpatch_modules(model) == 0
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), native, strict=True))


def test_patching_twice_is_patching_once() -> None:
    model = net()
    assert patch_modules(model).layers == patch_modules(model).layers
    assert unpatch_modules(model) == NUM_LAYERS


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_layer_with_a_forward_of_its_own_is_left_and_listed() -> None:
    model = nn.Sequential(Standardised(3, 4, 3), nn.Conv2d(4, 2, 1))
    patched = patch_modules(model)
    assert patched.num_patched == 1
    assert patched.left == (
        "0: Standardised 3 -> 4, kernel (3, 3), groups 1 (has its own forward)",
    )


def test_autocast_and_second_derivatives_by_module() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1)
    patch_modules(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == torch.bfloat16
    double = nn.Conv2d(2, 4, 3, 2, 1, groups=2).double()
    patch_modules(double)
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(double, x)
    assert torch.autograd.gradgradcheck(double, x)


def test_a_fallback_layer_takes_a_layer_s_place() -> None:
    layer = nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular")
    ours = FallbackConv2d.of(copy.deepcopy(layer))
    torch.testing.assert_close(ours(X), layer(X), rtol=1e-4, atol=1e-5)
    assert ours(X[0]).shape == (4, 10, 12)
    assert ours.state_dict().keys() == layer.state_dict().keys()


def test_the_old_name_switches_everything_on(capsys: pytest.CaptureFixture[str]) -> None:
    with broken_convolution.breaking("all:raises") as broken:
        patched = legacy.apply_full_patch(net())
        try:
            assert legacy.FallbackConv2d is FallbackConv2d
            assert legacy.apply_full_patch is apply_full_patch
            net()(X)
            assert broken.num_calls == 0
        finally:
            switch = current()
            assert switch is not None
            switch.undo()
    assert patched.num_patched == NUM_LAYERS
    assert "5: Conv2d 4 -> 2" in capsys.readouterr().out


def test_the_grid_is_right_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = selftest("cpu")
    said = capsys.readouterr().out
    assert report
    assert "all 13 passed" in said
    assert said.count("weight gradient") == 13
    assert current() is None


@pytest.mark.parametrize("function", [patch_modules, apply_full_patch])
def test_what_is_no_model_is_named(function: Any) -> None:
    with pytest.raises(BadArgument, match=r"must be a torch\.nn\.Module, got int"):
        function(3)
    assert current() is None
