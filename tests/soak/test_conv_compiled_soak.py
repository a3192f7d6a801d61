"""A whole network compiled by Inductor through the bypass (a minute of C++ compilation)."""

from __future__ import annotations

import pytest
import torch

from penstock.conv import bypass_convolutions
from support.small_network import NUM_LAYERS, X, assert_close, gradients, net

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compiled_training_gives_the_native_gradients(kind: torch.memory_format) -> None:
    x = X.contiguous(memory_format=kind)
    model = net().to(memory_format=kind)
    native = gradients(model, x)
    torch._dynamo.reset()
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        ours = gradients(torch.compile(model), x)
    torch._dynamo.reset()
    assert_close(ours, native, 1e-4)
    assert (bypass.num_caught, bypass.num_native) == (3 * NUM_LAYERS, 0)
