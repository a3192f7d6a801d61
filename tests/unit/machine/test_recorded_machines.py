"""The machines under tests/machines load, are consistent, and have a line in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.machine.facts import Machine
from support.paths import MACHINES

pytestmark = pytest.mark.legacy

FILES = sorted(MACHINES.glob("*.json"))
SEERS = {"nvml", "nvidia-smi", "kfd", "platform", "torch", "nobody"}


def load(name: str) -> Machine:
    return Machine.from_json((MACHINES / f"{name}.json").read_text(encoding="utf-8"))


def test_there_are_at_least_twenty() -> None:
    assert len(FILES) >= 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_machine_makes_sense(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    machine = Machine.from_json(text)
    assert machine.to_json() + "\n" == text  # no fact is missing or written twice
    assert 1 <= machine.usable_cores <= machine.num_cpus
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.torch_build in {"cuda", "hip", "mps", "cpu", "none"}
    assert machine.gpus_seen_by in SEERS
    assert (machine.gpus_seen_by == "nobody") == (machine.gpus == ())
    assert machine.can_start_python != machine.is_frozen
    if machine.os == "win32":
        assert (machine.start_method, machine.shm_bytes, machine.max_fds) == ("spawn", None, None)


def test_each_has_its_line_in_the_list_and_each_line_its_file() -> None:
    listed = re.findall(
        r"^\| `([^`]+)` \|", (MACHINES / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(path.stem for path in FILES)


def test_what_each_is_there_for() -> None:
    assert load("container-2-of-64-cores").usable_cores == 2
    assert load("container-2-of-64-cores").usable_memory_bytes == 8 << 30
    assert load("container-64mb-shm").shm_bytes == 64 << 20
    assert load("rx5600xt-rocm52").gpus[0].architecture == "gfx1010"
    assert load("rx5600xt-rocm52").environment["HSA_OVERRIDE_GFX_VERSION"] == "10.3.0"
    assert "HSA_OVERRIDE_GFX_VERSION" not in load("rx6700xt-no-override").environment
    assert not load("frozen-app-windows").can_start_python
    assert load("jupyter-colab-t4").is_notebook
    assert load("fork-set-by-someone").is_start_method_set
    assert len(load("dgx-h100-8gpu").gpus) == len(load("mi300x").gpus) == 8
    assert load("driver-hangs").gpu_trouble
    assert load("omp-64-threads").usable_cores < 64
