"""Draws the README's picture: the timeline of a real run in which a worker is killed.

    python tools/site/readme_picture.py docs/images/run.svg

The run uses the demo's images, two workers, and a small network as the training step. Everything in
the picture was recorded. The sentence below it is the verdict of that run.
"""

from __future__ import annotations

import html
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.cli.demo_images import KINDS, GeneratedImages

NUM_IMAGES, BATCH, KILL_AT, NUM_SKIPPED = 640, 16, 20, 8
LEFT, WIDTH, ROW, BAR = 76, 980, 30, 20
NAMES = {
    "fetch": "load samples",
    "step": "training step",
    "stall": "training waits",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #444 }
.fetch { fill: #3b7dd8 } .step { fill: #3a9d5d } .stall { fill: #d8503b }
.lane { fill: #8882 } .killed { stroke: #d8503b; stroke-width: 2 } .told { font-weight: 600 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


def train() -> penstock.Timeline:
    """Run one epoch, and kill a worker in the middle of it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 5, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)
    )
    with tempfile.TemporaryDirectory() as folder:
        images = GeneratedImages(Path(folder), NUM_IMAGES)
        loader = penstock.DataLoader(images, BATCH, shuffle=True, seed=0, num_workers=2, trace=True)
        batches = iter(loader)
        first, _ = next(batches)
        model(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, (pixels, kinds) in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(model(pixels), kinds % len(KINDS))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == KILL_AT:
                os.kill(batches._workers[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return loader.timeline()


def draw(timeline: penstock.Timeline) -> str:
    model = timeline.model
    (main,) = model.of("main")
    steps = [span for span in main.spans if span.kind == "step"]
    first, last = steps[NUM_SKIPPED].start_ns, model.total_ns
    per_ns = (WIDTH - LEFT - 10) / (last - first)

    def x(time_ns: int) -> float:
        return round(LEFT + (max(time_ns, first) - first) * per_ns, 1)

    lanes = [*sorted(model.of("worker"), key=lambda lane: lane.number), main]
    out = [f'<rect class="lane" x="{LEFT}" y="{ROW * n + 8}" width="{WIDTH - LEFT - 10}" '
           f'height="{BAR}"/>' for n in range(len(lanes))]  # fmt: skip
    for number, lane in enumerate(lanes):
        top = ROW * number + 8
        title = "training" if lane is main else lane.name
        out.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{title}</text>')
        for span in lane.spans:
            if span.kind in NAMES and span.depth == 0 and span.end_ns > first:
                wide = max(x(span.end_ns) - x(span.start_ns), 0.4)
                out.append(_bar(span.kind, x(span.start_ns), top, round(wide, 1)))
            if span.is_open and span.kind == "fetch":
                at = x(span.end_ns)
                line = f'x1="{at}" x2="{at}" y1="{top - 4}" y2="{top + BAR + 4}"'
                out.append(f'<line class="killed" {line}/>')
    return _page(out, len(lanes), (last - first) / 1e9, timeline.verdict.sentence)


def _bar(kind: str, left: float, top: float, wide: float) -> str:
    return f'<rect class="{kind}" x="{left}" y="{top}" width="{wide}" height="{BAR}"/>'


def _page(shapes: list[Any], num_lanes: int, total_s: float, told: str) -> str:
    bottom = ROW * num_lanes + 24
    left = LEFT
    legend = []
    for kind, name in NAMES.items():
        legend.append(f'<rect class="{kind}" x="{left}" y="{bottom}" width="12" height="12"/>')
        legend.append(f'<text x="{left + 17}" y="{bottom + 11}">{name}</text>')
        left += 34 + 7 * len(name)
    legend.append(
        f'<line class="killed" x1="{left}" x2="{left}" y1="{bottom}" y2="{bottom + 13}"/>'
    )
    gone = "kill -9: a new worker takes over, and the batches stay the same"
    legend.append(f'<text x="{left + 8}" y="{bottom + 11}">{gone}</text>')
    end = f'<text x="{WIDTH - 10}" y="{bottom + 11}" text-anchor="end">{total_s:.2f} s</text>'
    legend.append(end)
    legend.append(f'<text class="told" x="{LEFT}" y="{bottom + 34}">{html.escape(told)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, *legend, "</svg>", ""])


if __name__ == "__main__":
    logging.getLogger("penstock").setLevel(logging.ERROR)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "run.svg")
    out.write_text(draw(train()), encoding="utf-8")
    print(out)
