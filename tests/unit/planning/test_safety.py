"""Requests of third-party code are honored as far as the machine allows."""

from __future__ import annotations

import pytest

from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest
from penstock.planning.safety import choose_safe_workers, make_safe

pytestmark = pytest.mark.legacy

SMALL = {"num_cpus": 4, "memory_bytes": 4 << 30, "available_bytes": 2 << 30}
BOX = Machine(os="linux", num_cpus=4, memory_bytes=64 << 30, available_bytes=64 << 30)
GPU_OPEN = Machine(os="linux", num_cpus=4, has_gpu_context=True)


def test_spawned_workers_are_counted_with_the_memory_that_spawned_ones_take() -> None:
    linux = choose_safe_workers(Machine(os="linux", **SMALL), 16)
    assert (linux.value, linux.source) == (16, "asked")
    for system in ("win32", "darwin"):  # systems that always spawn
        safe = choose_safe_workers(Machine(os=system, **SMALL), 16)
        assert (safe.value, safe.source) == (3, "rule")
        assert "each worker needs 300 MiB" in safe.reason


def test_no_worker_and_one_are_safe_everywhere() -> None:
    tiny = Machine(os="win32", torch_build="cuda", memory_bytes=1 << 30, available_bytes=64 << 20)
    assert [choose_safe_workers(tiny, n).value for n in (0, 1, 2, 4, 8)] == [0, 1, 1, 1, 1]


def test_fork_is_taken_away_only_beside_a_gpu_context() -> None:
    request = LoaderRequest(num_workers=2, start_method="fork")
    opened = Machine(os="linux", num_cpus=2, has_gpu_context=True)
    safe, lines = make_safe(opened, request)
    assert safe == LoaderRequest(num_workers=2)
    assert len(lines) == 1
    assert "clean process" in lines[0]
    assert make_safe(Machine(os="linux", num_cpus=2), request) == (request, [])


@pytest.mark.parametrize("method", [None, "spawn", "fork", "forkserver"])
@pytest.mark.parametrize("num_workers", [0, 1, 4, 32, 64, "auto"])
def test_what_this_machine_bears_is_left_as_it_is(
    method: str | None, num_workers: int | str
) -> None:
    request = LoaderRequest(num_workers=num_workers, start_method=method)
    assert make_safe(BOX, request) == (request, [])


@pytest.mark.parametrize("method", [None, "spawn", "forkserver"])
def test_other_methods_with_a_gpu_context_are_not(method: str | None) -> None:
    request = LoaderRequest(num_workers=2, start_method=method)
    assert make_safe(GPU_OPEN, request) == (request, [])


@pytest.mark.parametrize(
    ("machine", "most", "reason"),
    [
        (BOX, 64, "cores"),
        (BOX._replace(num_cpus=32), 256, "cores"),
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
