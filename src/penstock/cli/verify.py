"""``penstock verify``: compares a loader's batches under several settings.

Without a loader, it compares two training runs on this machine.

The command starts a child process, which runs the script up to the target name and calls
:func:`penstock.verify`. The command then prints the verdict that the child saved.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from textwrap import indent
from typing import Any

from penstock.cli.child_check import CheckResults, run_check
from penstock.cli.parser import CommandParser, number, worker_counts
from penstock.cli.script_loading import ScriptFailed, load_object
from penstock.cli.script_object import ScriptObject, find_script_object
from penstock.cli.sections import escape_unprintable
from penstock.errors import BadArgument
from penstock.verify.verdict import Verdict

SAME, DIFFERENT = 0, 1


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.epilog = (
        "Exit status: 0 if the same, 1 if different or not verified, 2 for a usage error."
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="[SCRIPT:NAME]",
        help="A loader, or a function that returns one (called with num_workers=... if possible).",
    )
    parser.add_script_arguments()
    parser.add_value("--epochs", "N", number(int, 1, 1000), "Epochs to compare.", default=2)
    parser.add_value(
        "--max-batches", "N", number(int, 1), "Compare at most this many batches of each epoch."
    )
    parser.add_value(
        "--workers",
        "N,N,...",
        worker_counts,
        "Numbers of workers. The first one is the reference.",
        default="0,1,2,5",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_value(
        "--timeout", "SECONDS", number(float, 1, 86_400), "Total time limit.", default=600.0
    )


def execute(options: argparse.Namespace) -> int:
    """Verify the target and print the verdict. Returns 1 if anything differs or fails.

    Raises:
        BadTarget: There is no loader at ``options.target``.
    """
    check = "check_machine"
    if options.target is not None:
        find_script_object(options.target, "verify")
        check = "check_loader"
    asked = {
        name: getattr(options, name)
        for name in ("arguments", "epochs", "max_batches", "workers", "timeout")
    }
    results = run_check(
        f"{__name__}:{check}", {**asked, "command": "verify", "target": options.target or ""}
    )
    failure = results["failure"]
    verdict = Verdict.from_dict(results["verdict"]) if results.get("verdict") else None
    if options.json:
        content = {
            "target": options.target,
            "verdict": None if verdict is None else verdict.to_dict(),
            "failure": failure,
            "printed": results["printed"],
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        _print(verdict, failure, results["printed"])
    return SAME if verdict is not None and verdict.is_same and not failure else DIFFERENT


def _print(verdict: Verdict | None, failure: dict[str, Any] | None, printed: str) -> None:
    escape_unprintable()
    if verdict is not None:
        sys.stdout.write(f"{verdict}\n")
    if failure:
        where = f"\n  In: {failure['where']}" if failure["where"] else ""
        cure = f"\n  Try: {failure['cure']}" if failure["cure"] else ""
        sys.stdout.write(f"Not verified: {failure['what']}{where}{cure}\n")
        if printed.strip():
            sys.stdout.write(f"The script printed:\n{indent(printed.strip(), '    ')}\n")


# -- in the child ----------------------------------------------------------------------------------


def check_loader(results: CheckResults, options: dict[str, Any], deadline: float) -> None:
    """Verify the loader of a script. Runs in the child process."""
    target = find_script_object(options["target"], "verify")
    value = load_object(target, options["arguments"], results.doing)
    from penstock.verify.comparison import (
        verify,  # imports torch, which the script may have to configure first
    )

    try:
        verdict = verify(
            _as_factory(value, target),
            epochs=options["epochs"],
            workers=options["workers"],
            max_batches=options["max_batches"],
            tell=lambda setting: results.doing(f"running {target.name}: {setting}"),
        )
    except BadArgument as error:
        what = error.what.replace("make_loader", f"{target.name}()", 1)
        raise ScriptFailed("name", what, cure=error.remedy or "") from error
    results.save(verdict=verdict.to_dict())


def _as_factory(value: Any, target: ScriptObject) -> Any:
    """Return the loader, or a factory for it. Iterables of other types are used unchanged."""
    from torch.utils.data import DataLoader

    _refuse_dataset(value, target.name, target)
    if isinstance(value, DataLoader):
        return value
    if hasattr(value, "__iter__"):
        return lambda: value

    @functools.wraps(value)
    def make(*arguments: Any, **keywords: Any) -> Any:
        made = value(*arguments, **keywords)
        _refuse_dataset(made, f"the result of {target.name}()", target)
        if not hasattr(type(made), "__iter__"):
            kind = "None" if made is None else type(made).__name__
            raise ScriptFailed("name", f"{target.name}() returned {kind}, not a loader")
        return made

    return make


def _refuse_dataset(value: Any, name: str, target: ScriptObject) -> None:
    from torch.utils.data import Dataset

    kind = value if isinstance(value, type) else type(value)
    is_indexed = hasattr(kind, "__getitem__") and not hasattr(kind, "__iter__")
    if issubclass(kind, Dataset) or is_indexed:
        raise ScriptFailed(
            "name",
            f"{name} is a dataset, but verify needs a loader",
            cure=f"def make_loader(num_workers=0): ...  # then: penstock verify "
            f"{target.script}:make_loader",
        )


def check_machine(results: CheckResults, options: dict[str, Any], deadline: float) -> None:
    """Verify that training on this machine is reproducible. Runs in the child process."""
    from penstock.verify.training import verify_training

    verdict = verify_training(tell=lambda device: results.doing(f"training on {device}"))
    results.save(verdict=verdict.to_dict())
