"""Penstock: a drop-in DataLoader for PyTorch.

Public names are imported on first use. ``import penstock`` imports neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from penstock.importing import importing

if TYPE_CHECKING:
    from penstock import conv as conv
    from penstock import legacy as legacy
    from penstock.device.device_iterable import to_device as to_device
    from penstock.device.image_finisher import finish as finish
    from penstock.engine.loading.bad_sample_file import BadSample as BadSample
    from penstock.engine.memory.shared_dict import SharedDict as SharedDict
    from penstock.engine.memory.shared_list import SharedList as SharedList
    from penstock.engine.parent.replay import replay as replay
    from penstock.engine.pickling.reopenable import reopenable as reopenable
    from penstock.images.crops import CenterCrop as CenterCrop
    from penstock.images.crops import Compose as Compose
    from penstock.images.crops import RandomHorizontalFlip as RandomHorizontalFlip
    from penstock.images.crops import RandomResizedCrop as RandomResizedCrop
    from penstock.images.crops import Resize as Resize
    from penstock.images.decode import decode as decode
    from penstock.integrations.patch import patch as patch
    from penstock.integrations.patch import patched as patched
    from penstock.integrations.patch import unpatch as unpatch
    from penstock.loader import DataLoader as DataLoader
    from penstock.machine.collect import machine as machine
    from penstock.machine.facts import Gpu as Gpu
    from penstock.machine.facts import Machine as Machine
    from penstock.options import Tracing as Tracing
    from penstock.order.bucketing import BucketedBatches as BucketedBatches
    from penstock.order.mixture import Mixture as Mixture
    from penstock.order.mixture import mix as mix
    from penstock.order.rng import rng as rng
    from penstock.order.samplers import BlockOrder as BlockOrder
    from penstock.order.samplers import SeededOrder as SeededOrder
    from penstock.order.samplers import WeightedOrder as WeightedOrder
    from penstock.order.seeding import seed_all as seed_all
    from penstock.order.seeding import seeded as seeded
    from penstock.order.split import split as split
    from penstock.packing import pack as pack
    from penstock.planning.decisions import plan as plan
    from penstock.sources.blocks import BlockReader as BlockReader
    from penstock.sources.cache import cached as cached
    from penstock.sources.fields import Field as Field
    from penstock.sources.image_folder import ImageFolder as ImageFolder
    from penstock.sources.open_dataset import open_dataset as open_dataset
    from penstock.sources.packed import Packed as Packed
    from penstock.sources.tensor_files import open_tensors as open_tensors
    from penstock.trace.prometheus import serve_metrics as serve_metrics
    from penstock.trace.record import span as span
    from penstock.trace.timeline import Timeline as Timeline
    from penstock.trace.what_if import simulate as simulate
    from penstock.verify.comparison import verify as verify
    from penstock.verify.verdict import Verdict as Verdict

__version__ = "0.2.0"

_HOMES = {
    "DataLoader": "penstock.loader",
    "finish": "penstock.device.image_finisher",
    "to_device": "penstock.device.device_iterable",
    "SharedList": "penstock.engine.memory.shared_list",
    "SharedDict": "penstock.engine.memory.shared_dict",
    "Choice": "penstock.planning.plan",
    "Plan": "penstock.planning.plan",
    "machine": "penstock.machine",
    "Machine": "penstock.machine.facts",
    "Gpu": "penstock.machine.facts",
    "plan": "penstock.planning.decisions",
    "rng": "penstock.order.rng",
    "replay": "penstock.engine.parent.replay",
    "reopenable": "penstock.engine.pickling.reopenable",
    "seed_all": "penstock.order.seeding",
    "seeded": "penstock.order.seeding",
    "split": "penstock.order.split",
    "mix": "penstock.order.mixture",
    "Mixture": "penstock.order.mixture",
    "SeededOrder": "penstock.order.samplers",
    "WeightedOrder": "penstock.order.samplers",
    "BucketedBatches": "penstock.order.bucketing",
    "BlockOrder": "penstock.order.samplers",
    "pack": "penstock.packing",
    "Packed": "penstock.sources.packed",
    "Field": "penstock.sources.fields",
    "open_tensors": "penstock.sources.tensor_files",
    "open_dataset": "penstock.sources.open_dataset",
    "BlockReader": "penstock.sources.blocks",
    "cached": "penstock.sources.cache",
    "ImageFolder": "penstock.sources.image_folder",
    "decode": "penstock.images.decode",
    "RandomResizedCrop": "penstock.images.crops",
    "RandomHorizontalFlip": "penstock.images.crops",
    "Resize": "penstock.images.crops",
    "CenterCrop": "penstock.images.crops",
    "Compose": "penstock.images.crops",
    "span": "penstock.trace.record",
    "Tracing": "penstock.options",
    "Timeline": "penstock.trace.timeline",
    "simulate": "penstock.trace.what_if",
    "serve_metrics": "penstock.trace.prometheus",
    "patch": "penstock.integrations.patch",
    "unpatch": "penstock.integrations.patch",
    "patched": "penstock.integrations.patch",
    "legacy": "penstock.legacy",
    "conv": "penstock.conv",
    "errors": "penstock.errors",
    "verify": "penstock.verify",
    "Verdict": "penstock.verify.verdict",
    "BadSample": "penstock.engine.loading.bad_sample_file",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    with importing():
        module = importlib.import_module(home)
        if name == "DataLoader":
            module.DataLoader._is_accelerate_prepared = _PreparedFlag()
    # `machine` and `verify` are callable packages, and `conv` and `legacy` hold public names. For
    # these, the name refers to the module itself.
    if home == f"penstock.{name}":
        return module
    # Cached, because `penstock.span` is used inside loops and this function takes a microsecond.
    value = globals()[name] = getattr(module, name)
    return value


class _PreparedFlag:
    """``loader._is_accelerate_prepared``, which accelerate reads before it creates its loader."""

    def __get__(self, loader: Any, kind: Any = None) -> bool:
        library = sys.modules.get("accelerate.data_loader")
        if loader is not None and library is not None:
            from penstock.integrations.accelerate import note_prepared

            note_prepared(loader, library)
        return False


def __dir__() -> list[str]:
    return sorted(__all__)


def _bypass_convolutions() -> None:
    """Install the convolution bypass requested by PENSTOCK_CONV. Called once torch is imported."""
    mode = os.environ.get("PENSTOCK_CONV", "off")
    if mode in ("", "off"):  # `penstock run --conv off` sets it after this module is imported
        return
    from penstock.conv.bypass import bypass_convolutions
    from penstock.errors import BadArgument

    try:
        bypass_convolutions(mode)  # type: ignore[arg-type]
    except BadArgument as error:  # a typo in the variable must not make `import torch` fail
        import warnings

        warnings.warn(f"PENSTOCK_CONV={mode}: {error}", stacklevel=2)


if os.environ.get("PENSTOCK_CONV", "off") not in ("", "off"):
    from penstock.integrations.script_runner import when_imported

    when_imported("torch", _bypass_convolutions, needs=("conv",))
