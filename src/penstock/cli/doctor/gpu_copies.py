"""``penstock doctor --gpu``: measures copies to each GPU from three kinds of memory.

    pageable    ordinary memory, which the driver first copies to an internal buffer
    pinned      torch's pinned memory
    registered  shared memory like Penstock's slots, page-locked after allocation

The copies run in a child process, so a driver that hangs or crashes affects only the child.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from penstock.cli.child_check import CheckResults, run_check
from penstock.machine.facts import Gpu
from penstock.machine.pcie import PcieLink, pcie_link
from penstock.planning.plan import Problem

COPY_BYTES = 64 << 20
WARM_UPS, MAX_COPIES, MAX_S = 3, 20, 0.3
"""Limits per kind of memory. On an H200 machine, a copy takes 1 to 5 ms."""
MAX_GPUS = 16
IMAGE_VALUES = 3 * 224 * 224
_KINDS = {
    "pageable": "from ordinary memory",
    "pinned": "from pinned memory",
    "registered": "from Penstock's slots",
}


def measure_copies(
    gpus: tuple[Gpu, ...], limit_s: float, *, check: str = f"{__name__}:check_copies"
) -> dict[str, Any]:
    """Measure copies to all GPUs in a child process. Returns ``gpus`` and ``failure``.

    Args:
        gpus: The GPUs that torch can use.
        check: The function to call in the child.
    """
    if not any(gpu.vendor in ("nvidia", "amd") for gpu in gpus):
        apple = any(gpu.vendor == "apple" for gpu in gpus)
        why = "Apple GPUs share memory with the CPU" if apple else "torch cannot use any"
        return {"gpus": [], "failure": f"no GPU to copy to: {why}"}
    results = run_check(check, {"command": "doctor", "target": "--gpu", "timeout": limit_s})
    failure = results["failure"]
    return {"gpus": results.get("gpus", []), "failure": failure and failure["what"]}


def copy_rows(copies: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the measurements as rows of the report. One row if nothing was measured."""
    for gpu in copies["gpus"]:
        link = PcieLink(**gpu["link"]) if gpu["link"] else "unknown"
        yield f"cuda:{gpu['index']}", f"{gpu['name']}; link: {link}"
        rates = [
            f"{rate / 1e9:.3g} GB/s {_KINDS[kind]}"
            for kind, rate in gpu["bytes_per_s"].items()
            if rate
        ]
        yield "copies", ", ".join(rates) or "all failed"
        yield "slots", _pinning(gpu)
        rates_by_kind = gpu["bytes_per_s"]
        best = next(filter(None, map(rates_by_kind.get, ("registered", "pinned", "pageable"))), 0)
        if best:
            yield (
                "feeds",
                f"{best / IMAGE_VALUES:,.0f} images/s of 224 x 224 as uint8, "
                f"{best / IMAGE_VALUES / 4:,.0f} as float32",
            )
    if copies["failure"]:
        yield "not measured", copies["failure"]


def _pinning(gpu: Mapping[str, Any]) -> str:
    if gpu["bytes_per_s"]["registered"] is None:
        return f"cannot be pinned ({gpu['trouble']}), so batches use torch's pinned buffers"
    seen = "" if gpu["is_pinned"] else ", but torch does not detect it"
    return f"can be pinned{seen}; fence before reuse: {gpu['fence']}"


def copy_problems(copies: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems in the measurements."""
    for gpu in copies["gpus"]:
        name = f"cuda:{gpu['index']} ({gpu['name']})"
        link = PcieLink(**gpu["link"]) if gpu["link"] else PcieLink()
        if link.width and link.max_width and link.width < link.max_width:
            yield Problem(
                code="narrow-link",
                severity="slow",
                what=f"{name} uses {link.width} of its {link.max_width} PCIe lanes",
                why="copies are slower by the same factor. The slot may be narrow, or another card "
                "shares the lanes",
                cure="",
            )
        if gpu["bytes_per_s"]["registered"] is None:
            yield Problem(
                code="slots-not-pinned",
                severity="slow",
                what=f"{name}: batch memory cannot be pinned: {gpu['trouble']}",
                why="each batch needs an extra copy before it is sent to the GPU",
                cure="ulimit -l unlimited",
            )
    if copies["failure"] and not str(copies["failure"]).startswith("no GPU to copy to"):
        yield Problem(
            code="gpu-copies",
            severity="harm",
            what=f"copies to the GPUs could not be measured: {copies['failure']}",
            why="training would fail in the same way",
            cure="penstock doctor --gpu --timeout 300",
        )


# -- in the child ----------------------------------------------------------------------------------


def check_copies(results: CheckResults, options: dict[str, Any], deadline: float) -> None:
    """Measure copies to all GPUs. Runs in the child process."""
    results.doing("importing torch")
    import torch

    gpus: list[dict[str, Any]] = []
    for index in range(min(MAX_GPUS, torch.cuda.device_count())):
        gpus.append(measure_gpu(index, torch.device("cuda", index), results.doing))
        results.save(gpus=gpus)


def measure_gpu(index: int, target: Any, doing: Callable[[str], None]) -> dict[str, Any]:
    """Measure copies to one GPU. Returns plain values. An unavailable kind of memory is None.

    Args:
        target: The device to copy to.
        doing: Called with each next step, which is reported if the child hangs or crashes.
    """
    import torch

    from penstock.device.cuda_runtime import CudaRuntime
    from penstock.device.fences import choose_fence

    runtime = CudaRuntime(index)
    rates: dict[str, float | None] = {"pageable": None, "pinned": None, "registered": None}
    with torch.cuda.device(index):
        doing(f"opening GPU {index}")
        properties = torch.cuda.get_device_properties(index)
        there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=target)
        source = torch.ones(COPY_BYTES, dtype=torch.uint8)
        doing(f"copying ordinary memory to GPU {index}")
        rates["pageable"] = _bytes_per_s(source, there)
        doing(f"copying pinned memory to GPU {index}")
        with suppress(RuntimeError):  # raised if locked memory is limited
            rates["pinned"] = _bytes_per_s(source.pin_memory(), there)
        doing(f"copying registered shared memory to GPU {index}")
        rates["registered"], is_pinned = _registered_rate(runtime, there)
        bus_id = bus_id_of(properties, index)
        link = None if bus_id is None else pcie_link(bus_id)  # read before the link powers down
    return {
        "index": index,
        "name": properties.name,
        "bus_id": bus_id,
        "link": None if link is None else asdict(link),
        "bytes_per_s": rates,
        "is_pinned": is_pinned,
        "trouble": runtime.error,
        "fence": choose_fence(runtime).name,
    }


def _registered_rate(runtime: Any, there: Any) -> tuple[float | None, bool]:
    """Measure copies from memory that is registered like :mod:`penstock.device.pinning` does."""
    import numpy as np
    import torch

    from penstock.engine.memory.shared_file import SharedFile

    file = SharedFile.create()
    memory = np.frombuffer(file.map(file.grow(COPY_BYTES), COPY_BYTES), dtype=np.uint8)
    memory[:] = 1  # allocates the pages now, not while the memory is registered
    if not runtime.register(memory.ctypes.data, memory.nbytes):
        return None, False
    try:
        source = torch.from_numpy(memory)
        return _bytes_per_s(source, there), _is_pinned(source)
    finally:
        runtime.unregister(memory.ctypes.data)


def _is_pinned(tensor: Any) -> bool:
    try:
        return bool(tensor.is_pinned())
    except RuntimeError:
        return False


def _bytes_per_s(source: Any, there: Any) -> float:
    """Return the median rate of several copies, with a synchronization after each."""
    import torch

    def copy_s() -> float:
        start_s = time.perf_counter()
        there.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    torch.cuda.synchronize()
    for _ in range(WARM_UPS):
        copy_s()
    times_s: list[float] = []
    while len(times_s) < MAX_COPIES and sum(times_s) < MAX_S:
        times_s.append(copy_s())
    return float(source.numel() / max(statistics.median(times_s), 1e-9))


def bus_id_of(properties: Any, index: int) -> str | None:
    """Return the PCI address of the GPU with torch's number ``index``, or None if unknown."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in numbers:
        domain, bus, device = numbers
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return _bus_id_by_driver(index)


def _bus_id_by_driver(index: int) -> str | None:
    """Return the PCI address from the driver. Older torch versions do not provide it."""
    import ctypes

    for library, question in (
        ("libcuda.so.1", "cuDeviceGetPCIBusId"),
        ("libamdhip64.so", "hipDeviceGetPCIBusId"),
        ("nvcuda.dll", "cuDeviceGetPCIBusId"),
    ):
        text = ctypes.create_string_buffer(32)
        with suppress(OSError, AttributeError):
            if getattr(ctypes.CDLL(library), question)(text, 32, index) == 0:
                return text.value.decode("ascii").lower()
    return None
