"""Chooses the fastest algorithm for each shape, and caches the measurements for later runs.

On a GPU, a shape starts with an algorithm that needs no compilation: the choice of a similar shape,
or the first candidate. From its second call on, its kernels are compiled in children, and its
candidates are timed between the calls of training steps, one call at a time, and for at most
:data:`SHARE` of the time. The time of a call is read when the shape comes up again, so timing does
not wait for the GPU. Only the check of torch's own kernels does. The fastest candidate is then
used, and written to a file for this torch, Triton and GPU. The first one is used without measuring
on the CPU, under ``torch.use_deterministic_algorithms``, and when the time budget of the process is
used up. Nothing is measured while a CUDA graph is captured.

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import math
import os
import statistics
import time
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from penstock.conv import kernel_compiler
from penstock.conv.algorithms import aten, triton_launch
from penstock.conv.algorithms.candidates import Candidate, candidates
from penstock.conv.geometry import Geometry, Pass, Prepared
from penstock.machine import cache_folder

BUDGET_VARIABLE = "PENSTOCK_CONV_TUNE_S"
DEFAULT_BUDGET_S = 60.0
"""For one process, including the compilation of kernels. This value is an estimate: an epoch on the
GPUs that need the bypass takes minutes."""
NUM_ROUNDS = 8
FLUSH_BYTES = 64 << 20
"""More than the caches of common GPUs. An H200 has 60 MB."""
MAX_FLUSHES = 16
TOLERANCE = 1 / 16
"""Difference between two right results in a half type, relative to the largest element. float32 has
a sixteenth of it, because its products may be computed in TF32. A broken result is off by its own
magnitude."""

UNKNOWN_MS = 1.0
"""What the first call of a candidate is taken to cost until the GPU has computed it."""
GPU_SLACK, SLACK = 0.25, 1.0
"""A candidate is not timed any further if it takes longer than the best by these parts of its time,
divided by the number of calls: its GPU time alone, and its GPU time and launch time."""
SHARE, CREDIT_S = 0.05, 0.002
"""The share of the time that measuring can take, and the most seconds that it can save up. Steps of
a network that gains little from other algorithms must not take longer than with torch's own. Time
of the GPU only counts if it was busy when the call was launched."""
MAX_SHAPES = 4096
"""The number of shapes that are kept, of those in measurement and of those in a file. The oldest is
dropped for a new one. Inputs of random lengths have a new shape in every step."""
in_background = True
"""If False, a shape is measured at once when it is first seen. Benchmarks set this."""

_files: dict[str, dict[str, str]] = {}
_dirty: set[str] = set()
_spent_s = 0.0
_credit_s = float("inf")
_seen_s = 0.0
_unfinished: dict[Any, Trial] = {}
_similar: dict[Any, str] = {}
"""The last choice for each class of similar shapes."""


@dataclass
class Trial:
    """The measurements of one shape.

    Args:
        left: Candidates that have not been timed yet.
        best: The fastest candidate so far, or the one to start with.
        timing: The calls of the candidate that is being timed.
    """

    left: list[Candidate]
    best: Candidate
    best_ms: float = float("inf")
    kernels: dict[str, list[kernel_compiler.Job]] = field(default_factory=dict)
    timing: Timing | None = None


def choose(
    g: Geometry, which: Pass, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> tuple[Candidate, bool]:
    """Choose the algorithm for this pass.

    Returns the candidate, and whether the choice is final. If it is not, this should be called
    again when there is :func:`time <has_time>` for another measurement.

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
    if not a.is_cuda or torch.are_deterministic_algorithms_enabled():
        return candidates(g, which, a.dtype, a.device.type)[0], True
    key = (g, which, a.dtype, a.device, cap_bytes, a.stride(), b.stride())
    trial = _unfinished.pop(key, None)
    is_new = trial is None
    if trial is None:
        found = candidates(g, which, a.dtype, a.device.type)
        choices = _choices(_file_name(a.device))
        name = choices.get(_text(*key[:5]))
        kept = [one for one in found if one.name == name or len(found) == 1]
        if kept or _spent_s >= budget_s():
            return (kept or found)[0], True
        if torch.cuda.is_current_stream_capturing():
            return found[0], False
        trial = Trial(found, found[0])
        _start(trial, g, which, a, b, cap_bytes)
    if _spent_s >= budget_s():
        return trial.best, True
    _unfinished[key] = trial  # the last one used is dropped last
    _drop_oldest(_unfinished)
    if is_new and in_background:
        return trial.best, False
    if torch.cuda.is_current_stream_capturing():
        return trial.best, False
    if in_background:
        if has_time():
            _continue(trial, g, a, b, cap_bytes)
    else:
        while trial.left:
            torch.cuda.synchronize(a.device)
            if not _continue(trial, g, a, b, cap_bytes):
                time.sleep(0.01)
    if trial.left:
        return trial.best, False
    _unfinished.pop(key, None)
    file = _file_name(a.device)
    _choices(file)[_text(*key[:5])] = _similar[_class_of(g, which, a.dtype)] = trial.best.name
    if not _dirty:
        atexit.register(save)
    _dirty.add(file)
    return trial.best, True


def _text(
    g: Geometry, which: Pass, dtype: torch.dtype, device: torch.device, cap_bytes: int
) -> str:
    """Return the key of a shape in the file."""
    return f"{which}|{dtype}|{cap_bytes}|{astuple(g)}"


def _drop_oldest(kept: dict[Any, Any]) -> None:
    """Keep the last :data:`MAX_SHAPES` items of a dictionary."""
    num = len(kept) - MAX_SHAPES
    for key in [*kept][:num] if num > 0 else ():
        kept.pop(key, None)  # another thread may have done so


def num_unfinished() -> int:
    """Return the number of shapes that have been seen and are not measured yet."""
    return len(_unfinished)


def _class_of(g: Geometry, which: Pass, dtype: torch.dtype) -> Any:
    """Return what similar shapes have in common."""
    sizes = [n.bit_length() for n in (g.group_in, g.group_out, g.batch * g.num_positions)]
    return which, dtype, g.kernel, g.stride, g.dilation, g.is_channels_last, g.is_depthwise, *sizes


def _start(
    trial: Trial, g: Geometry, which: Pass, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> None:
    """Start with the choice of a similar shape, or else with a candidate without kernels.

    What is slow once is done here, because the first training step is slow anyway.
    """
    if any(one.name == aten.NAME for one in trial.left):
        with contextlib.suppress(Exception):  # out of memory
            _load_comparison(a.device)
    if any(one.needs_triton for one in trial.left):
        kernel_compiler.is_set_up()
    similar = _similar.get(_class_of(g, which, a.dtype))
    for one in sorted(trial.left, key=lambda one: one.name != similar):
        with contextlib.suppress(Exception):  # out of memory
            if not one.needs_triton or (
                one.name == similar
                and _can_request(trial, one)
                and not _kernels(trial, one, g, a, b, cap_bytes)
            ):
                trial.best = one
                return


def _kernels(
    trial: Trial, one: Candidate, g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> list[kernel_compiler.Job]:
    """Return the kernels that a candidate lacks, and have them compiled."""
    trial.kernels[one.name] = []
    needed = kernel_compiler.capture(lambda: one.run(g, a, b, cap_bytes))
    for kernel in needed:
        kernel_compiler.request(kernel)
    trial.kernels[one.name] = needed
    return needed


def has_time() -> bool:
    """Return True if measuring has taken less than its share of the time.

    Example:
        >>> has_time()
        True
    """
    global _credit_s, _seen_s
    now_s = time.perf_counter()
    _credit_s, _seen_s = min(CREDIT_S, _credit_s + SHARE * (now_s - _seen_s)), now_s
    return _credit_s > 0


def _charge(seconds: float, *, counts: bool = True) -> None:
    """Add to the time spent. ``counts`` is False if it does not delay the training step."""
    global _spent_s, _credit_s
    _spent_s, _credit_s = _spent_s + seconds, _credit_s - seconds * counts


def _continue(trial: Trial, g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int) -> bool:
    """Request kernels, or call a candidate once. Returns False if there is nothing to do yet."""
    started_s = time.perf_counter()
    is_gpu_busy = not torch.cuda.current_stream(a.device).query()
    one, timing = None, trial.timing
    try:
        if timing is not None:
            one = timing.candidate
            if not timing.read():
                return False
            if not timing.is_over(trial.best_ms):
                timing.start(a, b, is_gpu_busy=is_gpu_busy)
                return True
            if timing.ms < trial.best_ms:
                trial.best, trial.best_ms = one, timing.ms
            trial.left.remove(one)
            trial.timing = None
        for one in trial.left:
            if _can_request(trial, one):
                _kernels(trial, one, g, a, b, cap_bytes)
                return True
        one = next((one for one in trial.left if _is_ready(trial, one)), None)
        if one is None:
            return not trial.left
        is_doubtful = one.name == aten.NAME != trial.best.name
        if is_doubtful and not _agrees(one, trial.best, g, a, b, cap_bytes):
            trial.left.remove(one)  # torch's own kernels are wrong
        else:
            expected_ms = min(trial.best_ms, UNKNOWN_MS)
            trial.timing = Timing(one, one.prepare(g, a, b, cap_bytes), expected_ms)
            trial.timing.start(a, b, is_gpu_busy=is_gpu_busy)
    except Exception:  # out of memory, or a kernel that this GPU cannot run
        torch.cuda.empty_cache()
        trial.left = [other for other in trial.left if other is not one]
        trial.timing = None
    finally:
        _charge(time.perf_counter() - started_s)
    return True


def _can_request(trial: Trial, one: Candidate) -> bool:
    return one.needs_triton and one.name not in trial.kernels and kernel_compiler.is_set_up()


def _is_ready(trial: Trial, one: Candidate) -> bool:
    kernels = trial.kernels.get(one.name)
    if kernels is None:
        return not one.needs_triton
    return all(map(kernel_compiler.is_compiled, kernels))


def forget_measurements() -> None:
    """Discard the measurements that are not complete."""
    _unfinished.clear()


def forget() -> None:
    """Discard the choices of this process and start with a new budget."""
    global _spent_s, _credit_s
    for kept in (_files, _dirty, _unfinished, _similar):
        kept.clear()
    _spent_s, _credit_s = 0.0, float("inf")


def budget_s() -> float:
    """Return the seconds this process can spend on measuring: ``PENSTOCK_CONV_TUNE_S``, or 60."""
    try:
        return float(os.environ.get(BUDGET_VARIABLE, ""))
    except ValueError:
        return DEFAULT_BUDGET_S


def _agrees(
    one: Candidate, other: Candidate, g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int
) -> bool:
    """Return True if two candidates give the same result, within the rounding of the dtype."""
    first, second = (way.run(g, a, b, cap_bytes) for way in (one, other))
    return _is_close(first, second)


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two results agree. Nothing is known from zeros, infinities and NaNs."""
    tolerance = TOLERANCE if first.element_size() == 2 else TOLERANCE / 16
    first, second = first.float(), second.float()
    extremes = (map(float, t.aminmax()) for t in (second, first - second))
    largest, off = (max(-low, high) for low, high in extremes)
    return 0 < largest < math.inf and off <= largest * tolerance


@functools.cache
def _load_comparison(device: torch.device) -> None:
    """Compare two zeros. This loads torch's kernels for that, which takes 20 ms on an H200."""
    _is_close(torch.zeros(1, device=device), torch.zeros(1, device=device))


class Timing:
    """The times of a candidate: its best GPU time and its median launch time, which are added.

    A training step is bound by the one or the other, and which of them is not known here.
    The caches of the GPU are overwritten before each call, because a training step does so too.
    This is repeated until it takes longer than the launches, so that the GPU time has no gaps
    between kernels.
    """

    def __init__(self, candidate: Candidate, run: Prepared, expected_ms: float) -> None:
        self.candidate = candidate
        self._run = run
        self._expected_ms = expected_ms
        self._num_calls = 0
        self._num_flushes = 1
        self._gpu_ms = self._last_ms = float("inf")
        self._launches_ms: list[float] = []
        self._counts = True
        event: Any = torch.cuda.Event
        self._events = [event(enable_timing=True) for _ in range(3)]

    @property
    def ms(self) -> float:
        return self._gpu_ms + statistics.median(self._launches_ms)

    def is_over(self, best_ms: float) -> bool:
        """Return True after enough calls, or if the candidate is slower than the best."""
        num = len(self._launches_ms)
        if not num:
            return False
        is_slow = self._gpu_ms > (1 + GPU_SLACK / num) * best_ms
        least_ms = self._gpu_ms + min(self._launches_ms)
        return is_slow or least_ms > (1 + SLACK / num) * best_ms or num >= NUM_ROUNDS

    def start(self, a: torch.Tensor, b: torch.Tensor, *, is_gpu_busy: bool) -> None:
        """Launch a call."""
        self._counts = is_gpu_busy
        before, start, end = self._events
        other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=a.device)
        before.record()
        for _ in range(self._num_flushes):
            other.zero_()
        start.record()
        started_s = time.perf_counter()
        self._run(a, b)
        self._last_ms = (time.perf_counter() - started_s) * 1e3
        end.record()
        _charge(self._expected_ms / 1e3, counts=self._counts)

    def read(self) -> bool:
        """Read the times of the last call. Returns False if the GPU has not finished it."""
        before, start, end = self._events
        if not end.query():
            return False
        taken_ms = before.elapsed_time(end)
        _charge((taken_ms - self._expected_ms) / 1e3, counts=self._counts)
        self._expected_ms = taken_ms
        self._num_calls += 1
        if self._num_calls > 1:  # the first call may load kernels
            self._gpu_ms = min(self._gpu_ms, float(start.elapsed_time(end)))
            self._launches_ms.append(self._last_ms)
            flush_ms = before.elapsed_time(start) / self._num_flushes
            wanted = min(MAX_FLUSHES, 1 + int(2 * self._last_ms / flush_ms))
            self._num_flushes = max(self._num_flushes, wanted)
        return True


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
        _drop_oldest(merged)
        cache_folder.write_json(name, merged)
    _dirty.clear()
