"""Handles opened with ``penstock.reopenable`` are opened again by the same call."""

from __future__ import annotations

import gc
import socket
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engine.pickling import reopenable
from penstock.errors import BadArgument
from support.pickling import Holder, arrived, refusal

pytestmark = pytest.mark.legacy


class Opened:
    """A handle with a pickling that loses its content, like that of a video decoder."""

    def __init__(self, path: Path, *, mode: str = "r") -> None:
        self.path, self.mode = path, mode

    def __getstate__(self) -> dict[str, Any]:
        return {"path": None, "mode": None}


def test_the_call_is_repeated_and_the_handle_can_be_sent_again(tmp_path: Path) -> None:
    handle = penstock.reopenable(Opened, tmp_path, mode="w")
    again = arrived(Holder(one=handle, other=handle))
    assert (again.one.path, again.one.mode) == (tmp_path, "w")
    assert again.one is again.other is not handle
    assert arrived(again.one).path == tmp_path
    assert arrived(Opened(tmp_path)).path is None  # control: without the record, the path is lost


def test_the_record_ends_with_the_handle(tmp_path: Path) -> None:
    handle = penstock.reopenable(Opened, tmp_path)
    key = id(handle)
    assert key in reopenable._calls
    del handle
    gc.collect()
    assert key not in reopenable._calls


def test_an_object_at_the_same_address_is_not_taken_for_the_handle(tmp_path: Path) -> None:
    handle = penstock.reopenable(Opened, tmp_path)
    other = Opened(tmp_path)
    reopenable._calls[id(other)] = reopenable._calls[id(handle)]
    try:
        assert reopenable.opening_call(other) is None
    finally:
        del reopenable._calls[id(other)]


def test_objects_bound_to_a_process_can_be_opened_again() -> None:
    with penstock.reopenable(socket.socket) as ours, arrived(ours) as theirs:
        assert ours.fileno() != theirs.fileno()
    with socket.socket() as plain:
        assert "used by several processes" in refusal(plain)  # control


def test_an_object_without_weak_references_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"a builtins\.list is opened") as info:
        penstock.reopenable(list)
    assert "open it on first use" in str(info.value)
