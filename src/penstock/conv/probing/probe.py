"""Tests whether the convolution library of this machine works, and caches the result.

This process opens no GPU. The steps run in child processes (:mod:`penstock.conv.probing.child`)
that may crash or hang.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.conv import tuning
from penstock.conv.dispatcher_hook import default_devices
from penstock.conv.geometry import PASSES
from penstock.conv.probing.child import MARK
from penstock.conv.probing.remedies import (
    Remedy,
    RemedyTrial,
    best_of,
    remedies_for,
    try_remedy,
    wheels_hint,
)
from penstock.conv.probing.steps import KINDS, TYPES, ProbeStep, StepVerdict, all_steps
from penstock.errors import BadArgument
from penstock.machine import cache_folder
from penstock.machine.child_process import ChildProcess, python_command, signal_name
from penstock.machine.collect import machine
from penstock.machine.facts import Machine

MAX_LOST = 8
"""The probe stops after this many children have crashed or hung. Steps that have not run by then
count as broken."""
START_LIMIT_S = 120.0
"""Time limit for importing torch and opening the GPU."""
LIMITS_S = {"cpu": 20.0, "cuda": 90.0}
"""Time limit for one step. It is long on a GPU because MIOpen may compile a kernel first."""
_RELEVANT = ("HSA_", "MIOPEN_", "HIP_", "ROCR_", "CUDA_VISIBLE", "PYTORCH_", "DNNL_", "ONEDNN_")
_MARKS = {
    "right": "ok",
    "raises": "raises",
    "wrong": "WRONG",
    "crashes": "CRASH",
    "hangs": "HANGS",
    "absent": "-",
}


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Results of the probe on one device.

    Attributes:
        verdicts: One for each step.
        trials: The result of each remedy, if something is broken.
        about: The configuration that was probed: torch, runtime, driver, GPU and settings.
        vendor_caches: Folders where the vendor's library keeps compiled kernels. Delete them to
            make it compile again.
    """

    device: str
    verdicts: tuple[StepVerdict, ...]
    trials: tuple[RemedyTrial, ...] = ()
    about: tuple[str, ...] = ()
    took_s: float = 0.0
    vendor_caches: tuple[str, ...] = ()
    hint: str = ""

    @property
    def broken(self) -> frozenset[tuple[str, str, str, str]]:
        """Kind, dtype, layout and pass of every broken convolution."""
        return frozenset(
            verdict.step.key
            for verdict in self.verdicts
            if verdict.is_broken and verdict.step.kind != "batch norm"
        )

    @property
    def advice(self) -> str:
        """The line of code or shell that applies the fastest remedy that fixes everything."""
        if not any(verdict.is_broken for verdict in self.verdicts):
            return "nothing is broken; no change is needed"
        best = best_of(self.trials)
        if best is None:
            return "no remedy that was tried fixes everything; " + (self.hint or "train on the CPU")
        return f"{best.remedy.line}   ({best})"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["verdicts"] = [verdict.to_dict() for verdict in self.verdicts]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProbeResult:
        lists = {
            "verdicts": map(StepVerdict.from_dict, values["verdicts"]),
            "trials": map(RemedyTrial.from_dict, values["trials"]),
            "about": values["about"],
            "vendor_caches": values["vendor_caches"],
        }
        return cls(**{**values, **{name: tuple(items) for name, items in lists.items()}})


def probe(
    device: str | None = None,
    *,
    refresh: bool = False,
    limit_s: float | None = None,
    on_verdict: Callable[[StepVerdict], None] = lambda verdict: None,
) -> ProbeResult:
    """Test the convolutions and batch norm of this machine in child processes.

    The probe runs the forward pass, input gradient and weight gradient of plain, strided, dilated,
    grouped, depthwise, transposed, 1-d and 3-d convolutions and of batch norm, in three dtypes and
    two memory layouts. Each step is right or wrong, raises, crashes or hangs. This process opens no
    GPU. The result is cached for this torch, runtime, driver, GPU and settings. :func:`reset`
    deletes it.

    Args:
        device: ``"cuda"`` (also for ROCm) or ``"cpu"``. Defaults to the GPU if there is one.
        refresh: Ignore a cached result and run the probe again.
        limit_s: Time limit for one step. A step that takes longer counts as hanging.
        on_verdict: Called with the verdict of each step as it finishes.

    Example:
        >>> print(probe("cpu").advice)  # doctest: +SKIP
        nothing is broken; no change is needed
        >>> probe("abacus")
        Traceback (most recent call last):
        ...
        penstock.errors.BadArgument: [A01] device='abacus' must be 'cuda' or 'cpu' ...
    """
    device = device or default_devices()[0]
    if device not in LIMITS_S:
        raise BadArgument(
            f"device={device!r} must be 'cuda' or 'cpu'",
            remedy='penstock.conv.probe("cuda")',
        )
    here = machine()
    about = describe(here, device)
    name = f"conv-probe-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
    kept = None if refresh else cache_folder.read_json(name)
    if kept is not None:
        try:
            return ProbeResult.from_dict(kept)
        except Exception:  # corrupt, or written by a different version
            pass
    result = _try(device, here, about, limit_s or LIMITS_S[device], on_verdict)
    cache_folder.write_json(name, result.to_dict())
    return result


def _try(
    device: str,
    here: Machine,
    about: tuple[str, ...],
    limit_s: float,
    on_verdict: Callable[[StepVerdict], None],
) -> ProbeResult:
    started_s = time.monotonic()
    verdicts = run_steps(device, all_steps(), limit_s=limit_s, on_verdict=on_verdict)
    broken = [verdict.step for verdict in verdicts if verdict.is_broken]

    def run(remedy: Remedy) -> list[StepVerdict]:
        return run_steps(
            device, broken, limit_s=limit_s, setup=remedy.setup, environ=dict(remedy.environ)
        )

    remedies = remedies_for(here, device) if broken else []
    return ProbeResult(
        device=device,
        verdicts=tuple(verdicts),
        trials=tuple(try_remedy(remedy, broken, run) for remedy in remedies),
        about=about,
        took_s=time.monotonic() - started_s,
        vendor_caches=vendor_caches(here) if device == "cuda" else (),
        hint=wheels_hint(here) if broken else "",
    )


def reset() -> int:
    """Delete all probe results and all measured choices of algorithms.

    Returns the number of deleted files.

    Example:
        >>> isinstance(reset(), int)  # doctest: +SKIP
        True
    """
    tuning.forget()
    return cache_folder.remove("conv-*.json")


def describe(here: Machine, device: str) -> tuple[str, ...]:
    """Return the configuration that a result is valid for: versions, GPU, driver and settings."""
    if device == "cpu":
        cards = [here.cpu_model or here.architecture or "cpu"]
    else:
        cards = [f"{gpu.name} {gpu.architecture} driver {gpu.driver}" for gpu in here.gpus]
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_RELEVANT)
    ]
    runtime = getattr(torch.version, "hip", None) or torch.version.cuda or "none"
    return (f"torch {torch.__version__}", f"runtime {runtime}", device, *cards, *settings)


def vendor_caches(here: Machine) -> tuple[str, ...]:
    """Return the folders in which MIOpen caches kernels and tuning results."""
    if here.torch_build != "hip":
        return ()
    custom = [os.environ.get(n) for n in ("MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH")]
    usual = [str(Path.home() / ".cache" / "miopen"), str(Path.home() / ".config" / "miopen")]
    return tuple(name for name in (*custom, *usual) if name)


# -- child processes -------------------------------------------------------------------------------


def run_steps(
    device: str,
    steps: Sequence[ProbeStep],
    *,
    limit_s: float,
    setup: str = "",
    environ: Mapping[str, str] | None = None,
    on_verdict: Callable[[StepVerdict], None] = lambda verdict: None,
) -> list[StepVerdict]:
    """Run all steps. If a child crashes or hangs, a new child continues with the next step.

    Args:
        limit_s: Time limit for one step. A child that takes longer is killed.
        setup: What the child sets up first: ``"library off"``, ``"bypass"``, or ``""`` for nothing.
        environ: Added to the child's environment.
    """
    verdicts: list[StepVerdict] = []
    num_lost = 0
    while len(verdicts) < len(steps):
        rest = steps[len(verdicts) :]
        if num_lost >= MAX_LOST:
            note = f"not run: the probe stopped after {MAX_LOST} crashes or hangs"
            verdicts += [StepVerdict(step=step, word="crashes", note=note) for step in rest]
            break
        for verdict in _run_child(device, rest, limit_s, setup, environ or {}):
            verdicts.append(verdict)
            on_verdict(verdict)
            num_lost += verdict.word in ("crashes", "hangs")
    return verdicts


def _run_child(
    device: str, steps: Sequence[ProbeStep], limit_s: float, setup: str, environ: Mapping[str, str]
) -> list[StepVerdict]:
    """Run steps in one child. Returns verdicts up to the first crash or hang, at least one."""
    request = {
        "parent": os.getpid(),
        "device": device,
        "setup": setup,
        "steps": [(number, step.key) for number, step in enumerate(steps)],
    }
    verdicts: list[StepVerdict] = []
    with ChildProcess(
        python_command("penstock.conv.probing.child:main"),
        send=json.dumps(request).encode(),
        environ={"PENSTOCK_CONV": "off", **environ},
    ) as child:
        deadline_s = time.monotonic() + START_LIMIT_S
        while len(verdicts) < len(steps):
            step = steps[len(verdicts)]
            try:
                line = child.read_line(deadline_s - time.monotonic())
                exit_code = child.wait(START_LIMIT_S) if line is None else 0
            except TimeoutError:
                note = f"no result within {limit_s:g} s"
                return [*verdicts, StepVerdict(step=step, word="hangs", note=note)]
            if line is None:
                note = f"the process exited with code {exit_code}"
                if exit_code < 0:
                    note = f"killed by {signal_name(exit_code)}"
                return [*verdicts, StepVerdict(step=step, word="crashes", note=note)]
            if not line.startswith(MARK):
                continue
            word, number, values = json.loads(line[len(MARK) :])
            deadline_s = time.monotonic() + limit_s
            if word == "done":
                verdicts.append(StepVerdict(step=steps[number], **values))
    return verdicts


# -- the table -------------------------------------------------------------------------------------


def _lines(result: ProbeResult) -> list[str]:
    """Format a table: a row for each kind and pass, a column for each dtype.

    A cell names both layouts if their verdicts differ.
    """
    words = {verdict.step.key: verdict for verdict in result.verdicts}
    lines = [f"convolutions on {result.device} ({', '.join(result.about)})"]
    lines.append(f"  {'':28}" + "".join(f"{name:>24}" for name in TYPES))
    for kind in KINDS:
        for which in PASSES:
            cells = [_cell(words, kind, dtype, which) for dtype in TYPES]
            lines.append(f"  {kind + ', ' + which:28}" + "".join(f"{cell:>24}" for cell in cells))
    notes = Counter(
        f"{v.word}: {v.note.splitlines()[0][:110]}"
        for v in result.verdicts
        if v.note and v.is_broken
    )
    lines += [f"  {count} x {note}" for note, count in notes.most_common(5)]
    lines += [f"  tried: {trial}" for trial in result.trials]
    lines += [f"  kernel cache of the vendor library: {path}" for path in result.vendor_caches]
    lines += [f"  {result.hint}"] if result.hint else []
    lines.append(f"  advice: {result.advice}")
    return lines


def _cell(words: dict[Any, StepVerdict], kind: str, dtype: str, which: str) -> str:
    first = words[kind, dtype, "contiguous", which]
    last = words.get((kind, dtype, "channels_last", which), first)
    marks = _MARKS[first.word], _MARKS[last.word]
    return marks[0] if marks[0] == marks[1] else f"{marks[0]} / last {marks[1]}"
