"""Steps of the probe: one for each kind of convolution, dtype, layout and pass.

Steps are plain data. The parent sends a list of steps to a child and reads a verdict for each.

Tested by ``tests/faults/conv/probing/test_probe.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conv.geometry import PASSES

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"kernel": 3, "padding": 1},
    "strided": {"kernel": 3, "padding": 1, "stride": 2},
    "dilated": {"kernel": 3, "padding": 2, "dilation": 2},
    "grouped": {"kernel": 3, "padding": 1, "groups": 4},
    "depthwise": {"kernel": 3, "padding": 1, "groups": 16},
    "transposed": {"kernel": 3, "padding": 1, "stride": 2, "is_transposed": True},
    "1-d": {"kernel": 5, "padding": 2, "num_dims": 1},
    "3-d": {"kernel": 3, "padding": 1, "num_dims": 3},
    "batch norm": {},
}
TYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("contiguous", "channels_last")
TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""In units of the sum of absolute products. float32 may be computed in TF32, whose eps is 1e-3. A
broken result is typically off by its own magnitude."""


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """One kind of convolution in one dtype, layout and pass."""

    kind: str
    dtype: str
    layout: str
    which: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.dtype, self.layout, self.which

    @classmethod
    def from_key(cls, key: Sequence[str]) -> ProbeStep:
        kind, dtype, layout, which = key
        return cls(kind=kind, dtype=dtype, layout=layout, which=which)

    def __str__(self) -> str:
        return ", ".join(self.key)


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """The result of a step.

    Args:
        word: ``"right"``, ``"raises"``, ``"wrong"``, ``"crashes"``, ``"hangs"``, or ``"absent"`` if
            torch has no kernel for the dtype, which does not count as broken.
        note: The exception's message, the size of the error, or the signal.
        ms: Time of a call after warm-up, if the result was right.
    """

    step: ProbeStep
    word: str
    note: str = ""
    ms: float = 0.0

    @property
    def is_broken(self) -> bool:
        return self.word not in ("right", "absent")

    def to_dict(self) -> dict[str, Any]:
        return {"step": list(self.step.key), "word": self.word, "note": self.note, "ms": self.ms}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepVerdict:
        step = ProbeStep.from_key(values["step"])
        return cls(step=step, word=values["word"], note=values["note"], ms=values["ms"])


def all_steps() -> list[ProbeStep]:
    """Return all steps, with the forward passes of all kinds first.

    Example:
        >>> len(all_steps())
        153
    """
    return [
        ProbeStep(kind=kind, dtype=dtype, layout=layout, which=which)
        for which in PASSES
        for kind in KINDS
        for dtype in TYPES
        for layout in LAYOUTS
        if not (kind == "1-d" and layout == "channels_last")  # channels_last needs 2 or 3 axes
    ]
