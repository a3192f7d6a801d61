"""Finds the GPUs of this machine without opening one in this process.

::

    this process            its children
    KFD's files (AMD)       nvidia-smi
    macOS's name            torch, only on request (`find_torch_gpus`)
    NVML, as a last resort

The first three and NVML list the GPUs that the drivers see. torch lists the GPUs that it can use.
``CUDA_VISIBLE_DEVICES`` and similar variables hide GPUs from torch only. They are part of the
machine's environment.

The tool is tried before the library because NVML leaves a thread and six descriptors in the calling
process (driver 580, H200), and a process with two threads should not fork. Both take about as long:
29 ms for the tool, 28 ms for NVML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.machine import amd, host, nvidia
from penstock.machine.child_process import python_command
from penstock.machine.facts import Gpu
from penstock.machine.vendor_tools import (
    ToolFailed,
    ToolMissing,
    ToolTimedOut,
    call_library,
    run_tool,
)

DRIVER_LIMIT_S = 2.0
"""Time limit for a driver to list its cards, which usually takes 30 ms. The value is a guess. It is
low because the doctor must answer within 3 s even if a tool hangs; ``doctor --gpu`` waits
longer."""


@dataclass(frozen=True, kw_only=True)
class FoundGpus:
    """The GPUs, the source that listed them, and any failures during the search."""

    gpus: tuple[Gpu, ...] = ()
    seen_by: str = "nobody"
    trouble: str = ""


def find_gpus(torch_build: str = "cuda") -> FoundGpus:
    """Return the GPUs that this machine's drivers list.

    Args:
        torch_build: In a machine with cards from both vendors, ``"hip"`` selects AMD's.

    Example:
        >>> found = find_gpus()
        >>> (found.seen_by == "nobody") == (found.gpus == ())
        True
    """
    sources: dict[str, Callable[[], tuple[Gpu, ...]]]
    if sys.platform == "darwin":
        sources = {"platform": _by_platform}
    elif torch_build == "hip":
        sources = {"kfd": _by_kfd, "nvidia-smi": _by_nvidia_smi, "nvml": _by_nvml}
    else:
        sources = {"nvidia-smi": _by_nvidia_smi, "nvml": _by_nvml, "kfd": _by_kfd}
    troubles: list[ToolFailed] = []
    for name, ask in sources.items():
        if name == "nvml" and any(isinstance(trouble, ToolTimedOut) for trouble in troubles):
            continue  # NVML would hang on the same driver, and here it cannot be killed
        try:
            gpus = ask()
        except ToolMissing:
            continue
        except ToolFailed as trouble:
            troubles.append(trouble)
            continue
        if gpus:
            return FoundGpus(gpus=gpus, seen_by=name, trouble="; ".join(map(str, troubles)))
    return FoundGpus(trouble="; ".join(map(str, troubles)))


def _by_nvml() -> tuple[Gpu, ...]:
    return tuple(gpu for gpu, _ in call_library(nvidia.cards_by_nvml, DRIVER_LIMIT_S, "NVML"))


def _by_nvidia_smi() -> tuple[Gpu, ...]:
    return tuple(gpu for gpu, _ in nvidia.cards_by_tool(DRIVER_LIMIT_S))


def _by_kfd() -> tuple[Gpu, ...]:
    return tuple(amd.cards_by_kfd())


def _by_platform() -> tuple[Gpu, ...]:
    """Return the GPU of an Apple chip. It shares the chip's memory."""
    if host.architecture() != "arm64":
        return ()
    name = host.cpu_model() or "Apple GPU"
    return (Gpu(name=name, vendor="apple", memory_bytes=host.memory_bytes()[0]),)


_MARK = "penstock-gpus:"
"""Prefix of the answer, because imports may print other text."""


def find_torch_gpus(limit_s: float) -> FoundGpus:
    """Return the GPUs that torch can use, from a child process that is killed after ``limit_s``.

    Under ``HSA_OVERRIDE_GFX_VERSION`` the architecture is the overridden one.
    """
    if not host.can_start_python():
        return FoundGpus(trouble="cannot list torch's GPUs: no Python interpreter can be started")
    try:
        gpus = _parse(run_tool(python_command(f"{__name__}:print_torch_gpus"), limit_s))
    except ToolTimedOut:
        return FoundGpus(trouble=f"torch did not list its GPUs within {limit_s:g} s")
    except ToolFailed as trouble:
        return FoundGpus(trouble=f"torch could not list its GPUs: {trouble}")
    return FoundGpus(gpus=gpus, seen_by="torch" if gpus else "nobody")


def _parse(text: str) -> tuple[Gpu, ...]:
    for line in text.splitlines():
        if line.startswith(_MARK):
            try:
                answer: Any = json.loads(line[len(_MARK) :])
                return tuple(Gpu(**gpu) for gpu in answer)
            except (ValueError, TypeError):
                break
    raise ToolFailed("the child printed no list of GPUs")


def print_torch_gpus() -> None:
    """Print torch's GPUs. Called in the child process of :func:`find_torch_gpus`."""
    import torch

    gpus = []
    is_hip = bool(getattr(torch.version, "hip", None))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        architecture: str | None = f"sm_{facts.major}{facts.minor}"
        if is_hip:
            architecture = getattr(facts, "gcnArchName", "").split(":")[0] or None
        gpu = Gpu(
            name=facts.name,
            vendor="amd" if is_hip else "nvidia",
            architecture=architecture,
            memory_bytes=int(facts.total_memory),
        )
        gpus.append(gpu)
    mps = getattr(torch.backends, "mps", None)
    if not gpus and mps is not None and mps.is_available():
        gpus.append(Gpu(name="Apple GPU", vendor="apple"))
    print(_MARK + json.dumps([gpu._asdict() for gpu in gpus]))
