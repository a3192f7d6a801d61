"""Objects pickled for a worker and unpickled here: what a worker finds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from penstock.engine.memory.messages import PickleLocation
from penstock.engine.pickling.pickler import PickledObjects, PickleFile, unpickle_objects


def worker_side(pickle_file: PickleFile) -> PickleLocation:
    """The location as a worker gets it: with a descriptor of its own, which unpickling closes."""
    location = pickle_file.location
    return replace(location, handle=replace(location.handle, fd=os.dup(pickle_file.file.fd)))


def arrive(pickle_file: PickleFile) -> Any:
    """What a worker makes of the object named ``value``."""
    fds = [os.dup(fd) for fd in pickle_file.fds]
    return unpickle_objects(worker_side(pickle_file), fds)["value"]


def round_trip(value: Any) -> tuple[Any, PickleFile]:
    """The object as it arrives, and the pickle file it came in. Close the latter."""
    pickle_file = PickledObjects({"value": value}).to_shared_file()
    return arrive(pickle_file), pickle_file
