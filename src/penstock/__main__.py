"""``python -m penstock``: the command line. Without arguments, an overview of this platform.

Tested by ``tests/integration/cli/test_module_command.py``.
"""

import sys

if __name__ == "__main__":
    if len(sys.argv) > 1:
        from penstock.cli import main

        main()
    from penstock.cli.overview import show_overview

    show_overview()
