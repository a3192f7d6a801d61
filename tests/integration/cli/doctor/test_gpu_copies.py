"""The doctor's GPU copy measurements, formatted as rows and problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.cli.doctor import gpu_copies
from penstock.cli.doctor.gpu_copies import copy_problems, copy_rows, measure_copies
from penstock.machine.facts import Gpu
from support import fake_copies, fake_gpu

H200 = Gpu(name="NVIDIA H200", vendor="nvidia")


def measured(**changes: Any) -> dict[str, Any]:
    return {"gpus": [{**fake_copies.GPU, **changes}], "failure": None}


def test_everything_is_said_of_a_gpu_that_is_well() -> None:
    assert dict(copy_rows(measured())) == {
        "cuda:0": "NVIDIA H200; link: PCIe 5 x16, up to 63 GB/s",
        "copies": "14.4 GB/s from ordinary memory, 55.1 GB/s from pinned memory, "
        "55.1 GB/s from Penstock's slots",
        "slots": "can be pinned; fence before reuse: an event of the whole GPU context",
        "feeds": "366,045 images/s of 224 x 224 as uint8, 91,511 as float32",
    }
    assert list(copy_problems(measured())) == []


def test_slots_that_cannot_be_pinned_are_a_problem_with_its_reason() -> None:
    copies = measured(
        bytes_per_s={"pageable": 10e9, "pinned": None, "registered": None},
        trouble="cudaHostRegister returned 2 (out of memory)",
    )
    rows = dict(copy_rows(copies))
    assert rows["copies"] == "10 GB/s from ordinary memory"
    assert "cannot be pinned (cudaHostRegister returned 2" in rows["slots"]
    assert rows["feeds"].startswith("66,433 images/s")
    (problem,) = copy_problems(copies)
    assert (problem.code, problem.severity) == ("slots-not-pinned", "slow")


def test_a_link_with_fewer_lanes_than_the_card_has_is_a_problem() -> None:
    (problem,) = copy_problems(
        measured(link={"generation": 4, "width": 4, "max_generation": 4, "max_width": 16})
    )
    assert "4 of its 16 PCIe lanes" in problem.what
    assert list(copy_problems(measured(link=None))) == []
    assert "link: unknown" in dict(copy_rows(measured(link=None)))["cuda:0"]


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ((), "torch cannot use any"),
        ((Gpu(name="M2", vendor="apple"),), "Apple GPUs share memory with the CPU"),
    ],
)
def test_without_a_gpu_it_is_one_line_and_no_child(gpus: Any, why: str) -> None:
    copies = measure_copies(gpus, 60.0, check="no such module:check")
    ((name, text),) = copy_rows(copies)
    assert (name, text.startswith(f"no GPU to copy to: {why}")) == ("not measured", True)
    assert list(copy_problems(copies)) == []


def test_a_child_that_comes_to_its_end_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETEND_COPIES", "work")
    copies = measure_copies((H200,), 60.0, check="support.fake_copies:pretend")
    assert copies == measured()


@pytest.mark.parametrize(
    ("fate", "limit_s", "words"),
    [
        ("hang", 1.5, "timed out after 1.5 s while copying pinned memory to GPU 1"),
        ("die", 60.0, "the process died with SIGKILL while copying pinned memory to GPU 1"),
        ("raise", 60.0, "CUDA error: an illegal memory access"),
    ],
)
def test_a_child_that_is_lost_is_told_with_what_it_was_doing(
    fate: str, limit_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETEND_COPIES", fate)
    copies = measure_copies(
        (H200._replace(vendor="amd"),), limit_s, check="support.fake_copies:pretend"
    )
    assert words in copies["failure"]
    assert [gpu["name"] for gpu in copies["gpus"]] == ["NVIDIA H200"], "what was measured is kept"
    (problem,) = copy_problems(copies)
    assert (problem.code, problem.severity) == ("gpu-copies", "harm")
    assert dict(copy_rows(copies))["not measured"] == copies["failure"]


@pytest.mark.parametrize("refusal", [0, 801])
def test_measuring_registers_shared_memory_and_undoes_it(
    refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copies, "COPY_BYTES", 1 << 20)
    stages: list[str] = []
    with fake_gpu.pretended("cuda") as gpu, pytest.MonkeyPatch.context() as patch:
        gpu.refusal = refusal
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)

        class Properties:
            name = "NVIDIA H200"
            pci_domain_id, pci_bus_id, pci_device_id = 0, 0xFE, 0

        patch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
        found = gpu_copies.measure_gpu(1, torch.device("cpu"), stages.append)
        assert gpu.registered == {}
        assert gpu.devices_of("register") == {1}
    assert found["bus_id"] == "0000:fe:00.0"
    assert found["bytes_per_s"]["pageable"] > 0
    assert (found["bytes_per_s"]["registered"] is None) is bool(refusal)
    assert ("returned 801" in found["trouble"]) is bool(refusal)
    assert stages[-1] == "copying registered shared memory to GPU 1"
