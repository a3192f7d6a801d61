"""Any machine survives a JSON round trip, and any text is parsed or rejected cleanly."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.machine.amd import cards_by_kfd
from penstock.machine.cgroup import cpu_quota, memory_limit_bytes
from penstock.machine.facts import Gpu, Machine
from penstock.machine.gpu_usage import _json_of
from penstock.machine.host import cpu_model
from penstock.machine.vendor_tools import ToolFailed

pytestmark = pytest.mark.legacy

counts = st.integers(0, 2**63)
known_counts = st.one_of(st.none(), counts)
words = st.text(max_size=12)
known_words = st.one_of(st.none(), words)
gpus = st.builds(
    lambda **facts: Gpu(**facts),  # a function: builds() would draw the other fields of a Gpu, too
    name=words,
    vendor=st.sampled_from(["nvidia", "amd", "apple"]),
    architecture=known_words,
    memory_bytes=known_counts,
    driver=known_words,
)
machines = st.builds(
    lambda **facts: Machine(**facts),
    os=words,
    cpu_model=words,
    num_cpus=st.integers(1, 4096),
    num_affine_cpus=st.one_of(st.none(), st.integers(1, 4096)),
    cpu_quota=st.one_of(st.none(), st.floats(0.01, 4096)),
    memory_bytes=counts,
    memory_limit_bytes=known_counts,
    shm_bytes=known_counts,
    is_notebook=st.booleans(),
    torch=known_words,
    gpus=st.lists(gpus, max_size=3).map(tuple),
    gpu_trouble=words,
    environment=st.dictionaries(words, words, max_size=4),
    decoders=st.lists(words, max_size=3).map(tuple),
    has_turbo=st.one_of(st.none(), st.booleans()),
)


@given(machines)
def test_a_machine_comes_back_from_json_as_it_was(machine: Machine) -> None:
    assert Machine.from_json(machine.to_json()) == machine


@given(machines, machines)
def test_control_two_machines_that_differ_differ_in_json(one: Machine, other: Machine) -> None:
    assert (one.to_json() == other.to_json()) == (one == other)


@given(machines)
def test_usable_is_never_more_than_there_is_and_never_nothing(machine: Machine) -> None:
    assert 1 <= machine.usable_cores <= (machine.num_affine_cpus or machine.num_cpus)
    assert machine.usable_memory_bytes <= machine.memory_bytes


@given(st.binary(max_size=200))
def test_any_bytes_in_a_file_of_the_kernel_s_break_nothing(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "1").mkdir()
        for name in ("cpu.max", "memory.max", "membership", "1/properties", "names"):
            (root / name).write_bytes(content)
        quota = cpu_quota(root, root / "membership")
        limit = memory_limit_bytes(root, root / "membership")
        assert quota is None or quota > 0
        assert limit is None or limit > 0
        cards_by_kfd(root, root, root / "names", root / "names")


@given(st.text(max_size=200))
def test_any_text_of_a_tool_is_json_or_no_answer(text: str) -> None:
    with contextlib.suppress(ToolFailed):
        _json_of(text, "tool")


@given(st.text(max_size=200))
def test_any_cpuinfo_gives_some_text(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpuinfo"
        path.write_text(text, encoding="utf-8", errors="replace")
        assert isinstance(cpu_model(path), str)
