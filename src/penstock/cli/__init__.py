"""What does a person type?

    main --> early: must Python start again? --> commands: typer, one module for each command
                                             --> run, where typer need not be asked

The commands are imported last: typer takes 0.2 s, and a Python that starts again pays them twice.
"""

from __future__ import annotations

import sys
from typing import NoReturn

USAGE_ERROR = 2
INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit.

    Called from: the ``penstock`` script and ``python -m penstock``.
    """
    from penstock.cli.early import settle_hash_seed

    settle_hash_seed(sys.argv[1:])
    if sys.argv[1:2] == ["run"]:
        from penstock.cli.run_line import read_line

        found = read_line(sys.argv[2:])
        if found is not None:
            from penstock.cli.run import run_to_end
            from penstock.cli.run_checks import make_options

            run_to_end(make_options(**found))

    from penstock.cli.commands import run_command

    run_command()
