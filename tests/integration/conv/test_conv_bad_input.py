"""Invalid input through the bypass gives the same error or the same result as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as f

from penstock.conv import bypass_convolutions

pytestmark = [
    pytest.mark.legacy,
    # torch warns about empty weights that it cannot initialize, complex numbers, and similar input.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
IS_OLD = torch.__version__.startswith("1.")


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator)
    return (values * 3).to(dtype) if not dtype.is_complex else values.to(dtype)


def direct(x: torch.Tensor, w: torch.Tensor, *arguments: Any) -> Any:
    return torch.convolution(x, w, None, *arguments)


def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    return torch.ops.aten.convolution_backward(dy, x, w, *rest)


X, W = (1, 3, 8, 8), (4, 3, 3, 3)
F64 = torch.float64
CASES: dict[str, Callable[[], Any]] = {
    "an output without places": lambda: f.conv2d(t(1, 3, 2, 2), t(*W)),
    "channels that do not match": lambda: f.conv2d(t(1, 4, 8, 8), t(*W)),
    "groups that do not match": lambda: f.conv2d(t(1, 4, 8, 8), t(6, 2, 3, 3), groups=4),
    "outputs that groups do not divide": lambda: f.conv2d(t(1, 4, 8, 8), t(5, 2, 3, 3), groups=2),
    "negative groups": lambda: f.conv2d(t(*X), t(*W), groups=-1),
    "negative padding": lambda: f.conv2d(t(*X), t(*W), padding=-1),
    "stride 0": lambda: f.conv2d(t(*X), t(*W), stride=0),
    "dilation 0": lambda: f.conv2d(t(*X), t(*W), dilation=0),
    "negative dilation": lambda: f.conv2d(t(*X), t(*W), dilation=-1),
    "int64": lambda: f.conv2d(t(*X, dtype=torch.int64), t(*W, dtype=torch.int64)),
    "int32": lambda: f.conv2d(t(*X, dtype=torch.int32), t(*W, dtype=torch.int32)),
    "bool": lambda: f.conv2d(t(*X, dtype=torch.bool), t(*W, dtype=torch.bool)),
    "bytes and floats": lambda: f.conv2d(t(*X, dtype=torch.uint8), t(*W)),
    "float64 and float32": lambda: f.conv2d(t(*X, dtype=F64), t(*W)),
    "a bias of another type": lambda: f.conv2d(t(*X), t(*W), t(4, dtype=F64)),
    "a bias of another size": lambda: f.conv2d(t(*X), t(*W), t(5)),
    "a bias with two axes": lambda: f.conv2d(t(*X), t(*W), t(4, 1)),
    "complex and float": lambda: f.conv2d(t(*X, dtype=torch.complex64), t(*W)),
    "no samples": lambda: f.conv2d(t(0, 3, 8, 8), t(*W)),
    "no channels": lambda: f.conv2d(t(2, 0, 8, 8), t(4, 0, 3, 3)),
    "no outputs": lambda: f.conv2d(t(*X), t(0, 3, 3, 3)),
    "no places": lambda: f.conv2d(t(2, 3, 0, 8), t(*W), padding=2),
    "a kernel without taps": lambda: f.conv2d(t(*X), t(4, 3, 0, 3)),
    "no batch axis": lambda: f.conv2d(t(3, 8, 8), t(*W)),
    "two axes": lambda: f.conv2d(t(8, 8), t(*W)),
    "five axes": lambda: f.conv2d(t(1, 1, 3, 8, 8), t(*W)),
    "three strides for two axes": lambda: direct(
        t(*X), t(*W), [1, 1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "one stride for two axes": lambda: direct(t(*X), t(*W), [1], [0], [1], False, [0], 1),
    "transposed, output padding as large as the stride": lambda: f.conv_transpose2d(
        t(*X), t(3, 4, 3, 3), stride=2, output_padding=2
    ),
    "transposed, negative output padding": lambda: f.conv_transpose2d(
        t(*X), t(3, 4, 3, 3), stride=2, output_padding=-1
    ),
    "transposed, an output without places": lambda: f.conv_transpose2d(
        t(1, 3, 1, 1), t(3, 4, 1, 1), padding=1
    ),
    "transposed, channels that do not match": lambda: f.conv_transpose2d(
        t(1, 4, 8, 8), t(3, 4, 3, 3)
    ),
    "transposed, no samples": lambda: f.conv_transpose2d(t(0, 3, 8, 8), t(3, 4, 3, 3)),
    "transposed int64": lambda: f.conv_transpose2d(
        t(*X, dtype=torch.int64), t(3, 4, 3, 3, dtype=torch.int64)
    ),
    "1-d channels": lambda: f.conv1d(t(1, 4, 8), t(4, 3, 3)),
    "3-d channels": lambda: f.conv3d(t(1, 4, 8, 8, 8), t(4, 3, 3, 3, 3)),
    "an error of another size": lambda: backward(t(1, 4, 5, 5), t(*X), t(*W)),
    "an error of another batch": lambda: backward(t(2, 4, 6, 6), t(*X), t(*W)),
    "an error of other channels": lambda: backward(t(1, 5, 6, 6), t(*X), t(*W)),
    "a strided view": lambda: f.conv2d(t(1, 3, 16, 16)[:, :, ::2, 1::2], t(*W)),
    "a turned view": lambda: f.conv2d(t(8, 8, 3, 2).permute(3, 2, 0, 1), t(*W)),
    "an expanded view": lambda: f.conv2d(t(1, 1, 8, 8).expand(2, 3, 8, 8), t(*W)),
    "an overlapping view": lambda: f.conv2d(
        t(400).as_strided((2, 3, 8, 8), (20, 10, 3, 1)), t(*W), padding=1
    ),
    "expanded weights": lambda: f.conv2d(t(*X), t(1, 3, 1, 1).expand(4, 3, 3, 3)),
}
if not IS_OLD:  # torch 1.13 divides by zero and crashes the process
    CASES["no groups"] = lambda: f.conv2d(t(*X), t(*W), groups=0)


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", CASES)
def test_the_outcome_is_torch_s(name: str) -> None:
    native = outcome(CASES[name])
    with bypass_convolutions("on", devices=("cpu",)):
        ours = outcome(CASES[name])
    if isinstance(native, torch.Tensor):
        assert isinstance(ours, torch.Tensor), ours
        assert (ours.shape, ours.dtype) == (native.shape, native.dtype)
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)
    elif isinstance(native[0], type):
        assert ours == native
    else:
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)


def test_most_of_them_are_errors() -> None:
    """Control: otherwise the test above would compare nothing."""
    outcomes = [outcome(run) for run in CASES.values()]
    assert (
        sum(isinstance(result, tuple) and isinstance(result[0], type) for result in outcomes) > 20
    )


def test_views_are_computed_here_and_not_handed_on() -> None:
    names = [name for name in CASES if "view" in name]
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        for name in names:
            CASES[name]()
    assert (bypass.num_caught, bypass.num_native) == (len(names), 0)
