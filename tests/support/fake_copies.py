"""Fake for the doctor's copy check in its child process, controlled by ``PRETEND_COPIES``."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from penstock.cli.child_check import CheckResults

GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "bus_id": "0000:3b:00.0",
    "link": {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16},
    "bytes_per_s": {"pageable": 14.4e9, "pinned": 55.1e9, "registered": 55.1e9},
    "is_pinned": True,
    "trouble": "",
    "fence": "an event of the whole GPU context",
}


def pretend(results: CheckResults, options: dict[str, Any], deadline: float) -> None:
    results.save(gpus=[GPU])
    fate = os.environ["PRETEND_COPIES"]
    results.doing("copying pinned memory to GPU 1")
    if fate == "hang":
        time.sleep(3600)
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
