"""Stands in for the doctor's trial of copies, in its child: as ``PRETEND_COPIES`` says."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from penstock.cli.doctor.trial import Notes, conduct

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


def main(folder: str, options_text: str) -> None:
    conduct(folder, json.loads(options_text), _pretend)


def _pretend(notes: Notes, options: dict[str, Any], deadline: float) -> None:
    notes.save(gpus=[GPU])
    fate = os.environ["PRETEND_COPIES"]
    notes.doing("copying pinned memory to GPU 1")
    if fate == "hang":
        time.sleep(3600)
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
