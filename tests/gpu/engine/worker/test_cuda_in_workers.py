"""Workers can use CUDA even if their parent has already used it. Needs a CUDA machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cuda_marks import needs_cuda
from support.scripts import run

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from {package} import DataLoader

class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return (torch.full((4,), float(index), device="cuda") * 2).cpu(), index

torch.zeros(1, device="cuda")  # open the GPU in this process before any worker starts
assert torch.cuda.is_initialized()
for number, (tensor, index) in enumerate(DataLoader(OnGpu(), batch_size=2, num_workers=2)):
    assert tensor[:, 0].tolist() == [4.0 * number, 4.0 * number + 2]
print("all right")
"""
HELD = """
import torch
from penstock import DataLoader
from penstock.errors import CannotTravel

class Holding(torch.utils.data.Dataset):
    def __init__(self):
        self.table = torch.zeros(4, device="cuda")
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.table[index]

try:
    next(iter(DataLoader(Holding(), num_workers=1)))
except CannotTravel as error:
    print(error)
"""


@needs_cuda
def test_a_worker_may_use_cuda_although_your_process_does(tmp_path: Path) -> None:
    result = run(PROGRAM.format(package="penstock"), tmp_path)
    assert result.stdout == "all right\n", result.stderr


@needs_cuda
def test_torch_s_own_loader_cannot_where_it_forks(tmp_path: Path) -> None:
    result = run(PROGRAM.format(package="torch.utils.data"), tmp_path)
    assert result.returncode != 0
    assert "CUDA" in result.stderr


@needs_cuda
def test_a_tensor_on_the_gpu_is_refused_by_name_before_a_worker_starts(tmp_path: Path) -> None:
    result = run(HELD, tmp_path)
    assert result.stdout.startswith("[T01] dataset.table"), result.stderr
