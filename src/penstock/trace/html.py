"""HTML renderer of the timeline: one self-contained page with data, script and style.

Names come from the user's code and can contain any text. They are written as JSON inside a script
element that is never executed, with every ``<`` escaped, and are drawn as text on a canvas. The
page's content security policy forbids all requests. ``page.html`` is the template.

Called by :class:`penstock.Timeline` and the report of ``penstock bench``.
"""

from __future__ import annotations

import html
import json
from functools import cache
from pathlib import Path
from typing import Any

from penstock.trace.diagnosis import Diagnosis
from penstock.trace.model import WORDS, Lane, Reading, TraceModel

KINDS = tuple(WORDS)
_DATA = "__PENSTOCK_DATA__"
MAX_READINGS = 20_000
"""Maximum number of points in a curve. A screen has far fewer columns."""


def render(model: TraceModel, verdict: Diagnosis) -> str:
    """Return the page as HTML."""
    return _template().replace(_DATA, _as_script_text(make_data(model, verdict)))


def frame(page: str, height: int = 460) -> str:
    """Return a sandboxed ``iframe`` that shows the page inside another page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0" title="Penstock timeline"></iframe>'
    )


@cache
def _template() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _as_script_text(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_data(model: TraceModel, verdict: Diagnosis) -> dict[str, Any]:
    """Return the data that the page draws, in columns."""
    names: dict[str, int] = {"": 0}
    lanes = [_lane(lane, names) for lane in model.lanes]
    return {
        "kinds": list(KINDS),
        "words": list(WORDS.values()),
        "names": list(names),
        "lanes": lanes,
        "total": model.total_ns,
        "ready": _curve(model.ready),
        "facts": {key: str(value) for key, value in model.facts.items()},
        "notes": model.notes,
        "verdict": vars(verdict),
    }


def _lane(lane: Lane, names: dict[str, int]) -> dict[str, Any]:
    spans = lane.spans
    numbers = {kind: number for number, kind in enumerate(KINDS)}
    return {
        "name": lane.name,
        "role": lane.role,
        "pids": lane.pids,
        "lost": lane.num_lost,
        "start": [span.start_ns for span in spans],
        "took": [max(0, span.took_ns) for span in spans],
        "kind": [numbers[span.kind] for span in spans],
        "depth": [span.depth for span in spans],
        "label": [names.setdefault(span.name, len(names)) for span in spans],
        "pass": [span.pass_ for span in spans],
        "batch": [span.batch for span in spans],
        "part": [span.part for span in spans],
        "rows": [span.rows for span in spans],
        "open": [number for number, span in enumerate(spans) if span.is_open],
        "memory": _curve(lane.memory),
    }


def _curve(readings: list[Reading]) -> list[list[float]]:
    step = max(1, len(readings) // MAX_READINGS)
    return [[reading.at_ns, reading.value] for reading in readings[::step]]
