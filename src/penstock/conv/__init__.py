"""Convolution bypass for broken GPU libraries, and model optimization for inference.

:func:`bypass_convolutions` computes convolutions with matrix products instead of the vendor's
library. :func:`probe` checks whether that library works. :func:`optimize` makes a model faster for
inference. This package does not process data, and importing it does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.conv.bypass import Bypass as Bypass
    from penstock.conv.bypass import bypass_convolutions as bypass_convolutions
    from penstock.conv.inference import load_engine as load_engine
    from penstock.conv.inference import optimize as optimize
    from penstock.conv.modules import FallbackConv2d as FallbackConv2d
    from penstock.conv.modules import apply_full_patch as apply_full_patch
    from penstock.conv.modules import patch_modules as patch_modules
    from penstock.conv.modules import unpatch_modules as unpatch_modules
    from penstock.conv.probing.probe import ProbeResult as ProbeResult
    from penstock.conv.probing.probe import probe as probe
    from penstock.conv.probing.probe import reset as reset
    from penstock.conv.self_test import selftest as selftest

_HOMES = {
    "bypass_convolutions": "bypass",
    "Bypass": "bypass",
    "probe": "probing.probe",
    "reset": "probing.probe",
    "ProbeResult": "probing.probe",
    "patch_modules": "modules",
    "unpatch_modules": "modules",
    "FallbackConv2d": "modules",
    "apply_full_patch": "modules",
    "selftest": "self_test",
    "optimize": "inference",
    "load_engine": "inference",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.conv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.conv.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
