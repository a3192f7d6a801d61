"""What is this computer? Collects every fact."""

from __future__ import annotations

import sys

import psutil

from penstock.machine.facts import Machine
from penstock.machine.host import can_start_python, usable_cores


def machine() -> Machine:
    """The computer we are on."""
    memory = psutil.virtual_memory()
    return Machine(
        os=sys.platform,
        num_cpus=usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        can_start_python=can_start_python(),
    )
