"""Penstock feeds PyTorch at full pressure.

Names are loaded when they are first used: ``import penstock`` imports neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader import DataLoader as DataLoader
    from penstock.policy.planning import plan as plan

__version__ = "0.1.0"

_HOMES = {
    "DataLoader": "penstock.loader",
    "Choice": "penstock.policy.plan",
    "Plan": "penstock.policy.plan",
    "plan": "penstock.policy.planning",
    "PenstockError": "penstock.errors",
    "WorkerDied": "penstock.errors",
    "WorkerTimeout": "penstock.errors",
    "StartFailed": "penstock.errors",
    "CannotTravel": "penstock.errors",
    "MismatchedSamples": "penstock.errors",
    "BadArgument": "penstock.errors",
    "BadTarget": "penstock.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
