"""First and second derivatives of all of torch's convolution samples."""

from __future__ import annotations

import pytest
import torch

from penstock.conv import bypass_convolutions
from support import conv_opinfo

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", conv_opinfo.NAMES)
def test_first_and_second_derivatives_of_every_sample(name: str, dtype: torch.dtype) -> None:
    op = conv_opinfo.operator(name)
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        for function, inputs in conv_opinfo.gradient_cases(op, dtype):
            assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
            assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
    assert bypass.num_caught
