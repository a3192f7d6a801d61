"""Facts of the whole machine, checked against the system, and with failing queries."""

from __future__ import annotations

import os
import pickle
import platform
import sys

import cloudpickle
import psutil
import pytest
import torch

import penstock
from penstock.machine import cgroup, collect, gpu, host, software
from penstock.machine import image_libraries as decoders
from penstock.machine.collect import machine
from penstock.machine.facts import Machine

pytestmark = pytest.mark.legacy

ASKED = [
    *((cgroup, name) for name in ("cpu_quota", "memory_limit_bytes")),
    *((decoders, name) for name in ("find_decoders", "has_turbo")),
    *((host, name) for name in ("os_version", "architecture", "cpu_model", "num_affine_cpus")),
    *((host, name) for name in ("memory_bytes", "shm_bytes", "max_fds")),
    *((software, name) for name in ("torch_build", "numpy_version", "has_gpu_context")),
    *((software, name) for name in ("is_notebook", "environment", "start_method")),
    (gpu, "find_gpus"),
    (host, "is_gil_enabled"),
    (software, "gil_enabled_by"),
]


def test_this_machine_agrees_with_the_system() -> None:
    here = machine()
    assert here.os == sys.platform
    assert here.num_cpus == os.cpu_count()
    assert 1 <= here.usable_cores <= here.num_cpus
    assert here.memory_bytes == psutil.virtual_memory().total
    assert 0 < here.available_bytes <= here.memory_bytes
    assert 0 < here.usable_memory_bytes <= here.memory_bytes
    assert here.python == platform.python_version()
    assert here.torch == torch.__version__
    assert here.has_gpu_context == torch.cuda.is_initialized()
    assert here.can_start_python
    assert not here.is_notebook
    assert not here.is_frozen


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_this_linux_machine_agrees_with_the_system() -> None:
    import resource

    here = machine()
    assert here.num_affine_cpus == len(os.sched_getaffinity(0))
    assert here.architecture == os.uname().machine
    assert os.uname().release in here.os_version
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert here.max_fds == (None if limit == resource.RLIM_INFINITY else limit)


def fail(*arguments: object) -> None:
    raise RuntimeError("a computer is stranger than expected")


@pytest.mark.parametrize(
    ("module", "name"), ASKED, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fact_that_fails_is_unknown_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    monkeypatch.setattr(module, name, fail)
    assert machine().num_cpus == os.cpu_count()


def test_a_machine_on_which_everything_fails_is_still_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in ASKED:
        monkeypatch.setattr(module, name, fail)
    here = machine()
    assert here == Machine(
        os=sys.platform, num_cpus=os.cpu_count() or 1, python=platform.python_version()
    )
    assert here.usable_cores >= 1


@pytest.mark.parametrize(
    ("limit", "total", "expected"),
    [(None, 100, None), (50, 100, 50), (100, 100, None), (200, 100, None), (50, 0, 50)],
)
def test_a_memory_limit_above_the_memory_limits_nothing(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, total: int, expected: int | None
) -> None:
    monkeypatch.setattr(collect.cgroup, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(collect.host, "memory_bytes", lambda: (total, 0))
    assert machine().memory_limit_bytes == expected


def test_the_package_can_be_called_and_pickled() -> None:
    assert isinstance(penstock.machine(), penstock.Machine)
    for pickler in (pickle, cloudpickle):
        assert pickle.loads(pickler.dumps(penstock.machine)) is penstock.machine
    package = penstock.machine
    function = pickle.loads(cloudpickle.dumps(lambda: package().os))
    assert function() == sys.platform
