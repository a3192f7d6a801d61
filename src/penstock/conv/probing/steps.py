"""Steps of the probe: one for each kind of convolution, type, layout and pass.

A step is data: the parent sends a list of them to a child and reads back a verdict on each.
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
"""In units of the sum of absolute products. float32 may be TF32, whose eps is 1e-3; what is broken
is off by its own size."""


@dataclass(frozen=True, kw_only=True)
class ProbeStep:
    """One kind of convolution in one type, layout and pass."""

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
        word: ``"right"``, ``"raises"``, ``"wrong"``, ``"crashes"`` or ``"hangs"``; or ``"absent"``
            where torch has no kernel for the type, which counts as not broken.
        note: The exception's text, how far off, or the signal.
        ms: How long it took once warm, where it was right.
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
    """Everything there is to try, forward passes of all kinds first.

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
        if not (kind == "1-d" and layout == "channels_last")  # there is no such layout
    ]
