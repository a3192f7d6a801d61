"""What other people's code asks for and cannot have here, from constructed facts."""

from __future__ import annotations

import pytest

from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest
from penstock.planning.safety import make_safe

BOX = Machine(os="linux", num_cpus=4, memory_bytes=64 << 30, available_bytes=64 << 30)
GPU_OPEN = Machine(os="linux", num_cpus=4, has_gpu_context=True)


@pytest.mark.parametrize("method", [None, "spawn", "fork", "forkserver"])
@pytest.mark.parametrize("num_workers", [0, 1, 4, 32, "auto"])
def test_what_this_machine_bears_is_left_as_it_is(
    method: str | None, num_workers: int | str
) -> None:
    request = LoaderRequest(num_workers=num_workers, start_method=method)
    assert make_safe(BOX, request) == (request, [])


def test_fork_with_a_gpu_context_is_changed() -> None:
    safe, lines = make_safe(GPU_OPEN, LoaderRequest(num_workers=2, start_method="fork"))
    assert safe == LoaderRequest(num_workers=2)
    assert len(lines) == 1


@pytest.mark.parametrize("method", [None, "spawn", "forkserver"])
def test_other_methods_with_a_gpu_context_are_not(method: str | None) -> None:
    request = LoaderRequest(num_workers=2, start_method=method)
    assert make_safe(GPU_OPEN, request) == (request, [])


@pytest.mark.parametrize(
    ("machine", "most", "reason"),
    [
        (BOX, 32, "cores"),
        (Machine(os="linux", num_cpus=64, max_fds=256), 48, "ulimit"),
        (
            Machine(os="linux", num_cpus=64, memory_bytes=8 << 30, available_bytes=960 << 20),
            10,
            "free",
        ),
        (
            Machine(os="win32", num_cpus=64, memory_bytes=8 << 30, available_bytes=6 << 30),
            10,
            "free",
        ),
    ],
)
def test_five_hundred_workers_become_what_cores_files_and_memory_allow(
    machine: Machine, most: int, reason: str
) -> None:
    safe, (line,) = make_safe(machine, LoaderRequest(num_workers=500))
    assert safe.num_workers == most
    assert line.startswith(f"num_workers=500 becomes {most}: ")
    assert reason in line
