"""Finds the files of a set in object storage: the first requests, in a process of their own.

The process that fetches the manifest of a packed set becomes its downloader, unless there is one.
NumPy and the rest of the downloader are imported while the manifest is on its way. The program gets
its answer before that import ends.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from penstock.sources.remote.address import without_secrets
from penstock.sources.remote.object_list import find_objects
from penstock.sources.remote.object_store import FetchFailed, ObjectStore, store_manifest
from penstock.sources.remote.set_locks import lock_set, turn_to_start

_SWITCH_S = 0.0005
"""How long the import can keep the thread waiting that has the answer."""
_printing = threading.Lock()


def open_set(arguments: str) -> None:
    """Fetch the manifest, print the set's folder, and become its downloader if it has none."""
    options = json.loads(arguments)
    importing = threading.Thread(
        target=importlib.import_module, args=("penstock.sources.remote.downloader",), daemon=True
    )
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    answer = _answer(options, lambda: {"folder": store_manifest(options, _tell, importing.start)})
    folder = answer.get("folder", "")
    answer["stays"] = stays = bool(folder) and lock_set(options, folder)
    if not stays:
        _print(answer)
        os._exit(0)  # without waiting for the import
    with turn_to_start(folder) as turn:
        _print(answer)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, sys.stdout.fileno())  # closes the program's pipe
        importing.join()
        sys.setswitchinterval(usual_s)
        from penstock.sources.remote.downloader import serve

        serve(options, folder, turn)


def look_up(arguments: str) -> None:
    """Print the objects that the names on standard input stand for. Called in a process."""
    options = json.loads(arguments)

    def find() -> dict[str, Any]:
        store = ObjectStore(options["url"], options["timeout_s"] / 2, _tell)
        return {"objects": find_objects(store, json.load(sys.stdin))}

    _print(_answer(options, find))


def _tell(why: str) -> None:
    """Print what the request is waiting for. Can be called from several threads."""
    _print({"trying": why})


def _print(message: dict[str, Any]) -> None:
    """Print a message as one line. Several requests can fail at the same time."""
    with _printing:
        print(json.dumps(message), flush=True)


def _answer(options: dict[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return find()
    except FetchFailed as error:
        return error.facts
    except Exception as error:
        found = without_secrets(error).partition(" Debug source:")[0]
        return {
            "kind": "network",
            "what": f"{options['url']} cannot be opened: {found}",
            "likely": "the address is wrong.",
            "remedy": "Packed('s3://bucket/set')",
        }
