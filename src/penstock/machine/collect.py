"""Collects the facts about this computer. A fact that cannot be read does not affect the others.

:func:`machine` is the public ``penstock.machine()``. Loaders use :func:`quick_facts`.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable
from typing import TypeVar

from penstock.machine import cgroup, host, software
from penstock.machine.facts import Machine

Fact = TypeVar("Fact")


def machine() -> Machine:
    """Describe this computer. Cheap: opens no GPU, does not import torch, and never raises.

    Example:
        >>> import penstock
        >>> penstock.machine().usable_cores >= 1
        True
    """
    from penstock.machine import gpu  # late, because loaders do not need them
    from penstock.machine import image_libraries as decoders

    known = _basic_facts()
    found = _known(lambda: gpu.find_gpus(known.torch_build), gpu.FoundGpus())
    start_method, is_start_method_set = _known(software.start_method, ("spawn", False))
    return known._replace(
        is_notebook=_known(software.is_notebook, False),
        python=platform.python_version(),
        numpy=_known(software.numpy_version, None),
        gpus=found.gpus,
        gpus_seen_by=found.seen_by,
        gpu_trouble=found.trouble,
        has_gpu_context=_known(software.has_gpu_context, False),
        start_method=start_method,
        is_start_method_set=is_start_method_set,
        decoders=_known(decoders.find_decoders, ()),
        has_turbo=_known(decoders.has_turbo, None),
    )


def quick_facts() -> Machine:
    """Return the facts that a loader's plan needs: all but GPUs and decoders, in microseconds.

    Starts no process and imports nothing, so it can be called in each epoch. Facts that can change
    while a program runs (free memory, affinity, the GIL, a GPU context) are read on each call.
    """
    _, available_bytes = _known(host.memory_bytes, (0, 0))
    return _kept_facts()._replace(
        available_bytes=available_bytes,
        num_affine_cpus=_known(host.num_affine_cpus, None),
        is_gil_enabled=_known(host.is_gil_enabled, True),
        gil_enabled_by=_known(software.gil_enabled_by, None),
        has_gpu_context=_known(software.has_gpu_context, False),
        ray_cpus=_known(_num_ray_cpus, None) if "ray" in sys.modules else None,
    )


def _num_ray_cpus() -> int | None:
    from penstock.machine.ray_resources import num_cluster_cpus

    return num_cluster_cpus()


def _basic_facts() -> Machine:
    """Return the facts about the host and the installed torch."""
    total_bytes, available_bytes = _known(host.memory_bytes, (0, 0))
    limit_bytes = _known(cgroup.memory_limit_bytes, None)
    if limit_bytes is not None and 0 < total_bytes <= limit_bytes:
        limit_bytes = None  # a limit above the physical memory has no effect
    torch = _known(software.torch_build, software.TorchBuild())
    return Machine(
        os=sys.platform,
        os_version=_known(host.os_version, ""),
        architecture=_known(host.architecture, ""),
        cpu_model=_known(host.cpu_model, ""),
        num_cpus=os.cpu_count() or 1,
        num_affine_cpus=_known(host.num_affine_cpus, None),
        cpu_quota=_known(cgroup.cpu_quota, None),
        memory_bytes=total_bytes,
        available_bytes=available_bytes,
        memory_limit_bytes=limit_bytes,
        shm_bytes=_known(host.shm_bytes, None),
        max_fds=_known(host.max_fds, None),
        is_frozen=host.is_frozen(),
        can_start_python=host.can_start_python(),
        has_proc=host.has_proc(),
        is_gil_enabled=_known(host.is_gil_enabled, True),
        gil_enabled_by=_known(software.gil_enabled_by, None),
        torch=torch.version,
        torch_build=torch.build,
        torch_build_version=torch.build_version,
        environment=_known(software.environment, {}),
    )


_kept_facts = functools.lru_cache(maxsize=1)(_basic_facts)


def _known(ask: Callable[[], Fact], unknown: Fact) -> Fact:
    """Return ``ask()``, or ``unknown`` if it raises.

    Unusual machines fail in ways that cannot be foreseen. A missing fact must lead to a worse
    guess, not to a failed training run.
    """
    try:
        return ask()
    except Exception:
        return unknown
