"""What does a person type?

    main --> early: must Python start again? --> commands: typer, one module for each command

The commands are imported last: typer takes 0.2 s, and a Python that starts again pays them twice.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit.

    Called from: the ``penstock`` script and ``python -m penstock``.
    """
    from penstock.cli.early import settle_hash_seed

    settle_hash_seed(sys.argv[1:])

    from penstock.cli.commands import run_command

    run_command()
