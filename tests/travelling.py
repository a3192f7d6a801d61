"""Objects sent to a worker and back without a worker: what unpacking finds there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from penstock.engine.pickling.pickler import Packed, Parcel, serialise, unpack


def worker_side(packed: Packed) -> Parcel:
    """The parcel as a worker gets it: with a descriptor of its own, which unpacking closes."""
    return packed.parcel_for(replace(packed.parcel.handle, fd=os.dup(packed.file.fd)))


def arrive(packed: Packed) -> Any:
    """What a worker makes of the object named ``value``."""
    return unpack(worker_side(packed), [os.dup(fd) for fd in packed.fds])["value"]


def through_travel(value: Any) -> tuple[Any, Packed]:
    """The object as it arrives, and the parcel it came in. Close the parcel."""
    packed = serialise({"value": value}).seal()
    return arrive(packed), packed
