"""``penstock doctor --gpu``, run for real on the current machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_section_is_one_line() -> None:
    command = [sys.executable, "-m", "penstock", "doctor", "--gpu"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    section = printed.stdout.partition("GPU copies\n")[2].partition("\n\n")[0]
    assert section.strip().startswith("not measured  no GPU to copy to: "), printed.stdout
    assert "\n" not in section


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_copies_are_measured_within_the_limit() -> None:
    command = [sys.executable, "-m", "penstock", "doctor", "--gpu", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    copies = json.loads(printed.stdout)["gpu_copies"]
    assert copies["failure"] is None
    assert len(copies["gpus"]) == torch.cuda.device_count()
    for gpu in copies["gpus"]:
        rates = gpu["bytes_per_s"]
        assert rates["pinned"] > 1e9
        if rates["registered"]:
            assert gpu["is_pinned"]
            assert rates["registered"] > 0.7 * rates["pinned"]
