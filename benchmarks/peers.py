"""Compares Penstock with other loaders on this machine.

    .venv-vision/bin/python benchmarks/peers.py --save my-laptop --page   # all of it, 20 minutes
    python benchmarks/peers.py --only numbers,kill --contenders torch,penstock --here --quick

Builds an environment for each peer on top of this interpreter's torch (see rivals/environments.py),
writes the same data in the format of each peer, measures them in turns in fresh processes, and
writes results/peers-NAME.json. --page generates docs/peers.md from it. If a peer does not install,
does not run, or lacks a feature, its row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from front import _count, _name
from penstock.cli.loader_timing import take_turns
from penstock.machine.collect import machine
from record import RESULTS, describe_machine, save, today
from rivals.data import TINY, Sizes, make_data
from rivals.environments import PEERS, Environment, build
from rivals.plan import GROUPS, Group
from rivals.report import print_table, render, summarise
from rivals.running import Session, run_turn

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "peers.md"
PACE = {"warm_up_s": 0.4, "window_s": 1.5}
QUICK = {"warm_up_s": 0.05, "window_s": 0.15}
IN_PLAIN = ("torch", "torchvision", "numpy", "simplejpeg", "opencv-python-headless", "pillow")


class Field:
    """All participants: environments, contenders, and prepared data."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sizes = TINY if options.quick else Sizes().for_workers(options.workers)
        kind = "full" if self.sizes == Sizes() else f"full-{self.sizes.jpeg}"
        self.home: Path = options.home / ("quick" if options.quick else kind)
        self.pace = dict(QUICK if options.quick else PACE)
        if options.window:
            self.pace["window_s"] = options.window
        self.rows: list[str] = options.rows
        self.are_kept: bool = options.keep
        self.sessions: dict[str, Session] = {}
        self.num_workers: int = options.workers
        self.peers: dict[str, dict[str, Any]] = {}
        names: list[str] = options.contenders
        here = Environment(python=sys.executable)
        found = {name: here if options.here else build(name, options.home) for name in names}
        self.pythons = {name: environment.python for name, environment in found.items()}
        with ThreadPoolExecutor(max(2, machine().usable_cores // 2)) as pool:
            for name, told in zip(names, pool.map(self._meet, names, found.values()), strict=True):
                self.peers[name] = told
                print(f"{told['title']}: {told['trouble'] or ', '.join(told['contenders'])}")

    def _meet(self, name: str, found: Environment) -> dict[str, Any]:
        """Return the contenders and versions in an environment, or its error."""
        peer, told = PEERS[name], {"failed": found.trouble}
        if found.trouble is None:
            packages = [*peer.packages, *peer.bare, *IN_PLAIN]
            order = {"describe": {"module": peer.module, "packages": packages}}
            (told,) = self.run(name, [order], 120)
        contenders = told.get("contenders", {})
        if self.rows:
            contenders = {row: contenders[row] for row in self.rows if row in contenders}
        return {
            "title": peer.title,
            "trouble": told.get("failed"),
            "versions": told.get("versions", {}),
            "contenders": contenders,
        }

    def run(self, name: str, orders: list[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
        source = REPO / "src" if name == "penstock" else None
        return run_turn(self.pythons[name], orders, limit_s, source)

    def start(
        self, name: str, contender: str, orders: list[Any], limit_s: float
    ) -> Callable[[], list[dict[str, Any]]]:
        """Return the function that runs one turn of a contender."""
        if not self.are_kept:
            return partial(self.run, name, orders, limit_s)
        if contender not in self.sessions:
            source = REPO / "src" if name == "penstock" else None
            self.sessions[contender] = Session(self.pythons[name], source)
        return partial(self.sessions[contender].run, orders, limit_s)

    def prepare(self, name: str, contender: str, group: Group) -> dict[str, Any] | None:
        """Prepare a contender for its turns. Returns an answer only if it cannot take part."""
        has_format = group.kind in self.peers[name]["contenders"][contender]["formats"]
        for question in (("prepare",) if has_format else ()) + (group.before or ()):
            orders = self.orders(name, contender, group, question)
            (told,) = self.run(name, orders[:1], 400)
            if "failed" in told or "no" in told:
                return told
        return None

    def orders(self, name: str, contender: str, group: Group, question: str) -> list[Any]:
        folder = "".join(letter if letter.isalnum() else "-" for letter in contender)
        base = {
            "kind": group.kind,
            "data": str(self.home / "data"),
            "home": str(self.home / "formats" / folder),
            "count": group.count(self.sizes),
            "batch_size": min(group.batch_size, group.count(self.sizes) // 4),
            "num_workers": self.num_workers,
        }
        jobs = group.jobs[:1] if question == "prepare" else group.jobs
        return [
            {
                "module": PEERS[name].module,
                "contender": contender,
                "question": question,
                "pace": self.pace,
                "job": {**base, **job},
            }
            for job in jobs
        ]


def ask(field: Field, group: Group, num_turns: int) -> list[dict[str, Any]]:
    """Run all turns of the contenders that can load this. Returns a row for every peer."""
    make_data(field.home / "data", field.sizes, {group.kind})
    turns, rows = {}, {}
    for name, peer in field.peers.items():
        if peer["trouble"]:
            rows[peer["title"]] = {"peer": name, "answers": [[{"failed": peer["trouble"]}]]}
        for contender, about in peer["contenders"].items():
            if group.kind not in about["kinds"] or (group.is_few and "0 workers" in contender):
                continue
            trouble = field.prepare(name, contender, group)
            rows[contender] = {"peer": name, "answers": [[trouble]] if trouble else []}
            if not trouble:
                orders = field.orders(name, contender, group, group.question)
                turns[contender] = field.start(name, contender, orders, group.limit_s)
        if not peer["trouble"] and not any(row["peer"] == name for row in rows.values()):
            reason = "not measured in this run" if field.rows else about_missing(group)
            rows[peer["title"]] = {"peer": name, "answers": [[{"no": reason}]]}
    for contender, answers in take_turns(turns, num_turns, _say).items():
        rows[contender]["answers"] = answers
    return [{"contender": contender, **row} for contender, row in rows.items()]


def about_missing(group: Group) -> str:
    if group.kind == "strings":
        return "not asked: it has threads, which share the list, or reads its own format"
    if group.kind == "numbers":
        return "no samples from Python: it reads its own format"
    return "no such path in this benchmark"


def _say(name: str) -> None:
    print(f"  {name}", end="\033[K\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/peers.py", description=__doc__)
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-peers"
    parser.add_argument("--only", type=partial(_some, GROUPS), default=[*GROUPS])
    parser.add_argument("--contenders", type=partial(_some, PEERS), default=[*PEERS])
    parser.add_argument("--rows", type=_names, default=[], help="only these rows, separated by ;")
    parser.add_argument("--home", type=Path, default=default, help="environments and data")
    parser.add_argument("--here", action="store_true", help="use this interpreter, build nothing")
    parser.add_argument("--workers", type=_count, default=2, help="processes or threads")
    parser.add_argument("--repeats", type=_count, help="turns of each contender (default 3)")
    parser.add_argument("--window", type=float, metavar="S", help="seconds of a rate (default 1.5)")
    parser.add_argument("--quick", action="store_true", help="smoke test with tiny sizes")
    parser.add_argument("--save", type=_name, metavar="NAME", help="write results/peers-NAME.json")
    parser.add_argument("--page", action="store_true", help="write docs/peers.md from the results")
    parser.add_argument(
        "--render",
        metavar="FILE,...",
        help="only write docs/peers.md, with the first of these files of results/ in full",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="one process for all turns of a contender; only rates",
    )
    parser.add_argument("--note", default="", help="for example, what else was running")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def _some(known: dict[str, Any], text: str) -> list[str]:
    keys = [key.strip() for key in text.split(",")]
    for key in keys:
        if key not in known:
            raise argparse.ArgumentTypeError(f"{key!r} is not one of {', '.join(known)}")
    return keys


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.render:
        _write_page(options.render.split(","))
        return 0
    field = Field(options)
    repeats = options.repeats or (1 if options.quick else 3)
    keep = [word for word in arguments if word != "--home" and word != str(options.home)]
    command = shlex.join(["python", "benchmarks/peers.py", *keep])
    content = {
        "benchmark": "peers",
        "date": today(),
        "machine": describe_machine(),
        "peers": field.peers,
        "tables": [],
    }
    for key in options.only:
        group = GROUPS[key]
        num_turns = min(group.num_turns or repeats, repeats)
        rows = ask(field, group, num_turns)
        asked = {"date": today(), "turns": num_turns, "note": options.note, "command": command}
        chosen = [t for t in group.tables if not options.keep or t.value == "samples_per_s"]
        tables = [summarise(table, rows) | {"asked": asked} for table in chosen]
        for table in tables:
            table["title"] = table["title"].replace("2 workers", f"{options.workers} workers")
        for table in tables:
            print_table(table)
        if options.save:  # after each group, so that an interrupted run keeps its results
            _save(options, content, tables)
    for session in field.sessions.values():
        session.end()
    return 0


def _save(options: argparse.Namespace, content: dict[str, Any], tables: list[Any]) -> None:
    """Write the tables in order, together with tables already in the file."""
    path = RESULTS / f"peers-{options.save}.json"
    found = json.loads(path.read_text("utf-8"))["tables"] if path.exists() else []
    merged = {table["key"]: table for table in [*found, *tables]}
    order = [table.key for group in GROUPS.values() for table in group.tables]
    save(options.save, {**content, "tables": [merged[key] for key in order if key in merged]})
    if options.page:
        first_line = PAGE.read_text("utf-8").partition("\n")[0]
        others = re.findall(r"peers-[\w.-]+\.json", first_line)[1:]
        _write_page([path.name, *others])


def _write_page(names: list[str]) -> None:
    files = {name: json.loads((RESULTS / name).read_text("utf-8")) for name in names}
    PAGE.write_text(render(files), "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
