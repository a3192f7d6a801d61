"""Turns a spawned or forked process into a worker and runs it until it exits.

    parent ==pipe==> spawned_main: assignment -> worker_main
    fork server ==fork==> worker_main

The user's main module is never run. A worker exits when its parent does.

Tested by ``tests/integration/engine/worker/test_loop.py``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import Any

from penstock.engine.memory.messages import (
    STACK_FD,
    WorkerAssignment,
    WorkerTask,
    control_bytes,
    on_node,
    position_cell,
)
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.pickling.environment import apply_environment
from penstock.engine.worker.torch_templates import keep_generated_modules_in_memory
from penstock.errors import NoStopIteration

_OPENCV_THREADS = "OPENCV_FOR_THREADS_NUM"


def worker_main(channel: Any, assignment: WorkerAssignment, fds: list[int]) -> None:
    """Turn this process into a worker and serve leases. Called in a forked or spawned child."""
    try:
        worker = _make_worker(channel, assignment, fds)
    except Exception as error:
        from penstock.engine.pickling.exceptions import describe

        number, node = assignment.worker, assignment.task.node
        where = f"in DataLoader worker process {number}{on_node(node)}"
        message = pickle.dumps(("failed", describe(error, worker=number, where=where)))
        if node:  # see NodeConnection
            message = pickle.dumps(("failed", 0, False, message))
        with suppress(OSError):  # another worker reported first, and the parent closed the pipe
            channel.send_bytes(message)
        return
    serve(worker)


def _make_worker(channel: Any, assignment: WorkerAssignment, fds: list[int]) -> Any:
    quiet_signals()
    keep_generated_modules_in_memory()
    apply_environment(assignment.environment)
    import torch

    from penstock.engine.loading import default_collate, slot_collate
    from penstock.engine.memory import payload
    from penstock.engine.pickling.unpickling import unpickle_objects
    from penstock.engine.worker.loop_choice import make_loop
    from penstock.engine.worker.parent_link import NodeConnection, PipeConnection, offer_stack
    from penstock.order.global_generators import use_bit_generator

    torch.set_num_threads(1)
    keep_opencv_single()
    memory = SharedFile.attach(assignment.memory)
    num_bytes = control_bytes(assignment.num_workers, assignment.task.trace_bytes)
    cells = memoryview(memory.map(0, num_bytes)).cast("q")
    cells[position_cell(assignment.worker) + STACK_FD] = offer_stack()
    objects = unpickle_objects(assignment.objects, fds)
    payload.remember_parent_classes()
    slot_collate.install_slot_collate()
    default_collate.register_collators(objects["collators"])
    use_bit_generator(objects["bit_generator"])
    number, task = assignment.worker, assignment.task
    prepare_worker(number, assignment.num_workers, task, objects)
    connection = (NodeConnection if task.node else PipeConnection)(channel, memory)
    return make_loop(number=number, task=task, objects=objects, connection=connection, cells=cells)


def keep_opencv_single() -> None:
    """Limit OpenCV to one thread in a worker, like torch, because the workers run in parallel.

    In every worker, OpenCV's pool has a thread for each core, and these threads spin between calls.
    A value of OpenCV's own variable takes precedence, and worker_init_fn can call
    ``cv2.setNumThreads``. Not called in a worker forked from the user's process, where OpenCV would
    wait for threads that the fork did not copy.
    """
    if _OPENCV_THREADS in os.environ:
        return
    os.environ[_OPENCV_THREADS] = "1"  # for a dataset that imports OpenCV later
    set_num_threads = getattr(sys.modules.get("cv2"), "setNumThreads", None)
    if set_num_threads is not None:
        set_num_threads(1)


def serve(worker: Any) -> None:
    """Run a worker until the parent exits or closes the connection."""
    from penstock.order.global_generators import watching_state_reads

    try:
        with watching_state_reads():
            worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        pass


def prepare_worker(
    number: int, num_workers: int, task: WorkerTask, objects: dict[str, Any]
) -> None:
    """Seed as PyTorch does, set get_worker_info(), and call the user's worker_init_fn.

    An exception is stored in ``objects["init_error"]`` and reported with the first lease, as in
    PyTorch.
    """
    import torch
    from torch.utils.data._utils import worker as torch_worker

    from penstock.engine.loading.fetch import seed_pipes
    from penstock.order.global_generators import save_generators
    from penstock.order.sample_randomness import seed_worker

    seed = seed_worker(task.base_seed, number, waits_for_numpy=objects["waits_for_numpy"])
    objects["dataset"] = seed_pipes(objects["dataset"], task.shared_seed)
    info_class: Any = torch_worker.WorkerInfo
    if task.is_iterable:
        from penstock.engine.loading.first_samples import ObservedWorkerInfo

        info_class = ObservedWorkerInfo
    torch_worker._worker_info = info_class(
        id=number, num_workers=num_workers, seed=seed, dataset=objects["dataset"]
    )
    try:
        init_fn = objects.get("worker_init_fn")
        if init_fn is not None:
            before, states = torch.initial_seed(), save_generators()
            with NoStopIteration("worker_init_fn"):
                init_fn(number)
            is_set = torch.initial_seed() != before
            objects["keeps_init_seed"] = is_set and task.keeps_init_seed
            left = save_generators()
            objects["init_states"] = left if left != states else None
    except Exception as error:
        objects["init_error"] = error


def quiet_signals() -> None:
    leave_ctrl_c_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # blocked since the process started: see start_child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_process(code: int = 0) -> None:
    """Exit a worker process as multiprocessing does: only run finalizers and flush streams."""
    global _exit_code
    _exit_code = code
    try:
        util._exit_function()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except Exception:
        _exit_code = code or 1
    _leave()


def shield_exit_handlers() -> None:
    """Prevent exit handlers registered before this call from running in this process.

    Handlers run in reverse order, so this one ends the process after those registered later.
    Removing the earlier ones instead could release objects of the user's process and run their
    ``__del__``.
    """
    atexit.register(_leave)


def _leave() -> None:
    code = _exit_code
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            code = code or 1
    os._exit(code)


_exit_code = 0


# -- spawned ---------------------------------------------------------------------------------------


def spawned_main(handle: int) -> None:
    """Entry point of a spawned worker."""
    if sys.platform == "win32":  # pragma: no cover
        from penstock.engine.memory import windows_handles as windows

        channel: Any = windows.connect(handle)
    else:
        from multiprocessing import connection

        channel = connection.Connection(handle)
    leave_ctrl_c_to_parent()
    try:
        parent, assignment, fds = pickle.loads(channel.recv_bytes())
    except EOFError:
        os._exit(0)  # the parent closed the pipe before this worker was ready
    watch_parent(parent)
    end_process(exit_code_of(lambda: worker_main(channel, assignment, fds)))


def watch_parent(parent: int) -> None:
    """Exit within about a second after the parent does, even while user code runs."""
    from penstock.machine.child_process import watched_parent

    is_running = watched_parent(parent)
    if not is_running():
        os._exit(1)

    def watch() -> None:
        while is_running():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-watch-parent", daemon=True).start()


def exit_code_of(life: Callable[[], None]) -> int:
    """Run a worker to its end. Returns the exit code that the interpreter would have used."""
    try:
        life()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0
