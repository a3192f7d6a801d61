"""The documents' statements about torch versions hold for the installed version."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from support.paths import REPO

pytestmark = pytest.mark.legacy

PAGE = REPO / "docs" / "compatibility.md"
ARGUMENTS = inspect.signature(DataLoader.__init__).parameters


def has_dtypes(*names: str) -> bool:
    return all(hasattr(torch, name) for name in names)


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def takes_dashes() -> bool:
    from torch.distributed.run import get_args_parser

    return "--nproc-per-node" in get_args_parser().format_help()


def takes_numpy_2() -> bool:
    return int(np.__version__.split(".")[0]) >= 2


PROBES: dict[str, Callable[[], bool]] = {
    "torch has `in_order=`": lambda: "in_order" in ARGUMENTS,
    "torch has `prefetch_factor=None`": lambda: ARGUMENTS["prefetch_factor"].default is None,
    "tensors of `uint16`, `uint32`, `uint64`": lambda: has_dtypes("uint16", "uint32", "uint64"),
    "tensors of `float8`": lambda: has_dtypes("float8_e4m3fn", "float8_e5m2"),
    "`Subset` passes `__getitems__` on": lambda: hasattr(Subset, "__getitems__"),
    "`torch.set_default_device`": lambda: hasattr(torch, "set_default_device"),
    "`torch.distributed.checkpoint`": lambda: has_module("torch.distributed.checkpoint"),
    "deterministic algorithms fill new memory": lambda: has_module("torch.utils.deterministic"),
    "`torchrun --nproc-per-node`": takes_dashes,
    "works with NumPy 2": takes_numpy_2,
}


def section() -> str:
    return PAGE.read_text(encoding="utf-8").split("\n## Old torch\n")[1].split("\n## ")[0]


def rows() -> list[list[str]]:
    lines = [line for line in section().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def column_of(name: str) -> dict[str, str]:
    head, _, *body = [row for row in rows() if len(row) == 4]
    place = head.index(name)
    return {row[0]: row[place] for row in body}


def test_every_row_is_true_of_this_torch() -> None:
    name = ".".join(torch.__version__.split(".")[:2])
    if name not in rows()[0]:
        pytest.skip(f"torch {name} has no column")
    told = {row: cell.startswith("yes") for row, cell in column_of(name).items()}
    assert told == {row: probe() for row, probe in PROBES.items()}


def test_what_a_version_cannot_do_comes_with_what_happens_instead() -> None:
    for cell in column_of("1.13").values():
        assert re.match(r"no: \w|no: `", cell)


def test_the_files_that_the_legacy_leg_leaves_out_are_listed() -> None:
    folders = ("unit", "integration", "faults", "property")
    files = [path for name in folders for path in (REPO / "tests" / name).rglob("test_*.py")]
    left_out = {path.name for path in files if "mark.legacy" not in path.read_text("utf-8")}
    listed = [row[0] for row in rows() if len(row) == 2 and "test_" in row[0]]
    assert left_out == set(re.findall(r"`(test_\w+\.py)`", " ".join(listed)))
