"""Chooses the fastest algorithm for each shape, and caches the measurements for later runs.

On a GPU, the candidates for a shape are timed the first time it is seen, within a time budget for
the whole process. The result is written to a file for this torch, Triton and GPU. The first
candidate is used without measuring on the CPU, under ``torch.use_deterministic_algorithms``, while
a CUDA graph is captured, and when the budget is used up.

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from dataclasses import astuple
from typing import Any

import torch

from penstock.conv.algorithms import triton_launch
from penstock.conv.algorithms.candidates import Candidate, candidates
from penstock.conv.geometry import Geometry, Pass
from penstock.machine import cache_folder

BUDGET_VARIABLE = "PENSTOCK_CONV_TUNE_S"
DEFAULT_BUDGET_S = 60.0
"""For one process, including the compilation of kernels. This value is an estimate: an epoch on the
GPUs that need the bypass takes minutes."""
NUM_ROUNDS, NUM_TIMED = 3, 4

_files: dict[str, dict[str, str]] = {}
_dirty: set[str] = set()
_spent_s = 0.0


def choose(
    g: Geometry, which: Pass, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> tuple[Candidate, bool]:
    """Choose the algorithm for this pass.

    Returns the candidate, and whether the choice is final. A choice that is not final can be
    measured later.

    Args:
        a: First tensor of the call.
        b: Second tensor of the call.

    Example:
        >>> g = Geometry(batch=1, in_channels=4, out_channels=4, groups=1, in_size=(5, 5),
        ...              out_size=(5, 5), kernel=(3, 3), stride=(1, 1), padding=(1, 1),
        ...              dilation=(1, 1))
        >>> x, w = torch.zeros(1, 4, 5, 5), torch.zeros(4, 4, 3, 3)
        >>> choose(g, "forward", x, w, 1 << 20)[0].name
        'columns'
    """
    found = candidates(g, which, a.dtype, a.device.type)
    is_fixed = torch.are_deterministic_algorithms_enabled()
    if is_fixed or len(found) == 1 or not a.is_cuda:
        return found[0], True
    choices = _choices(_file_name(a.device))
    key = f"{which}|{a.dtype}|{cap_bytes}|{astuple(g)}"
    kept = [one for one in found if one.name == choices.get(key)]
    if kept:
        return kept[0], True
    if _spent_s >= budget_s():
        return found[0], True
    if torch.cuda.is_current_stream_capturing():
        return found[0], False
    best = _measure(g, a, b, cap_bytes, found)
    choices[key] = best.name
    if not _dirty:
        atexit.register(save)
    _dirty.add(_file_name(a.device))
    return best, True


def forget() -> None:
    """Discard the choices of this process and start with a new budget."""
    global _spent_s
    _files.clear()
    _dirty.clear()
    _spent_s = 0.0


def budget_s() -> float:
    """Return the seconds this process can spend on measuring: ``PENSTOCK_CONV_TUNE_S``, or 60."""
    try:
        return float(os.environ.get(BUDGET_VARIABLE, ""))
    except ValueError:
        return DEFAULT_BUDGET_S


def _measure(
    g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int, found: list[Candidate]
) -> Candidate:
    """Time every candidate and return the fastest. If all fail, returns the last."""
    global _spent_s
    started_s = time.perf_counter()
    best, best_ms = found[-1], float("inf")
    for candidate in found:
        try:
            taken_ms = time_once(candidate, g, a, b, cap_bytes)
        except Exception:  # out of memory, or a kernel that this GPU cannot run
            torch.cuda.empty_cache()
            continue
        if taken_ms < best_ms:
            best, best_ms = candidate, taken_ms
    _spent_s += time.perf_counter() - started_s
    return best


def time_once(
    candidate: Candidate, g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> float:
    """Return the milliseconds per call: GPU time, or launch time if that is longer.

    Several calls run back to back without waiting, as in training. Returns the best of several
    rounds.
    """
    candidate.run(g, a, b, cap_bytes)
    event: Any = torch.cuda.Event
    times = []
    for _ in range(NUM_ROUNDS):
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NUM_TIMED):
            candidate.run(g, a, b, cap_bytes)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / NUM_TIMED)
    return min(times)


# -- the file --------------------------------------------------------------------------------------


def _file_name(device: torch.device) -> str:
    about = "|".join(
        (
            torch.__version__,
            torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            str(getattr(torch.version, "hip", None) or torch.version.cuda),
            "triton" if triton_launch.is_available() else "no triton",
        )
    )
    return f"conv-choices-{hashlib.sha256(about.encode()).hexdigest()[:12]}.json"


def _choices(name: str) -> dict[str, str]:
    """Return the choices in a file, which is read once per process."""
    if name not in _files:
        content = cache_folder.read_json(name)
        _files[name] = _plain(content)
    return _files[name]


def _plain(content: Any) -> dict[str, str]:
    """Return the valid choices in the content of a file, which can be anything."""
    items = content.items() if isinstance(content, dict) else ()
    return {key: value for key, value in items if isinstance(value, str)}


def save() -> None:
    """Write the measured choices. Called when Python exits."""
    for name in sorted(_dirty):
        before = cache_folder.read_json(name)  # another process may have measured other shapes
        merged = {**_plain(before), **_files[name]}
        cache_folder.write_json(name, merged)
    _dirty.clear()
