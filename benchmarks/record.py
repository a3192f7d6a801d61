"""Description of the machine and versions in result files. Names no person, host or folder."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import penstock
from penstock.machine.collect import machine

RESULTS = Path(__file__).parent / "results"
PEERS = (
    *("torchdata", "torchvision", "pillow", "simplejpeg", "opencv-python-headless"),
    *("litdata", "mosaicml-streaming", "webdataset", "datasets", "ffcv"),
)
"""Optional packages, recorded if installed."""


def describe_machine() -> dict[str, Any]:
    """Return facts about the hardware and the operating system."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "usable_cores": machine().usable_cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of the measured packages and of the interpreter."""
    found = {"python": platform.python_version(), "penstock": penstock.__version__}
    for package in ("torch", "numpy", "cloudpickle"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    for package in PEERS:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _cpu_model() -> str:
    """Return the name of the processor, or the architecture if it is unknown."""
    commands = (("lscpu", "Model name:"), ("sysctl", "machdep.cpu.brand_string:"))
    for command, label in commands:
        arguments = [command] if command == "lscpu" else [command, label.rstrip(":")]
        if not shutil.which(command):
            continue
        shown = subprocess.run(arguments, capture_output=True, text=True, timeout=10).stdout
        for line in shown.splitlines():
            if line.strip().startswith(label):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(name: str, content: dict[str, Any]) -> Path:
    """Write a result file, named after its benchmark. Returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{content['benchmark']}-{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()
