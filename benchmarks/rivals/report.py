"""Tables from answers, and docs/peers.md from a result file.

Needs only the standard library, because a test renders the page again and compares it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS = "penstock"
MIN_TURNS = 3
"""With fewer turns, ratios are unreliable. On a busy machine, one run (2 turns) gave a ratio of
0.91 for a pair, and the next run (1 turn) 0.36."""


def summarise(table: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a table for JSON: samples, median and spread of each contender, or its text."""
    found = []
    for row in rows:
        answers = [turn[min(table.job, len(turn) - 1)] for turn in row["answers"]]
        found.append({"contender": row["contender"], "peer": row["peer"], **_entry(table, answers)})
    kept = [row for row in found if row.get("no") != "not its business"]
    if table.value is not None:
        best = sorted((row for row in kept if "median" in row), key=lambda row: row["median"])
        ranked = best if table.is_less_better else best[::-1]
        kept = [*ranked, *(row for row in kept if "median" not in row)]
    return {
        "key": table.key,
        "title": table.title,
        "unit": table.unit,
        "is_less_better": table.is_less_better,
        "rows": kept,
    }


def _entry(table: Any, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for answer in answers:
        if "no" in answer or "failed" in answer:
            return {key: answer[key] for key in ("no", "failed") if key in answer}
    if table.value is None:
        return dict(answers[-1])
    samples = [
        round(float(sum(answer[value] for value in table.value.split("+"))), 4)
        for answer in answers
    ]
    entry = {
        "median": statistics.median(samples),
        "low": min(samples),
        "high": max(samples),
        "samples": samples,
    }
    used = [answer["cpu_us"] for answer in answers if "cpu_us" in answer]
    if used and table.value == "samples_per_s":
        entry["cpu_us"] = round(statistics.median(used), 2)
    return entry


def find_best(table: dict[str, Any], is_ours: bool) -> dict[str, Any] | None:
    """Return the best row of Penstock or of the peers. Rows are sorted."""
    for row in table["rows"]:
        if "median" in row and (row["peer"] == OURS) == is_ours:
            found: dict[str, Any] = row
            return found
    return None


def compare(table: dict[str, Any]) -> tuple[float, str] | None:
    """Return the ratio of Penstock to the best peer, over pairs of turns, and a verdict."""
    ours, theirs = find_best(table, True), find_best(table, False)
    if ours is None or theirs is None:
        return None
    pairs = zip(ours["samples"], theirs["samples"], strict=False)
    ratios = [b / a if table["is_less_better"] else a / b for a, b in pairs if a and b]
    ratio = statistics.median(ratios)
    if len(ratios) < MIN_TURNS:
        return ratio, "too few turns"
    if min(ratios) < 1 < max(ratios) and not 0.97 < ratio < 1.03:
        return ratio, "unclear: each side wins some turns"
    return ratio, "level" if 0.97 < ratio < 1.03 else "ahead" if ratio > 1 else "behind"


def format_number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:,.{digits}f}"


def _cells(row: dict[str, Any], is_words: bool) -> list[str]:
    if "median" in row:
        spread = f"{format_number(row['low'])} to {format_number(row['high'])}"
        used = f"; {format_number(row['cpu_us'])} μs of CPU" if "cpu_us" in row else ""
        return [format_number(row["median"]), spread + used]
    if "no" in row:
        return ["no", row["no"]]
    if "failed" in row:
        return ["no" if is_words else "does not run", row["failed"]]
    seconds = f" ({format_number(row['seconds'])} s)" if "seconds" in row else ""
    return ["yes" if row["is_yes"] else "no", row["says"] + seconds]


def print_table(table: dict[str, Any]) -> None:
    unit = f" ({table['unit']})" if table["unit"] else ""
    print(f"\n{table['title']}{unit}")
    for row in table["rows"]:
        first, second = _cells(row, not table["unit"])
        print(f"  {row['contender']:40s} {first:>12s}   {second}")
    found = compare(table)
    if found:
        print(f"  Ratio of Penstock to the best peer: {found[0]:.2f} ({found[1]})")


INTRODUCTION = """\
`benchmarks/peers.py` generates this page. Do not edit it. Run the command of a table to update it.
[The results file]({link}) has every sample.

{machine}{note}

Each row is a fresh process in its own environment. All environments use the same torch. The
libraries take turns, and the order is reversed each time. A figure is the median of its turns,
followed by the lowest and the highest. Rates also have the CPU time of all processes per sample.
This time is coarse, because a window of a second or two has few batches. A ratio above 1 means
that Penstock is better. Settings are those that the documentation of each library recommends, as
far as we know. Libraries without their own decoder use the fastest hand-written combination,
simplejpeg and OpenCV, and the consumer converts bytes to floats. *Antialiased* means the triangle
filter of Pillow and torchvision for Penstock, PyTorch's recipes and DALI. For FFCV and the
hand-written code it means OpenCV's area filter. A difference of less than 10% may be chance.
Only PyTorch and Penstock also run with 0 workers. Penstock's packed tensors are read without any.
With 8 workers, the conversion to floats in the consumer limits the libraries that need it. A
program that trains on a GPU converts there instead.
"""


def render(files: Mapping[str, dict[str, Any]]) -> str:
    """Return the page as Markdown.

    Args:
        files: Content of result files by file name. The first one is shown in full, the others with
            their wins and losses.
    """
    (file_name, content), *others = files.items()
    text = [
        f"<!-- from benchmarks/results/: {', '.join(files)} -->",
        "# Comparison with other libraries",
        "",
    ]
    text += [
        INTRODUCTION.format(
            note=f" {content['note']}" if content.get("note") else "",
            link=f"../benchmarks/results/{file_name}",
            machine=_machine(content),
        )
    ]
    text += ["## Wins and losses", "", *_verdicts(content["tables"]), ""]
    for name, other in others:
        text += [*_elsewhere(name, other), ""]
    for table in content["tables"]:
        text += [f"## {table['title']}", "", _when(table["asked"]), "", *_markdown(table), ""]
    text += ["## Versions", "", *_versions(content["peers"]), ""]
    return "\n".join(text)


def _machine(content: dict[str, Any]) -> str:
    machine = content["machine"]
    return (
        f"{machine['cpu']}, {machine['usable_cores']} usable cores, "
        f"{machine['memory_gib']} GiB, {machine['os']}."
    )


def _elsewhere(file_name: str, content: dict[str, Any]) -> list[str]:
    """Return the wins and losses on a different machine."""
    machine, tables = content["machine"], content["tables"]
    lines = _verdicts(tables)
    measured = [" measured peers |", "---|"]
    for table in tables:
        names = [row["contender"] for row in table["rows"] if "median" in row]
        others = [name for name in names if not name.startswith("Penstock")]
        measured.append(f" {'; '.join(others)} |")
    about = f"{machine['architecture'].replace('_', '-')}, {machine['usable_cores']} cores"
    commands = dict.fromkeys(_when(table["asked"]) for table in tables)
    are_shared = all("--here" in command for command in commands)
    environments = "One environment for all." if are_shared else "An environment for each library."
    return [
        f"## Wins and losses on {about}",
        "",
        f"{_machine(content)} [All samples](../benchmarks/results/{file_name}). "
        f"torch {content['peers']['torch']['versions']['torch']}. {environments}",
        "",
        *(line + more for line, more in zip(lines, measured, strict=True)),
        "",
        *(f"- {command}" for command in commands),
    ]


def _when(asked: dict[str, Any]) -> str:
    turns = f"{asked['turns']} turn{'s' if asked['turns'] > 1 else ''} each"
    return f"`{asked['command']}` on {asked['date']}, {turns}. {asked['note']}".strip()


def _verdicts(tables: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| measurement | Penstock | best peer | ratio | result |", "|---|---|---|---|---|"]
    for table in tables:
        ours, theirs, found = find_best(table, True), find_best(table, False), compare(table)
        if ours and theirs and found:
            mine, other = (f"{format_number(r['median'])} {table['unit']}" for r in (ours, theirs))
            their_name = f"{other} ({theirs['contender']})"
            word = f"**{found[1]}**" if found[1] == "behind" else found[1]
            lines.append(f"| {table['title']} | {mine} | {their_name} | {found[0]:.2f} | {word} |")
        elif not table["unit"]:
            lines.append(_in_words(table))
    return lines


def _in_words(table: dict[str, Any]) -> str:
    able = [row["contender"] for row in table["rows"] if row.get("is_yes")]
    ours = [row for row in table["rows"] if row["peer"] == OURS and "is_yes" in row]
    others = [name for name in able if not name.startswith("Penstock")]
    mine = "yes" if any(row["is_yes"] for row in ours) else "no"
    word = "level" if others and mine == "yes" else "ahead" if mine == "yes" else "**behind**"
    return f"| {table['title']} | {mine} | {', '.join(others) or 'none'} | | {word} |"


def _markdown(table: dict[str, Any]) -> list[str]:
    heads = (table["unit"], "spread") if table["unit"] else ("", "")
    lines = [f"| | {heads[0]} | {heads[1]} |", f"|---|{'---:' if table['unit'] else '---'}|---|"]
    for row in table["rows"]:
        name = f"**{row['contender']}**" if row["peer"] == OURS else row["contender"]
        lines.append(
            "| " + " | ".join([name, *_cells(row, not table["unit"])]).replace("\n", " ") + " |"
        )
    return lines


def _versions(peers: dict[str, Any]) -> list[str]:
    lines = ["| | |", "|---|---|"]
    for peer in peers.values():
        told = ", ".join(f"{name} {number}" for name, number in peer["versions"].items())
        lines.append(f"| {peer['title']} | {peer['trouble'] or told} |")
    return lines
