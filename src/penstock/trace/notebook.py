"""Display of a loader in a notebook: its plan, its bottleneck and its timeline.

The HTML is self-contained. Text from the user's code is escaped, and the timeline is a page of its
own in a sandboxed frame (:mod:`penstock.trace.html`). Called by ``DataLoader._repr_html_``.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from penstock.planning.plan import label
from penstock.trace.metrics import WINDOW_S
from penstock.trace.recorder import Recorder
from penstock.trace.timeline import Timeline

if TYPE_CHECKING:
    from penstock.planning.plan import Plan


def show_loader(dataset: str, plan: Plan, recorder: Recorder | None) -> str:
    """Return the display of a loader. The timeline covers the last 30 seconds of loading."""
    lines, frame = [f"<strong>DataLoader of {escape(dataset)}</strong>"], ""
    if recorder is not None:  # it was iterated
        timeline = Timeline(_last_part(recorder.records()))
        lines.append(escape(timeline.verdict.sentence))
        if timeline.verdict.remedy:
            lines.append(f"Try: <code>{escape(timeline.verdict.remedy)}</code>")
        frame = timeline._repr_html_() if timeline.num_batches else ""
    lines += [f"Warning: {escape(text)}" for text in plan.warnings]
    lines += [f"Note: {escape(text)}" for text in plan.notes]
    rows = "".join(
        f"<tr><th>{label(name)}</th><td>{escape(str(choice.value))}</td>"
        f"<td>{choice.source}</td><td>{escape(choice.reason)}</td></tr>"
        for name, choice in plan.choices.items()
    )
    table = f"<details><summary>Plan</summary><table>{rows}</table></details>"
    return f"<div>{'<br>'.join(lines)}{table}{frame}</div>"


def _last_part(records: dict[str, Any]) -> dict[str, Any]:
    """Return the records of the last 30 seconds of loading."""
    ends_ns = [one.end_ns for lane in records["lanes"] for one in lane["spans"]]
    since_ns = max(ends_ns, default=0) - int(WINDOW_S * 1e9)
    lanes = [
        {**lane, "spans": [one for one in lane["spans"] if one.end_ns >= since_ns]}
        for lane in records["lanes"]
    ]
    return {**records, "lanes": lanes}
