"""The command line: ``penstock`` and ``python -m penstock``.

``parser`` reads the line and imports the module of the command, which does the work.
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
    """Run a command and exit. This is the one place where exceptions become exit codes.

    Called from: the ``penstock`` script and ``python -m penstock``.

    Args:
        arguments: What was typed behind ``penstock``; None: ``sys.argv``.
    """
    from penstock.cli.parser import make_parser
    from penstock.errors import PenstockError

    options = None
    try:
        options = make_parser().parse_args(arguments)
        sys.exit(options.execute(options))
    except PenstockError as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        if getattr(options, "command", None) == "run":
            raise  # the script's: the interpreter ends as it does without us
        print("Interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # as in `penstock doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
