"""One turn of one contender, in a fresh process of the contender's environment.

    python benchmarks/rivals/turn.py FOLDER_OF_RIVALS JOBS     prints one line of JSON per job

The parent starts it with ``-c``, so that this folder is not first on the import path. JOBS is a
list of {module, contender, question, pace, job}.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import platform
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def list_contenders(module: str) -> dict[str, Any]:
    return {kind.name: kind for kind in importlib.import_module(module).CONTENDERS}


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Return the contender's answer. A failure is also an answer."""
    from contract import Job, NotOffered
    from questions import QUESTIONS  # imports torch
    from work import WORKS

    start_s = time.perf_counter()
    kind = list_contenders(order["module"])[order["contender"]]
    import_s = time.perf_counter() - start_s  # of the library; 0 from the second job on
    given = dict(order["job"])
    given |= {"data": Path(given["data"]), "home": Path(given["home"])}
    if given.get("work"):
        given["work"] = WORKS[given["work"]]()
    job = Job(**given)
    try:
        if job.kind not in kind.kinds:
            raise NotOffered("not its business")
        is_crop = job.kind in ("jpeg", "raw") and order["question"] == "rate"
        if is_crop and job.antialias not in kind.antialias:
            raise NotOffered("always antialiased" if not job.antialias else "never antialiased")
        found = QUESTIONS[order["question"]](kind(), job, order["pace"])
        return {**found, "import_s": import_s}
    except NotOffered as reason:
        return {"no": str(reason)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        if os.environ.get("PENSTOCK_PEERS_DEBUG"):
            raise
        return {"failed": f"{type(error).__name__}: {lines[0][:160]}"}


def describe(module: str, packages: list[str]) -> dict[str, Any]:
    """Return the contenders of the module, and the versions of some packages."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass
    names = {
        kind.name: {"kinds": kind.kinds, "formats": kind.formats}
        for kind in list_contenders(module).values()
    }
    return {"contenders": names, "versions": versions}


def run(orders: list[dict[str, Any]]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for order in orders:
        told = describe(**order["describe"]) if "describe" in order else answer(order)
        print("ANSWER " + json.dumps(told), flush=True)
        gc.collect()  # ends what the loader left behind


def main(orders: list[dict[str, Any]]) -> None:
    run(orders)
    os._exit(0)  # skip clean-up, in which a loader could hang


def serve() -> None:
    """Run several turns, one line of JSON each."""
    for line in sys.stdin:
        run(json.loads(line))
    os._exit(0)
