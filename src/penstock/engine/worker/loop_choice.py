"""Which loop a worker runs. Used by worker processes and by worker threads in the training process.

Tested by ``tests/integration/engine/worker/test_async_loop.py``.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.memory.messages import WorkerTask
from penstock.engine.worker.loop import WorkerLoop


def make_loop(*, task: WorkerTask, **given: Any) -> WorkerLoop:
    """Return the loop of a worker. Only async datasets need an event loop."""
    if task.in_flight is None:
        return WorkerLoop(task=task, **given)
    from penstock.engine.worker.async_loop import AsyncWorkerLoop

    return AsyncWorkerLoop(task=task, **given)
