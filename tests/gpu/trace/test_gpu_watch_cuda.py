"""The timeline shows the copies and steps of a real GPU, measured by its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cuda_marks import needs_cuda
from support.scripts import run

pytestmark = [pytest.mark.gpu, needs_cuda]

WATCHED = """
import time
import torch
import penstock

class Blocks(torch.utils.data.Dataset):
    def __len__(self):
        return 30 * 8
    def __getitem__(self, index):
        return torch.full((500_000,), index % 251, dtype=torch.uint8)

device, is_starved = {device!r}, {is_starved}
torch.zeros(1, device="cuda")
loader = penstock.DataLoader(
    Blocks(), batch_size=8, num_workers=2, device=device, pin_memory=True,
    trace=penstock.Tracing(),
)
def gpu_sleep(seconds):
    torch.cuda._sleep(int(seconds * 1.5e9))
gpu_sleep(0.01)
torch.cuda.synchronize()
begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begun.record(); gpu_sleep(0.01); ended.record()
torch.cuda.synchronize()
each_s = begun.elapsed_time(ended) / 1e3
for batch in loader:
    if not batch.is_cuda:
        batch = batch.cuda(non_blocking=True)
    gpu_sleep(0.01)
    if is_starved:
        torch.cuda.synchronize()
        with_nothing_s = time.perf_counter() + 0.01
        while time.perf_counter() < with_nothing_s:
            pass
timeline = loader.timeline()
lanes = {{lane.name: lane for lane in timeline.lanes}}
steps = [s.took_ns * 1e-9 for s in lanes["GPU"].spans]
copies = [s.took_ns * 1e-9 for s in lanes["to device"].spans] if device else []
print(len(steps), len(copies), sorted(steps)[len(steps) // 2] / each_s)
first, last = timeline.lanes[0].spans[0].start_ns, max(s.end_ns for s in timeline.lanes[0].spans)
spans = [s for name in ("GPU", "to device") if name in lanes for s in lanes[name].spans]
assert all(first - 10**6 < s.start_ns <= s.end_ns < last + 2 * 10**9 for s in spans), spans
if copies:
    assert all(1e-5 < copy < 0.05 for copy in copies), copies
starts = sorted((s.start_ns, s.end_ns) for s in lanes["GPU"].spans)
assert all(after[0] >= before[1] - 200_000 for before, after in zip(starts, starts[1:]))
loader.close()
"""


@pytest.mark.parametrize("device", ["cuda", None])
def test_each_copy_and_step_is_in_the_timeline(device: str | None, tmp_path: Path) -> None:
    end = run(WATCHED.format(device=device, is_starved=False), tmp_path)
    assert end.returncode == 0, end.stderr
    num_steps, num_copies, ratio = end.stdout.split()
    assert int(num_steps) >= 29
    assert int(num_copies) >= (27 if device else 0)
    assert 0.9 < float(ratio) < 1.2


def test_a_step_lasts_until_the_next_batch_is_asked_for(tmp_path: Path) -> None:
    """Negative control for the test above: a slow loop makes the steps longer."""
    end = run(WATCHED.format(device="cuda", is_starved=True), tmp_path)
    assert end.returncode == 0, end.stderr
    assert float(end.stdout.split()[2]) > 1.5
