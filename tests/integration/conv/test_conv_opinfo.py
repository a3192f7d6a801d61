"""torch's own convolution samples through the bypass: results, layouts, derivatives."""

from __future__ import annotations

import pytest
import torch

from penstock.conv import bypass_convolutions
from support import conv_opinfo

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about odd samples


@pytest.mark.parametrize("name", conv_opinfo.NAMES)
def test_every_sample_gives_torch_s_result_in_torch_s_layout(name: str) -> None:
    op, num = conv_opinfo.operator(name), 0
    for dtype in (torch.float32, torch.complex64):
        for sample in op.sample_inputs("cpu", dtype):
            native = op(sample.input, *sample.args, **sample.kwargs)
            with bypass_convolutions("on", devices=("cpu",)) as bypass:
                ours = op(sample.input, *sample.args, **sample.kwargs)
            torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)
            assert ours.stride() == native.stride()
            num += bypass.num_caught
    assert num >= 15


@pytest.mark.parametrize("name", conv_opinfo.NAMES)
def test_first_and_second_derivatives_are_right(name: str) -> None:
    """Tests one sample in seven. tests/soak tests all of them."""
    op, num = conv_opinfo.operator(name), 0
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        for function, inputs in conv_opinfo.gradient_cases(op, torch.float64, every=7):
            assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
            assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
            num += 1
    assert num
    assert bypass.num_caught
    assert bypass.num_native <= bypass.num_caught


def test_the_samples_leave_torch_s_switches_free() -> None:
    conv_opinfo.operator(conv_opinfo.NAMES[0])
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not before  # raises while torch's test suite freezes flags
    assert torch.backends.cudnn.benchmark is not before
    torch.backends.cudnn.benchmark = before
