"""``penstock verify``: is a loader's stream the same under every setting? Or a training?

penstock verify train.py:make_loader -- start -->   child: runs the script up to the name, then
table, difference            <-- one JSON file --   penstock.verify() (cli/verify_trial.py)
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from penstock.cli.doctor.child import run_trial
from penstock.cli.doctor.target import find_target
from penstock.errors import BadTarget
from penstock.verify.verdict import Verdict

SAME, DIFFERENT = 0, 1
_TRIAL = "penstock.cli.verify_trial"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What the person asked for.

    Args:
        target: ``script.py:make_loader``, or None to look at the machine itself.
        arguments: The script's own.
        max_batches: Of each epoch; None: all.
    """

    target: str | None = None
    arguments: tuple[str, ...] = ()
    epochs: int = 2
    max_batches: int | None = None
    workers: tuple[int, ...] = (0, 1, 2, 5)
    as_json: bool = False
    limit_s: float = 600.0


def run_verify(options: VerifyOptions) -> int:
    """Verify, print, and give the exit code: 1 where something differs or fails.

    Raises:
        BadTarget: There is no loader at ``options.target``.
    """
    if options.target is not None:
        find_target(options.target, "verify")
    notes = run_trial(_TRIAL, {**asdict(options), "command": "verify", "target": _named(options)})
    failure = notes["failure"]
    if failure and failure["kind"] == "name":
        raise BadTarget(failure["what"], where=failure["where"], remedy=failure["cure"] or None)
    verdict = Verdict.from_dict(notes["verdict"]) if notes.get("verdict") else None
    if options.as_json:
        sys.stdout.write(json.dumps(_as_dict(options, notes, verdict), indent=2) + "\n")
    else:
        _print(notes, verdict)
    return SAME if verdict is not None and verdict.is_same and not failure else DIFFERENT


def _named(options: VerifyOptions) -> str:
    return options.target or ""


def _as_dict(
    options: VerifyOptions, notes: dict[str, Any], verdict: Verdict | None
) -> dict[str, Any]:
    return {
        "target": options.target,
        "verdict": None if verdict is None else verdict.to_dict(),
        "failure": notes["failure"],
        "printed": notes["printed"],
    }


def _print(notes: dict[str, Any], verdict: Verdict | None) -> None:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a value that the terminal cannot show
    if verdict is not None:
        sys.stdout.write(f"{verdict}\n")
    failure = notes["failure"]
    if failure:
        where = f"\n  In: {failure['where']}" if failure["where"] else ""
        cure = f"\n  Try: {failure['cure']}" if failure["cure"] else ""
        sys.stdout.write(f"Not verified: {failure['what']}{where}{cure}\n")
