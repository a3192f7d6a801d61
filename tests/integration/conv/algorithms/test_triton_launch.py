"""Triton's kernels without a GPU, run by Triton's interpreter and compared with float64.

tests/gpu tests them on a real GPU. Triton comes with torch's CUDA builds: the formats leg has it on
x86-64, with a NumPy that its interpreter can use.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from support.paths import TESTS

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from support import conv_cases
from penstock.conv.algorithms import triton_launch
from penstock.conv.algorithms.candidates import candidates
assert triton_launch.is_interpreted()
CASES = (
    conv_cases.Case(name="strided", stride=2, channels=5, outputs=3, size=(5, 6)),
    conv_cases.Case(name="grouped", groups=2, channels=32, outputs=4, size=(4, 5), batch=1),
    conv_cases.Case(name="depthwise", groups=4, channels=4, outputs=4, size=(5, 4), stride=2),
    conv_cases.Case(name="merged", groups=4, channels=8, outputs=16, size=(5, 4), stride=2),
    conv_cases.Case(name="winograd", channels=32, outputs=32, size=(5, 4), batch=1),
    conv_cases.Case(name="stem", channels=2, outputs=8, kernel=5, stride=2, padding=2, size=(7, 6)),
    conv_cases.Case(name="stride beyond kernel", stride=3, kernel=2, padding=0, size=(5, 6)),
    conv_cases.Case(name="1-d, strided", size=(7,), stride=2, channels=3, outputs=2),
    conv_cases.Case(name="dilated, strided", dilation=2, stride=2, size=(7, 5), channels=2),
    conv_cases.Case(name="3-d", size=(3, 4, 3), channels=3, outputs=2, batch=1),
    conv_cases.Case(name="3-d, strided", size=(4, 3, 5), stride=2, channels=4, groups=2, outputs=2),
    conv_cases.Case(name="3-d, dilated", size=(4, 5, 4), stride=2, dilation=2, channels=2, batch=1),
    conv_cases.Case(name="1-d, dilated", size=(7,), dilation=2, channels=3, outputs=2),
    conv_cases.Case(name="gathered", channels=48, outputs=16, dilation=2, padding=3, size=(6, 7)),
    conv_cases.Case(name="gathered, strided", channels=16, outputs=5, stride=2, size=(6, 7)),
    conv_cases.Case(name="24 channels", channels=24, outputs=5, size=(4, 5), stride=2, batch=1),
    conv_cases.Case(name="depthwise 5x5", groups=2, channels=2, outputs=2, kernel=5, stride=2,
                    padding=2, size=(5, 4), batch=1),
    conv_cases.Case(name="depthwise, dilated", groups=2, channels=2, outputs=2, dilation=2,
                    size=(5, 4), batch=1),
    conv_cases.Case(name="output padding", channels=16, outputs=16, dilation=2, extra=1,
                    size=(4, 5)),
    conv_cases.Case(name="depthwise, output padding", groups=2, channels=2, outputs=2, dilation=2,
                    extra=1, size=(5, 4), batch=1),
    conv_cases.Case(name="gathered, 3-d", channels=16, outputs=16, size=(3, 4, 3), batch=1),
)
WORDS = ("implicit", "lanes", "fused", "merged", "gathered")
seen = set()
for case in CASES:
    exact = conv_cases.exact(case, torch.float32)
    for is_last in (False, True):
        g = case.geometry(is_channels_last=is_last)
        for which in ("forward", "input gradient", "weight gradient"):
            for way in candidates(g, which, torch.float32, "cpu"):
                if not any(word in way.name for word in WORDS):
                    continue
                cap = 32768 if "gathered" in way.name else 1 << 20  # some rows at a time
                result = way.run(g, *exact.arguments(which), cap)
                off = conv_cases.distance(result, exact.results[which], exact.scales[which])
                assert off <= conv_cases.bound(way.name, torch.float32), (case, which, way, off)
                seen.add(way.name)
print(sorted(seen))
"""


@needs_triton
@pytest.mark.formats
@pytest.mark.slow
def test_the_kernels_are_right_in_triton_s_interpreter() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHECK, str(TESTS)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=240,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("this Triton's interpreter cannot use NumPy 2.4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(
        [
            *("depthwise lanes", "gathered columns", "implicit product"),
            *("implicit product, wide", "merged groups", "winograd, fused"),
        ]
    )


def test_without_triton_no_way_of_its_is_offered() -> None:
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("triton is installed")
    import torch

    from penstock.conv.algorithms.candidates import candidates
    from support import conv_cases

    for case in conv_cases.CASES:
        geometry = case.geometry(is_channels_last=True)
        names = [way.name for way in candidates(geometry, "forward", torch.float32, "cuda")]
        assert names
        assert not any(
            word in name for name in names for word in ("implicit", "lanes", "fused", "merged")
        )
