"""Entry points of workers that start without a new interpreter: threads, and forks on request.

The loader passes them to the parent's side of the engine, which does not import this side.

Tested by ``tests/integration/engine/worker/test_loop.py``.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from penstock.engine.memory.messages import ParentMessage, WorkerTask
from penstock.engine.memory.shared_file import SharedFile


def make_thread_worker(
    *,
    number: int,
    task: WorkerTask,
    objects: dict[str, Any],
    memory: SharedFile,
    leases: queue.SimpleQueue[list[ParentMessage] | None],
    replies: queue.SimpleQueue[tuple[int, Any]],
    cells: memoryview,
    generator_lock: Any,
) -> Callable[[], None]:
    """Return the function that a worker thread runs until it is stopped."""
    from penstock.engine.worker.loop_choice import make_loop
    from penstock.engine.worker.parent_link import QueueConnection

    worker = make_loop(
        number=number,
        task=task,
        objects=objects,
        connection=QueueConnection(number, memory, leases, replies),
        cells=cells,
        generator_lock=generator_lock,
        is_thread=True,
    )
    return worker.run


def run_forked_worker(
    channel: Any,
    memory: SharedFile,
    objects: dict[str, Any],
    given: tuple[WorkerTask, int, int, int],
) -> None:
    """Run a worker that was forked from the user's process at the user's request.

    Args:
        given: The task, the worker's number, the number of workers, and the parent's pid.
    """
    import torch

    from penstock.engine.loading import slot_collate
    from penstock.engine.memory import payload
    from penstock.engine.memory.messages import STACK_FD, control_bytes, position_cell
    from penstock.engine.worker import main
    from penstock.engine.worker.loop_choice import make_loop
    from penstock.engine.worker.parent_link import PipeConnection, offer_stack
    from penstock.engine.worker.torch_templates import keep_generated_modules_in_memory

    task, number, num_workers, parent = given
    main.quiet_signals()
    keep_generated_modules_in_memory()
    main.watch_parent(parent)
    torch.set_num_threads(1)
    cells = memoryview(memory.map(0, control_bytes(num_workers, task.trace_bytes))).cast("q")
    cells[position_cell(number) + STACK_FD] = offer_stack()
    slot_collate.install_slot_collate()
    payload.prefer_references()
    objects = dict(objects)
    main.prepare_worker(number, num_workers, task, objects)
    connection = PipeConnection(channel, memory)
    main.serve(
        make_loop(number=number, task=task, objects=objects, connection=connection, cells=cells)
    )


ENTRY_POINTS: dict[str, Callable[..., Any]] = {
    "thread": make_thread_worker,
    "fork": run_forked_worker,
}
