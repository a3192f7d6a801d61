"""Pickles objects for a worker and unpickles them here, as a worker would."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock.engine.memory.messages import PickleLocation
from penstock.engine.pickling.pickler import PickledObjects, PickleFile
from penstock.engine.pickling.unpickling import unpickle_objects
from penstock.errors import CannotTravel


def worker_side(pickle_file: PickleFile) -> PickleLocation:
    """Return the location as sent to a worker, with its own descriptor. Unpickling closes it."""
    location = pickle_file.location
    return location._replace(handle=location.handle._replace(fd=os.dup(pickle_file.file.fd)))


def arrive(pickle_file: PickleFile) -> Any:
    """Unpickle the object named ``value`` as a worker would."""
    fds = [os.dup(fd) for fd in pickle_file.fds]
    return unpickle_objects(worker_side(pickle_file), fds)["value"]


def round_trip(value: Any) -> tuple[Any, PickleFile]:
    """Return the unpickled object and its pickle file. The caller closes the file."""
    pickle_file = PickledObjects({"value": value}).to_shared_file()
    return arrive(pickle_file), pickle_file


class Holder:
    """An object with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def arrived(value: Any) -> Any:
    """Return the unpickled object."""
    again, pickle_file = round_trip(value)
    pickle_file.close()
    return again


def refusal(value: Any) -> str:
    """Return the error message for a dataset that holds an object that cannot be pickled."""
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(deep=[Holder(handle=value)])})
    assert info.value.path == "dataset.deep[0].handle"  # type: ignore[attr-defined]
    return str(info.value)
