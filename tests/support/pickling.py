"""Objects pickled for a worker and unpickled here: what a worker finds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.memory.messages import PickleLocation
from penstock.engine.pickling.pickler import PickledObjects, PickleFile, unpickle_objects
from penstock.errors import CannotTravel


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


class Holder:
    """An object with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def arrived(value: Any) -> Any:
    """The object as it arrives."""
    again, pickle_file = round_trip(value)
    pickle_file.close()
    return again


def refusal(value: Any) -> str:
    """The message for a dataset that holds what cannot be pickled."""
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(deep=[Holder(handle=value)])})
    assert info.value.path == "dataset.deep[0].handle"  # type: ignore[attr-defined]
    return str(info.value)
