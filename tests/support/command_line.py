"""Runs a command in this process, as if typed in a shell."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from penstock.cli import main


@dataclass(frozen=True)
class Done:
    """Result of a command. ``output`` holds the text of both streams."""

    exit_code: Any
    output: str


def invoke(*arguments: str) -> Done:
    """Run ``penstock`` with these arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(arguments)
        except SystemExit as end:
            return Done(end.code or 0, printed.getvalue())
