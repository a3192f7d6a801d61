"""State of an iterable dataset: ``state_dict()``, if it leads back to the exact next sample.

Called by the process that reads the dataset: a worker, or the training process without workers.

Tested by ``tests/integration/order/test_stream_resume.py``.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from penstock.errors import BadState
from penstock.order.epoch_state import has_own_state, own_state_of

_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
_MAX_STAGES = 1000


def stream_state_of(dataset: Any) -> Any:
    """Return a copy of the dataset's state. None if it has none, or only an inexact one.

    The ``state_dict()`` of a base class often only raises NotImplementedError. It is ignored.

    Raises:
        BadState: ``state_dict()`` raises an exception, or its result cannot be copied.
    """
    if not has_exact_state(dataset):
        return None
    try:
        return own_state_of(dataset)
    except NotImplementedError:
        return None
    except Exception as error:
        name = type(dataset).__name__
        raise BadState(
            f"{name}.state_dict() raised {type(error).__name__}: {error}",
            where=_last_line_of(error),
            likely="state_dict() is called after each batch, so that the loader can resume there. "
            "It must return plain values that can be copied.",
            remedy=f"mend {name}.state_dict(), or remove it. Without it, a resumed loader loads "
            "the delivered batches again",
        ) from error


def _last_line_of(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def refuse_stateless(dataset: Any) -> None:
    """Raise BadState if a saved position of the dataset cannot be restored."""
    if not has_own_state(dataset):
        name = type(dataset).__name__
        raise BadState(
            f"the state contains the position of an iterable dataset, and {name} has no "
            "state_dict() and load_state_dict()",
            likely="it was saved with another dataset, or before these methods were removed.",
            remedy=f"the dataset that was used then, or {name}.load_state_dict(self, state)",
        )


def has_exact_state(dataset: Any) -> bool:
    """Return True if the dataset can resume at the exact next sample.

    The state of a Hugging Face dataset leaves out its shuffle buffer. Samples in it would be lost.
    """
    return has_own_state(dataset) and not has_shuffle_buffer(dataset)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return True for a Hugging Face ``IterableDataset`` after ``shuffle(buffer_size=...)``."""
    stages = _stages_of(getattr(dataset, "__dict__", {}).get("_ex_iterable"))
    return any(type(stage).__name__ == _SHUFFLE_BUFFER for stage in stages)


def why_replayed(dataset: Any, num_batches: int) -> str:
    """Return the warning for a dataset whose delivered batches are loaded again after a resume."""
    why = "has no state_dict()"
    if has_shuffle_buffer(dataset):
        why = "does not save its shuffle buffer in state_dict()"
    return (
        f"the dataset {why}, so {num_batches} batches are loaded again and dropped to reach the "
        "saved position"
    )


def _stages_of(stage: Any) -> Iterator[Any]:
    waiting, seen = [stage], 0
    while waiting and seen < _MAX_STAGES:
        stage, seen = waiting.pop(), seen + 1
        if stage is not None:
            yield stage
            inner = getattr(stage, "__dict__", {})
            waiting.append(inner.get("ex_iterable"))
            waiting.extend(inner.get("ex_iterables") or ())


def load_stream_state(dataset: Any, state: Any) -> None:
    """Restore the position of a dataset before it is iterated."""
    dataset.load_state_dict(state)


def forget_stream_state(dataset: Any) -> None:
    """Make a dataset begin its next epoch at the start, after a state was loaded into it.

    A Hugging Face dataset starts every iteration from a loaded state until its epoch is changed.
    Other datasets begin at the start, as they do after each epoch.
    """
    if getattr(dataset, "__dict__", {}).get("_starting_state_dict") is not None:
        dataset._starting_state_dict = None
