"""Checks of a node before the first batch: its versions, and the files of the dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from penstock.engine.loading.sample_path import find_path
from penstock.engine.remote.node_worker import versions
from penstock.errors import StartFailed

_MAX_PATHS = 32
_MAX_DEPTH = 3


def find_local_paths(dataset: Any) -> list[str]:
    """Return files and folders of this machine that attributes of the dataset name.

    Wrapped datasets are searched too. The file of the first sample is included if it is known.

    Example:
        >>> class Photos:
        ...     def __init__(self):
        ...         self.root, self.name = os.sep, "no such file"
        >>> find_local_paths(Photos()) == [os.sep]
        True
    """
    first = find_path(dataset, 0)
    found = dict.fromkeys([] if first is None else [first])
    found.update(dict.fromkeys(_paths_in(dataset, _MAX_DEPTH)))
    return [path for path in found if _exists(path)][:_MAX_PATHS]


def _paths_in(part: Any, depth: int) -> Iterator[str]:
    for value in list(getattr(part, "__dict__", {}).values())[:100]:
        if isinstance(value, (str, os.PathLike)):
            path = os.fspath(value)
            if isinstance(path, str) and os.sep in path:
                yield path
        elif depth and hasattr(value, "__dict__") and not callable(value):
            yield from _paths_in(value, depth - 1)


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a null byte: it is not a path
        return False


def check_node(found: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Compare a node with this machine.

    Args:
        found: The answer of :meth:`penstock.engine.remote.node_worker.NodeWorker.hello`.

    Raises:
        StartFailed: A version differs, or a file of the dataset does not exist there.
    """
    node, here, there = found["node"], versions(), found["versions"]
    different = [
        f"{name} {there[name]} instead of {version}"
        for name, version in here.items()
        if _release(name, there[name]) != _release(name, version)
    ]
    if different:
        raise StartFailed(
            f"node {node} has {', '.join(different)}",
            likely="the nodes have other packages than this process, so batches could differ.",
            remedy="install the same packages on all nodes, or ray.init(runtime_env={'pip': ...})",
        )
    files = [path for path in found["missing"] if not os.path.isdir(path)]
    if files:
        raise StartFailed(
            f"{files[0]} exists here, but not on node {node}",
            likely="the dataset names a file of this machine.",
            remedy="keep the data on a path that all nodes share, or in object storage",
        )
    if found["missing"]:
        warn(
            f"the folder {found['missing'][0]} exists here, but not on node {node}. If samples "
            "need it, keep it on a path that all nodes share."
        )


def _release(name: str, version: str) -> str:
    """Return the part of a version that must be the same. Python's patch level may differ."""
    return version.rpartition(".")[0] if name == "Python" else version
