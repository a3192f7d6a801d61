"""``penstock run --seed``, before anything is imported: Python's own seed is set when it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.cli.run_line import num_own

HASH_SEED = "PYTHONHASHSEED"


def settle_hash_seed(arguments: Sequence[str]) -> None:
    """The order of sets of strings is decided when Python starts: start it again with a seed.

    Args:
        arguments: Everything behind ``penstock``.
    """
    seed = _asked_seed(arguments)
    if seed is None or HASH_SEED in os.environ or sys.platform == "win32" or not sys.orig_argv:
        return
    environ = dict(os.environ, **{HASH_SEED: str(seed % (1 << 32))})
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _asked_seed(arguments: Sequence[str]) -> int | None:
    if not arguments or arguments[0] != "run":
        return None
    own = arguments[1 : 1 + num_own(arguments[1:])]
    found: int | None = None
    for place, argument in enumerate(own):
        name, _, value = argument.partition("=")
        if name == "--seed":  # the last one counts
            text = value or (own[place + 1] if place + 1 < len(own) else "")
            try:
                found = int(text)
            except ValueError:
                return None  # the command says what is wrong with it
    return found
