"""Terminal renderer of the timeline: one row per lane, as wide as the window, with gaps for waits.

worker 0   ▕█████████████      ██████████████▏
main       ▕░░░░░░░░░░░░░▓▓▓▓▓▓▓▓░░░░▓▓▓▓▓▓▓▓▏
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, Group
from rich.text import Text

from penstock.trace.model import Lane, Span, TraceModel


class Style(NamedTuple):
    """Appearance of a kind of span. The character identifies it without color."""

    character: str
    colour: str
    legend: str = ""


STYLES = {
    "fetch": Style("█", "blue", "load"),
    "collate": Style("▓", "magenta", "collate"),
    "step": Style("█", "green", "your step"),
    "stall": Style("░", "red", "wait"),
    "transfer": Style("▓", "cyan", "to device"),
    "deliver": Style("▒", "yellow", "assemble"),
    "launch": Style("▒", "bright_black", "start-up"),
    "gpu": Style("█", "green", "GPU busy"),
    "user": Style("▒", "white", "your spans"),
    "copy": Style("▓", "cyan"),
    "sample": Style("▒", "blue"),
    "transform": Style("▒", "magenta"),
    "network": Style("░", "yellow"),
    "download": Style("▒", "yellow", "downloads"),
}
"""Kinds with a legend text are listed below the drawing, in this order."""
MAX_LANES = 24
"""With more workers than this, only the first and last few are shown."""
LITTLE, LEAST = "·", 0.01
"""Character of a column that is mostly a gap, and the smallest share of a column that is shown."""
_DARK = " ▁▂▃▄▅▆▇█"


def render(
    model: TraceModel, width: int, *, first_s: float = 0.0, last_s: float | None = None
) -> Group:
    """Return the drawing of a part of the run, as a rich renderable.

    Args:
        width: In characters.
        first_s, last_s: Start and end of the part, in seconds since the trace began.
    """
    first_ns = int(first_s * 1e9)
    last_ns = model.total_ns if last_s is None else int(last_s * 1e9)
    lanes, num_hidden = _shown_lanes(model)
    label = min(max([8, *(len(lane.name) for lane in lanes)]), max(8, width // 4))
    columns = max(10, width - label - 3)
    if last_ns <= first_ns:
        return Group(Text("The time range is empty: nothing to draw."))
    lines: list[Text] = []
    seen: set[str] = set()
    has_little = False
    for place, lane in enumerate(lanes):
        if num_hidden and place == MAX_LANES // 2:
            lines.append(Text(f"{'':>{label}} … {num_hidden} more workers …", style="dim"))
        spans = lane.spans if lane.role == "user" else lane.top()
        row = paint(spans, first_ns, last_ns, columns)
        seen.update(cell.kind for cell in row if not cell.is_little)
        has_little = has_little or any(cell.is_little for cell in row)
        lines.append(_line(lane.name, row, label))
    ready = _ready_line(model, first_ns, last_ns, columns)
    if ready is not None:
        lines.append(Text(f"{'ready':>{label}} ") + ready)
    lines.append(_scale(first_ns, last_ns, label, columns))
    lines += _legend(seen, has_little, label, width)
    return Group(*lines)


_ASCII = str.maketrans("█▓▒░▕▏▁▂▃▄▅▆▇…·", "#%=.||_.:-=+*~'")


def print_run(console: Console, drawing: Group, words: str, *, soft_wrap: bool = False) -> None:
    """Print a drawing and the text below it.

    Uses ASCII if the console's encoding has no block characters. That is the case for a pipe on
    Windows and with ``LC_ALL=C``, where printing must not fail.
    """
    can_draw = True
    try:
        "".join([*_DARK, "░▒▓▕▏…·"]).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        can_draw = False
    for line in drawing.renderables:
        if not can_draw and isinstance(line, Text):
            line.plain = _replaced(line.plain.translate(_ASCII), console.encoding)
        console.print(line, soft_wrap=True)
    words = _replaced(words, console.encoding)
    console.print(words, highlight=False, markup=False, soft_wrap=soft_wrap)


def _replaced(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding, "replace")


def _shown_lanes(model: TraceModel) -> tuple[list[Lane], int]:
    """Return the lanes to draw, workers first, and the number of workers left out."""
    lanes = [lane for lane in model.lanes if lane.spans]
    workers = [lane for lane in lanes if lane.role == "worker"]
    num_hidden = max(0, len(workers) - MAX_LANES)
    if num_hidden:
        workers = [*workers[: MAX_LANES // 2], *workers[-MAX_LANES // 2 :]]
    return [*workers, *(lane for lane in lanes if lane.role != "worker")], num_hidden


class Cell(NamedTuple):
    """Content of a column: the kind with the largest share, and whether most of it is a gap."""

    kind: str = ""
    is_little: bool = False


def paint(spans: Sequence[Span], first_ns: int, last_ns: int, columns: int) -> list[Cell]:
    """Return the content of each column. An empty column has an empty kind.

    Example:
        >>> [cell.kind for cell in paint([Span("fetch", "", 0, 50)], 0, 100, 4)]
        ['fetch', 'fetch', '', '']
    """
    width_ns = (last_ns - first_ns) / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        start, end = max(span.start_ns, first_ns), min(span.end_ns, last_ns)
        if end <= start:
            continue
        left, right = (start - first_ns) / width_ns, (end - first_ns) / width_ns
        for column in range(int(left), min(columns, int(right) + 1)):
            part = min(right, column + 1) - max(left, column)
            if part > 0:
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + part
    found = []
    for share in shares:
        kind, most = max(share.items(), key=lambda item: item[1], default=("", 0.0))
        gap = max(0.0, 1.0 - sum(share.values()))
        found.append(Cell(kind, most <= gap * 0.999) if most > LEAST else Cell())
    neighbours = zip([Cell(), *found], [*found[1:], Cell()])  # noqa: B905 (the first has one more)
    return [  # no dot for the edge of a span that the next column draws
        Cell() if cell.is_little and Cell(cell.kind) in pair else cell
        for cell, pair in zip(found, neighbours, strict=True)
    ]


def _line(name: str, row: list[Cell], label: int) -> Text:
    text = Text(f"{name[:label]:>{label}} ")
    text.append("▕", style="dim")
    for cell in row:
        style = STYLES.get(cell.kind, Style(" ", ""))
        text.append(LITTLE if cell.is_little else style.character, style=style.colour)
    text.append("▏", style="dim")
    return text


def _ready_line(model: TraceModel, first_ns: int, last_ns: int, columns: int) -> Text | None:
    readings = [reading for reading in model.ready if first_ns <= reading.at_ns <= last_ns]
    most = max((reading.value for reading in readings), default=0)
    if not most:
        return None
    sums, counts = [0.0] * columns, [0] * columns
    for at_ns, value in readings:
        column = min(columns - 1, int((at_ns - first_ns) / (last_ns - first_ns) * columns))
        sums[column] += value
        counts[column] += 1
    text = " "
    last = 0.0
    for total, count in zip(sums, counts, strict=True):
        last = total / count if count else last
        text += _DARK[round(last / most * (len(_DARK) - 1))]
    return Text(f"{text}  max {most:.0f}"[: columns + 2], style="bright_black")


def _scale(first_ns: int, last_ns: int, label: int, columns: int) -> Text:
    total_s = (last_ns - first_ns) * 1e-9
    marks = max(1, min(8, columns // 16))
    text = [" "] * (columns + 10)
    for mark in range(marks + 1):
        at = f"{first_ns * 1e-9 + total_s * mark / marks:.{_digits(total_s)}f} s"
        place = columns * mark // marks
        place = min(place, columns - len(at) + 1) if mark else 0
        text[place : place + len(at)] = at
    return Text(f"{'':>{label}}  {''.join(text).rstrip()}", style="dim")


def _digits(total_s: float) -> int:
    return 0 if total_s >= 50 else 1 if total_s >= 5 else 2 if total_s >= 0.5 else 4


def _legend(seen: set[str], has_little: bool, label: int, width: int) -> list[Text]:
    margin = " " * (label + 2)
    lines = [Text(margin)]
    shown = [style for kind, style in STYLES.items() if style.legend and kind in seen]
    if has_little:
        shown.append(Style(LITTLE, "", "very short"))
    for style in shown:
        if len(lines[-1]) + len(style.legend) + 3 > width and len(lines[-1]) > len(margin):
            lines.append(Text(margin))
        lines[-1].append(style.character * 2, style=style.colour)
        lines[-1].append(f" {style.legend}   ")
    for line in lines:
        line.rstrip()
    return lines


def draw(model: TraceModel, width: int, *, colour: bool = False) -> str:
    """Return the drawing as text. With ``colour``, it contains ANSI escape sequences."""
    console = Console(
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        console.print(render(model, width), soft_wrap=True)
    return capture.get()
