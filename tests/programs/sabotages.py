"""Defects that the checks must find: each is put into the process that checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def seed_nothing() -> None:
    """Generators are left alone before a sample, in this process only."""
    raise NotImplementedError


SABOTAGES: dict[str, Callable[[], Any]] = {"seed nothing": seed_nothing}
