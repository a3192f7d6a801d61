"""Runs the commands of documents in sequence, each document in its own folder.

    this process (torch imported once) --fork--> python train.py     as a main module
                                       --fork--> penstock doctor     as the command line

Run as a program: ``python typed_commands.py JOBS.json``. Each job has a folder and steps. The
outcome of each command is written to ``typed.json`` in that folder. Commands are forked because
importing torch takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import runpy
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
VISION = "<!-- environment: vision -->"
"""First line of a document that needs torchvision and Pillow. tests/compat runs it."""

FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<body>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'title="([^"]+)"')


def steps_of(text: str) -> list[dict[str, Any]]:
    """Return the files, changes and commands of a document, in order."""
    steps: list[dict[str, Any]] = []
    for match in FENCE.finditer(text):
        info, body, note = match["info"].strip(), match["body"], match["note"] or ""
        title = TITLE.search(info)
        kind = info.split(" ")[0]
        if kind in ("python", "diff") and title is not None:
            steps.append({"kind": kind, "name": title[1], "text": body})
        elif kind == "console" and not note.startswith("not run: "):
            status = [int(number) for number in re.findall(r"\d+", note)] or [0]
            lines = body.splitlines()
            shown = [line for line in lines if not line.startswith("$ ")]
            commands = [line[2:] for line in lines if line.startswith("$ ")]
            more = {"shown": shown, "status_expected": status}
            steps.append({"kind": kind, "commands": commands, **more})
    return steps


_OLD = ("-", " ")
"""What the lines of a diff start with that are in the text before the change."""


def changed(text: str, diff: str) -> str:
    """Return the text with a diff applied to its lines. Lines of context come first in a change."""
    lines = diff.splitlines()
    for start in range(len(lines)):
        is_first = lines[start].startswith(_OLD) and not (
            start and lines[start - 1].startswith(_OLD)
        )
        if not is_first:
            continue
        end = start
        while end < len(lines) and lines[end].startswith(_OLD):
            end += 1
        put = end
        while put < len(lines) and lines[put].startswith("+"):
            put += 1
        old = "".join(f"{line[1:]}\n" for line in lines[start:end])
        kept = [line for line in lines[start:end] if not line.startswith("-")]
        new = "".join(f"{line[1:]}\n" for line in [*kept, *lines[end:put]])
        if old not in text:
            raise ValueError(f"the lines to take out are not there:\n{old}")
        text = text.replace(old, new, 1)
    return text


class Typist:
    """Processes the jobs. In a forked child, :attr:`task` is the remaining work."""

    def __init__(self) -> None:
        self.task: list[str] = []

    def work(self, jobs: list[dict[str, Any]]) -> bool:
        """Process the jobs. Returns True in a child that must run its command."""
        for job in jobs:
            folder, typed = Path(job["folder"]), []
            for step in job["steps"]:
                if step["kind"] == "python":
                    (folder / step["name"]).write_text(step["text"], encoding="utf-8")
                elif step["kind"] == "diff":
                    path = folder / step["name"]
                    path.write_text(changed(path.read_text("utf-8"), step["text"]), "utf-8")
                commands = step.get("commands", ())
                for command in commands:
                    status = self.fork(command, folder)
                    if status is None:
                        return True
                    said = (folder / "said.txt").read_text("utf-8", "replace")
                    is_last = command == commands[-1]  # its output is shown
                    outcome = {"command": command, "status": status, "said": said}
                    typed.append({**step, **outcome, "is_last": is_last})
            (folder / "typed.json").write_text(json.dumps(typed), encoding="utf-8")
        return False

    def fork(self, command: str, folder: Path) -> int | None:
        """Fork and return the child's exit status. Returns None in the child."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            said = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0), os.dup2(said, 1), os.dup2(said, 2)
            os.chdir(folder)
            self.task = shlex.split(command, comments=True)
            return None
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -signal.SIGKILL


def run_command(words: list[str]) -> None:
    """Run a ``python`` or ``penstock`` command in this process."""
    program, *arguments = words
    sys.path[0] = os.getcwd() if program == "python" else sys.path[0]
    if words[:3] == ["python", "-m", "penstock"]:
        program, arguments = "penstock", arguments[2:]
    if program == "penstock":
        sys.argv = ["penstock", *arguments]
        runpy.run_module("penstock", run_name="__main__")
    elif program == "python":
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit(f"{program}: nobody here can type that; say why it is not run")


def end(function: Any, *arguments: Any) -> None:
    """Call a function and exit as Python does, without torch's teardown, which takes 0.6 s."""
    try:
        function(*arguments)
        code: Any = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def prepare() -> None:
    """Import the modules that commands use. Computes nothing, because that starts threads."""
    import torch

    with contextlib.suppress(ImportError):  # imported by an optimizer's first step, in 2.5 s
        import torch._dynamo
    del torch


if __name__ == "__main__":
    plan = Path(sys.argv[1]).read_text("utf-8")
    if "torch" in plan:
        prepare()
    typist = Typist()
    gc.freeze()  # otherwise each child's first collection copies all pages of torch's objects
    if typist.work(json.loads(plan)):
        end(run_command, typist.task)
