"""What other people's code asks for, as far as a machine bears it."""

from __future__ import annotations

import pytest

from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest
from penstock.planning.safety import choose_safe_workers, make_safe

pytestmark = pytest.mark.legacy

SMALL = {"num_cpus": 4, "memory_bytes": 4 << 30, "available_bytes": 2 << 30}


def test_what_a_machine_bears_is_left_as_it_is() -> None:
    request = LoaderRequest(num_workers=8, start_method="spawn")
    assert make_safe(Machine(os="linux", num_cpus=8, available_bytes=64 << 30), request) == (
        request,
        [],
    )


def test_spawned_workers_are_counted_with_the_memory_that_spawned_ones_take() -> None:
    linux = choose_safe_workers(Machine(os="linux", **SMALL), 16)
    assert (linux.value, linux.source) == (16, "asked")
    for system in ("win32", "darwin"):  # where nothing else but spawn is done
        safe = choose_safe_workers(Machine(os=system, **SMALL), 16)
        assert (safe.value, safe.source) == (3, "rule")
        assert "300 MiB a worker" in safe.reason


def test_no_worker_and_one_are_safe_everywhere() -> None:
    tiny = Machine(os="win32", torch_build="cuda", memory_bytes=1 << 30, available_bytes=64 << 20)
    assert [choose_safe_workers(tiny, n).value for n in (0, 1, 2, 4, 8)] == [0, 1, 1, 1, 1]


def test_fork_is_taken_away_only_beside_a_gpu_context() -> None:
    request = LoaderRequest(num_workers=2, start_method="fork")
    opened = Machine(os="linux", num_cpus=2, has_gpu_context=True)
    safe, lines = make_safe(opened, request)
    assert safe.start_method is None
    assert "clean process" in lines[0]
    assert make_safe(Machine(os="linux", num_cpus=2), request) == (request, [])
