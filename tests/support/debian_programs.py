"""Programs of Debian that ``make test`` gets through ``tools/install_programs.sh``."""

from __future__ import annotations

import shutil
import time

import psutil

from support.paths import REPO

INSTALLING = REPO / "build" / "installing-programs"
"""Holds the PID of tools/install_programs.sh while it runs."""
INSTALL_S = 600.0
UNPACKED = REPO / "build" / "prometheus" / "usr" / "bin"


def find_program(*names: str) -> str | None:
    """Return the path of the first of these programs that exists. Waits for an installation."""
    until = time.monotonic() + INSTALL_S
    while time.monotonic() < until and _is_being_installed():
        time.sleep(0.5)
    found = (shutil.which(name) or shutil.which(name, path=str(UNPACKED)) for name in names)
    return next((path for path in found if path), None)


def _is_being_installed() -> bool:
    try:
        return psutil.pid_exists(int(INSTALLING.read_text()))
    except (OSError, ValueError):
        return False
