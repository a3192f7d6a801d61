"""The report of ``penstock doctor``."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.cli.doctor.report import DoctorFindings, print_report
from penstock.machine.facts import Machine
from penstock.machine.storage import Storage
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload

pytestmark = pytest.mark.legacy


def report(storage: Storage) -> str:
    machine = Machine(os="linux", num_cpus=2, memory_bytes=16 << 30, available_bytes=16 << 30)
    work = Workload(sample_s=0.01, busy_share=1.0, num_samples=50_000, sample_bytes=150_000)
    plan = make_plan(machine, LoaderRequest(batch_size=64), work).to_dict()
    assert plan["slot_memory"]["value"] == 38_400_000  # JSON has bytes
    written = io.StringIO()
    findings = DoctorFindings(machine=machine, plan=plan, problems=[], storage={"data": storage})
    print_report(Console(file=written, width=200), findings)
    return written.getvalue()


def test_memory_has_a_unit() -> None:
    text = report(Storage(kind="nvme"))
    assert "slot memory         36.6 MiB  (measured: 2 workers x 2 batches x 9.16 MiB)" in text


def test_the_storage_of_the_data_is_named_or_said_not_to_be_reported() -> None:
    ext4 = {"device": "vda", "filesystem": "ext4"}
    assert "data: nvme (vda ext4)" in report(Storage(kind="nvme", **ext4))
    assert "data: type not reported (vda ext4)" in report(Storage(kind="unknown", **ext4))
