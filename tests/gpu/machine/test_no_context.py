"""Machine facts, plans and the doctor open no GPU in this process. Needs a CUDA machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cuda_marks import needs_cuda
from support.scripts import run

pytestmark = pytest.mark.gpu

PRELUDE = """
import os, sys
def opened():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return sorted(name for name in found if name.startswith("/dev/nvidia"))
"""


@needs_cuda
def test_facts_and_plans_open_no_gpu(tmp_path: Path) -> None:
    source = f"""{PRELUDE}
import torch
import penstock
from torch.utils.data import TensorDataset

machine = penstock.machine()
plan = penstock.plan(list(range(100)), batch_size=10)
loader = penstock.DataLoader(list(range(1000)), batch_size=10, num_workers="auto")
print(loader.plan, file=sys.stderr)
assert sum(len(batch) for batch in loader) == 1000
for batch in penstock.DataLoader(list(range(100)), batch_size=10, num_workers=2):
    pass
assert not torch.cuda.is_initialized()
assert opened() == [], opened()
print(machine.gpus[0].name)
"""
    result = run(source, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@needs_cuda
def test_a_gpu_that_is_opened_would_be_seen(tmp_path: Path) -> None:
    source = f"""{PRELUDE}
import torch
torch.zeros(1, device="cuda")
assert opened() != []
"""
    result = run(source, tmp_path)
    assert result.returncode == 0, result.stderr


@needs_cuda
@pytest.mark.parametrize("asked", [[], ["--gpu"]])
def test_the_doctor_opens_no_gpu_itself(tmp_path: Path, asked: list[str]) -> None:
    source = f"""{PRELUDE}
import atexit
atexit.register(lambda: print(opened(), file=sys.stderr))
from penstock.cli import main
sys.argv = ["penstock", "doctor", "--json", *{asked!r}]
main()
"""
    result = run(source, tmp_path)
    assert result.stderr.strip().splitlines()[-1] == "[]", result.stderr
    facts = json.loads(result.stdout)
    assert facts["machine"]["gpus"][0]["vendor"] == "nvidia"
    assert facts["machine"]["torch_build"] == "cuda"
