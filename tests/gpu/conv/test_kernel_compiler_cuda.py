"""Triton kernels compiled in children, and shapes measured between calls. Needs a CUDA machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conv import bypass_convolutions, kernel_compiler, tuning
from support.paths import TESTS

pytest.importorskip("triton.knobs")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def empty_caches(tmp_path: Path, monkeypatch: Any) -> Any:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "penstock"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    tuning.forget()
    while kernel_compiler._num_threads:  # children of earlier tests would write to this cache
        with kernel_compiler._lock:
            while not kernel_compiler._waiting.empty():
                kernel_compiler._waiting.get_nowait()
        time.sleep(0.05)
    kernel_compiler._states.clear()
    yield
    tuning.forget()
    kernel_compiler._states.clear()


COMPILE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from penstock.conv import kernel_compiler
from penstock.conv.algorithms.candidates import candidates
from support import conv_cases
cache = Path(sys.argv[2])
case = conv_cases.Case(name="", channels=48, outputs=80, size=(9, 11))
g, exact = case.geometry(is_channels_last=True), conv_cases.exact(case, torch.float32, "cuda")
ways = candidates(g, "forward", torch.float32, "cuda")
way = next(way for way in ways if way.name == "implicit product")
given = [t.contiguous(memory_format=torch.channels_last) for t in exact.arguments("forward")]
jobs = kernel_compiler.capture(lambda: way.run(g, *given, 1 << 20))
assert [name for _, name, _ in jobs] == ["gather_gemm"], jobs
assert not [*cache.rglob("*.cubin")]
for job in jobs:
    kernel_compiler.request(job)
deadline_s = time.monotonic() + 240
while not all(map(kernel_compiler.is_compiled, jobs)):
    assert time.monotonic() < deadline_s
    time.sleep(0.05)
compiled = [path.name for path in cache.rglob("*.cubin")]
assert compiled == ["gather_gemm.cubin"], compiled
result = way.run(g, *given, 1 << 20)
assert [path.name for path in cache.rglob("*.cubin")] == compiled  # nothing was compiled here
off = conv_cases.distance(result, exact.results["forward"], exact.scales["forward"])
assert off <= conv_cases.bound(way.name, torch.float32), off
assert kernel_compiler.capture(lambda: way.run(g, *given, 1 << 20)) == []
"""


def test_a_kernel_compiled_in_a_child_is_loaded_here(tmp_path: Path) -> None:
    """In a process of its own: kernels that earlier tests loaded would not be compiled again."""
    caches = {"PENSTOCK_CACHE_DIR": str(tmp_path / "penstock")}
    caches["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, str(TESTS), str(tmp_path / "triton")],
        capture_output=True,
        text=True,
        env={**os.environ, **caches},
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.usefixtures("empty_caches")
def test_a_shape_is_measured_between_its_first_calls() -> None:
    x = torch.randn(4, 24, 20, 20, device="cuda", requires_grad=True)
    layer = torch.nn.Conv2d(24, 40, 3, padding=1, bias=False).cuda()
    with bypass_convolutions("on", devices=("cuda",)) as bypass:
        layer(x).sum().backward()
        assert tuning.num_unfinished() == 3
        plans = [plan for plan in bypass._hook.runner.plans.values() if plan.chosen]
        assert plans == []  # no choice is final yet
        deadline_s = time.monotonic() + 240
        while tuning.num_unfinished():
            assert time.monotonic() < deadline_s
            layer(x).sum().backward()
        layer(x).sum().backward()
        assert {len(plan.chosen) for plan in bypass._hook.runner.plans.values()} == {1, 2}


@pytest.mark.usefixtures("empty_caches")
def test_deterministic_mode_measures_nothing() -> None:
    x = torch.randn(4, 24, 20, 20, device="cuda")
    layer = torch.nn.Conv2d(24, 40, 3, padding=1, bias=False).cuda()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad(), bypass_convolutions("on", devices=("cuda",)):
            first = layer(x)
            assert all(bool((layer(x) == first).all()) for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuning.num_unfinished() == 0
