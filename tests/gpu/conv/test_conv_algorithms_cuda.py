"""Compares every convolution algorithm on a real GPU with float64. Needs a CUDA machine."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import product

import pytest
import torch

from penstock.conv import kernel_compiler
from penstock.conv.algorithms.candidates import candidates
from penstock.conv.geometry import PASSES
from support import conv_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),  # includes compiling the kernels
]

CASES = (
    *conv_cases.CASES,
    conv_cases.Case(name="many channels", channels=128, outputs=160, size=(6, 7)),
)
CAPS = (1 << 28, 1)
TYPES = (torch.float32, torch.bfloat16)
FLOAT16 = ("wide plain", "stem", "depthwise, strided", "many channels")
"""Cases that are tested in float16 too, with the kernels of bfloat16 for another type."""
PAIRS = [
    *product(CASES, TYPES),
    *((case, torch.float16) for case in CASES if case.name in FLOAT16),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Compile the kernels of all cases in children, several at once. One by one takes minutes."""
    compile_kernels(PAIRS)


def compile_kernels(pairs: list[tuple[conv_cases.Case, torch.dtype]]) -> None:
    """Compile the kernels of these cases, with one child for each core."""
    jobs = set()
    for case, dtype in pairs:
        for is_last, which in product((False, True), PASSES):
            g = case.geometry(is_channels_last=is_last)
            x = torch.randn(g.batch, g.in_channels, *g.in_size, device="cuda").to(dtype)
            w = torch.randn(g.out_channels, g.group_in, *g.kernel, device="cuda").to(dtype)
            dy = torch.randn(g.batch, g.out_channels, *g.out_size, device="cuda").to(dtype)
            pair = {"forward": (x, w), "input gradient": (dy, w), "weight gradient": (x, dy)}
            for way, cap in product(candidates(g, which, dtype, "cuda"), CAPS):
                if way.needs_triton:
                    run = partial(way.run, g, *pair[which], cap)
                    jobs.update(kernel_compiler.capture(run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_compiler, "NUM_CHILDREN", os.cpu_count())
        for job in jobs:
            kernel_compiler.request(job)
        while not all(map(kernel_compiler.is_compiled, jobs)):
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("case", "dtype"), PAIRS, ids=[f"{case.name}-{dtype}" for case, dtype in PAIRS]
)
def test_every_way_is_within_its_bound(case: conv_cases.Case, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = conv_cases.exact(case, dtype, "cuda")
    wrong = []
    for is_last in (False, True):
        geometry = case.geometry(is_channels_last=is_last)
        for which in PASSES:
            for way in candidates(geometry, which, dtype, "cuda"):
                for cap in CAPS:
                    result = way.run(geometry, *exact.arguments(which), cap)
                    off = conv_cases.distance(result, exact.results[which], exact.scales[which])
                    if not off <= conv_cases.bound(way.name, dtype):
                        wrong.append(f"{which} by {way.name}, last={is_last}, cap={cap}: {off:.1e}")
    assert wrong == []


def test_triton_s_ways_are_among_them() -> None:
    pytest.importorskip("triton")
    geometry = conv_cases.CASES[1].geometry(is_channels_last=True)
    names = {way.name for way in candidates(geometry, "forward", torch.float32, "cuda")}
    assert {"implicit product", "winograd, fused", "columns"} <= names
    large = CASES[-1].geometry(is_channels_last=True)
    names = {way.name for way in candidates(large, "forward", torch.bfloat16, "cuda")}
    assert "gathered columns" in names
