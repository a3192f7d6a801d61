"""Does the convolution library work here? Found out once, in child processes, and kept."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.conv import cache_folder as folder
from penstock.conv.probing.remedies import (
    Rung,
    Trial,
    best_of,
    climb,
    rungs_for,
    wheels_hint,
)
from penstock.conv.probing.runner import run_steps
from penstock.conv.probing.steps import KINDS, PASSES, TYPES, Verdict, all_steps
from penstock.errors import BadArgument
from penstock.machine.collect import machine
from penstock.machine.facts import Machine

LIMITS_S = {"cpu": 20.0, "cuda": 90.0}
"""For one step. Long on a GPU: MIOpen may compile a kernel the first time."""
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
class Findings:
    """What the probe found on one device.

    Attributes:
        verdicts: One for each step.
        trials: What became of each rung of the ladder, where something was broken.
        about: What the result holds for: torch, runtime, driver, card and settings.
        vendor_caches: Where the vendor's library keeps compiled kernels; deleting them makes it
            compile anew.
    """

    device: str
    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...] = ()
    about: tuple[str, ...] = ()
    took_s: float = 0.0
    vendor_caches: tuple[str, ...] = ()
    hint: str = ""

    @property
    def broken(self) -> frozenset[tuple[str, str, str, str]]:
        """Kind, type, layout and pass of every convolution that is not right."""
        return frozenset(
            verdict.step.key
            for verdict in self.verdicts
            if verdict.is_broken and verdict.step.kind != "batch norm"
        )

    @property
    def advice(self) -> str:
        """The fastest rung that gets right what is broken, as a line to write."""
        if not any(verdict.is_broken for verdict in self.verdicts):
            return "nothing is broken: leave convolutions to torch"
        best = best_of(self.trials)
        if best is None:
            return "no rung that was tried gets everything right; " + (
                self.hint or "train on the CPU"
            )
        return f"{best.rung.line}   ({best})"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["verdicts"] = [verdict.to_dict() for verdict in self.verdicts]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Findings:
        trials = tuple(
            Trial(**{**trial, "rung": Rung(**{**trial["rung"], "environ": tuple(
                (name, value) for name, value in trial["rung"]["environ"])})})
            for trial in values["trials"]
        )  # fmt: skip
        return cls(
            device=values["device"],
            verdicts=tuple(Verdict.from_dict(verdict) for verdict in values["verdicts"]),
            trials=trials,
            about=tuple(values["about"]),
            took_s=values["took_s"],
            vendor_caches=tuple(values["vendor_caches"]),
            hint=values["hint"],
        )


def probe(
    device: str | None = None,
    *,
    refresh: bool = False,
    limit_s: float | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Findings:
    """Try convolutions and batch norm of this machine in child processes.

    Forward, input gradient and weight gradient of plain, strided, dilated, grouped, depthwise,
    transposed, 1-d and 3-d convolution and of batch norm, in three types and two layouts: is each
    right, does it raise, is it wrong, does it crash or hang? This process opens no GPU. The result
    is kept for this torch, runtime, driver, card and settings; :func:`reset` forgets it.

    Args:
        device: ``"cuda"`` (also ROCm's name) or ``"cpu"``; by default the GPU if there is one.
        refresh: Try again although a result is kept.
        limit_s: For one step; what takes longer hangs.
        on_verdict: Told of each step as it is done.

    Example:
        >>> print(probe("cpu").advice)  # doctest: +SKIP
        nothing is broken: leave convolutions to torch
        >>> probe("abacus")
        Traceback (most recent call last):
        ...
        penstock.errors.BadArgument: BadArgument [A01]: device='abacus' is not known; ...
    """
    if device is None:
        from penstock.conv.bypass import default_devices

        device = default_devices()[0]
    if device not in LIMITS_S:
        raise BadArgument(
            f"device={device!r} is not known; there are 'cuda' and 'cpu'",
            remedy='penstock.conv.probe("cuda")',
        )
    here = machine()
    about = describe(here, device)
    name = f"conv-probe-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"
    kept = None if refresh else folder.read_json(name)
    if kept is not None:
        try:
            return Findings.from_dict(kept)
        except (KeyError, TypeError, ValueError):
            pass  # written by another version: try again
    findings = _try(device, here, about, limit_s or LIMITS_S[device], on_verdict)
    folder.write_json(name, findings.to_dict())
    return findings


def _try(
    device: str,
    here: Machine,
    about: tuple[str, ...],
    limit_s: float,
    on_verdict: Callable[[Verdict], None],
) -> Findings:
    started_s = time.monotonic()
    verdicts = run_steps(device, all_steps(), limit_s=limit_s, on_verdict=on_verdict)
    broken = [verdict.step for verdict in verdicts if verdict.is_broken]
    trials: list[Trial] = []
    if broken:

        def run(rung: Rung) -> list[Verdict]:
            return run_steps(
                device, broken, limit_s=limit_s, rung=rung.setup, environ=dict(rung.environ)
            )

        trials = climb(rungs_for(here, device), broken, run)
    return Findings(
        device=device,
        verdicts=tuple(verdicts),
        trials=tuple(trials),
        about=about,
        took_s=time.monotonic() - started_s,
        vendor_caches=vendor_caches(here) if device == "cuda" else (),
        hint=wheels_hint(here) if broken else "",
    )


def reset() -> int:
    """Forget every probe's result and every measured choice of an algorithm; how many files.

    Example:
        >>> isinstance(reset(), int)  # doctest: +SKIP
        True
    """
    from penstock.conv import tuning

    tuning.forget()
    return folder.remove("conv-*.json")


def describe(here: Machine, device: str) -> tuple[str, ...]:
    """What a result holds for; another card, driver or setting is tried anew."""
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
    """The folders in which MIOpen keeps kernels and settings that it has found."""
    if here.torch_build != "hip":
        return ()
    told = [os.environ.get(n) for n in ("MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_USER_DB_PATH")]
    usual = [str(Path.home() / ".cache" / "miopen"), str(Path.home() / ".config" / "miopen")]
    return tuple(name for name in (*told, *usual) if name)


# -- the table -------------------------------------------------------------------------------------


def _lines(findings: Findings) -> list[str]:
    """A row for each kind and pass, a column for each type; layouts that differ are named."""
    words = {verdict.step.key: verdict for verdict in findings.verdicts}
    lines = [f"convolutions on {findings.device} ({', '.join(findings.about)})"]
    lines.append(f"  {'':28}" + "".join(f"{name:>24}" for name in TYPES))
    for kind in KINDS:
        for which in PASSES:
            cells = [_cell(words, kind, dtype, which) for dtype in TYPES]
            lines.append(f"  {kind + ', ' + which:28}" + "".join(f"{cell:>24}" for cell in cells))
    notes = Counter(
        f"{v.word}: {v.note.splitlines()[0][:110]}"
        for v in findings.verdicts
        if v.note and v.is_broken
    )
    lines += [f"  {count} x {note}" for note, count in notes.most_common(5)]
    lines += [f"  tried: {trial}" for trial in findings.trials]
    lines += [f"  kernels of the vendor are kept in {path}" for path in findings.vendor_caches]
    lines += [f"  {findings.hint}"] if findings.hint else []
    lines.append(f"  advice: {findings.advice}")
    return lines


def _cell(words: dict[Any, Verdict], kind: str, dtype: str, which: str) -> str:
    first = words[kind, dtype, "contiguous", which]
    last = words.get((kind, dtype, "channels_last", which), first)
    marks = _MARKS[first.word], _MARKS[last.word]
    return marks[0] if marks[0] == marks[1] else f"{marks[0]} / last {marks[1]}"
