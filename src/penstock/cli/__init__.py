"""The command line: ``penstock`` and ``python -m penstock``.

:mod:`penstock.cli.parser` parses the arguments and imports the module of the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. Only this function turns exceptions into exit codes.

    Called by the ``penstock`` script and ``python -m penstock``.

    Args:
        arguments: The arguments after ``penstock``. If None, those in ``sys.argv``.
    """
    from penstock.cli.parser import make_parser
    from penstock.errors import PenstockError

    options = None
    try:
        options = make_parser().parse_args(arguments)
        sys.exit(options.execute(options))
    except PenstockError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        if getattr(options, "command", None) == "run":
            raise  # raised in the user's script: exit as Python does without Penstock
        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # as in `penstock doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
