"""The first code of our child processes: a fork server that forks workers, or one spawned worker.

    parent ==control socket==> fork_server_main: import torch; wait
        "import" modules       ->  import them ahead of the first fork
        "fork" + descriptors   ->  fork -> worker_main(desk, assignment)
        child exit             ->  ("exit", pid, status) to the parent
    parent ==pipe==> spawned_main: assignment -> worker_main

Neither runs the user's main module. Both end when the parent does.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from penstock.engine.memory import control_socket as protocol
from penstock.engine.memory.messages import (
    STACK_FD,
    WorkerAssignment,
    WorkerTask,
    control_bytes,
    position_cell,
)
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.stacks import offer_stack
from penstock.engine.pickling.environment import apply_environment

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.25
_OPENCV_THREADS = "OPENCV_FOR_THREADS_NUM"


def worker_main(channel: Any, assignment: WorkerAssignment, fds: list[int]) -> None:
    """Turn this process into a worker and serve. Called from: a forked or spawned child."""
    try:
        worker = _make_worker(channel, assignment, fds)
    except Exception as error:
        from penstock.engine.pickling.exceptions import describe

        number = assignment.worker
        report = describe(error, worker=number, where=f"in DataLoader worker process {number}")
        with suppress(OSError):  # another worker's report came first, and the parent hung up
            channel.send_bytes(pickle.dumps(("failed", report)))
        return
    serve(worker)


def _make_worker(channel: Any, assignment: WorkerAssignment, fds: list[int]) -> Any:
    _quiet_signals()
    apply_environment(assignment.environment)
    import torch

    from penstock.engine.loading import collate, slot_collate
    from penstock.engine.memory import payload
    from penstock.engine.pickling.pickler import unpickle_objects
    from penstock.engine.worker.connection import PipeConnection
    from penstock.engine.worker.loop import WorkerLoop

    torch.set_num_threads(1)
    keep_opencv_single()
    memory = SharedFile.attach(assignment.memory)
    num_bytes = control_bytes(assignment.num_workers, assignment.task.ring_bytes)
    cells = memoryview(memory.map(0, num_bytes)).cast("q")
    cells[position_cell(assignment.worker) + STACK_FD] = offer_stack()
    objects = unpickle_objects(assignment.objects, fds)
    payload.remember_parent_classes()
    slot_collate.install_slot_collate()
    collate.register_collators(objects["collators"])
    number, task = assignment.worker, assignment.task
    prepare_worker(number, assignment.num_workers, task, objects)
    connection = PipeConnection(channel, memory)
    return WorkerLoop(number=number, task=task, objects=objects, connection=connection, cells=cells)


def keep_opencv_single() -> None:
    """One thread for OpenCV in a worker, as for torch: the workers are the threads.

    Its pool has a thread for each core in every worker, which spins between calls. Whoever set
    OpenCV's own variable is obeyed, and worker_init_fn may call ``cv2.setNumThreads``. Not for a
    worker that was forked from the user's process, where OpenCV would wait for threads that are
    not there.
    """
    if _OPENCV_THREADS in os.environ:
        return
    os.environ[_OPENCV_THREADS] = "1"  # for a dataset that imports it later
    set_num_threads = getattr(sys.modules.get("cv2"), "setNumThreads", None)
    if set_num_threads is not None:
        set_num_threads(1)


def serve(worker: Any) -> None:
    """Run a worker until the parent is gone or has hung up."""
    from penstock.order.global_generators import counting_state_reads

    try:
        with counting_state_reads():
            worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        pass


def prepare_worker(
    number: int, num_workers: int, task: WorkerTask, objects: dict[str, Any]
) -> None:
    """Seed as PyTorch does, set get_worker_info(), call the user's worker_init_fn.

    An exception is kept in ``objects["init_error"]`` and reported with the first lease, as PyTorch
    does.
    """
    import torch
    from torch.utils.data._utils import worker as torch_worker

    from penstock.engine.loading.fetch import seed_pipes
    from penstock.order.sample_randomness import seed_worker

    seed = seed_worker(task.base_seed, number)
    objects["dataset"] = seed_pipes(objects["dataset"], task.shared_seed)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=objects["dataset"]
    )
    try:
        init_fn = objects.get("worker_init_fn")
        if init_fn is not None:
            before = torch.initial_seed()
            init_fn(number)
            is_set = torch.initial_seed() != before
            objects["keeps_torch_seed"] = is_set and task.obeys_init_seed
    except Exception as error:
        objects["init_error"] = error


def _quiet_signals() -> None:
    _leave_ctrl_c_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # it was blocked from the start: see start_child
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_process(code: int = 0) -> None:
    """Leave a worker process the way multiprocessing does: finalizers, streams, no more."""
    import atexit
    from multiprocessing import util

    try:
        util._exit_function()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        code = code or 1
    os._exit(code)


# -- spawned ---------------------------------------------------------------------------------------


def spawned_main(handle: int) -> None:
    """Entry of a worker that was spawned on its own."""
    if sys.platform == "win32":  # pragma: no cover
        from penstock.engine.memory import windows_pipes as windows

        channel: Any = windows.connect(handle)
    else:
        from multiprocessing import connection

        channel = connection.Connection(handle)
    _leave_ctrl_c_to_parent()
    try:
        parent, assignment, fds = pickle.loads(channel.recv_bytes())
    except EOFError:
        os._exit(0)  # the parent hung up before we were ready
    watch_parent(parent)
    end_process(_exit_code_of(lambda: worker_main(channel, assignment, fds)))


def watch_parent(parent: int) -> None:
    """End this process within about a second of the parent's end, also while user code runs."""
    import psutil

    try:
        process = psutil.Process(parent)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        while process.is_running():
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-watch-parent", daemon=True).start()


# -- fork server
# ---------------------------------------------------------------------------------------


def fork_server_main(control_fd: int) -> None:
    """Entry of the fork server: import what workers need, then fork on request until hung up on."""
    control = protocol.ControlSocket.from_fd(control_fd)
    _leave_ctrl_c_to_parent()
    with _ending_with_parent(control):
        import torch  # noqa: F401

        import penstock.engine.worker.connection
        import penstock.engine.worker.loop
        import penstock.order.sample_randomness  # noqa: F401

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # pages of what is loaded so far stay shared with every worker
    parent = protocol.watch_process(os.getppid())
    children: set[int] = set()
    try:
        control.send(("ready", os.getpid()))
        while True:
            is_request = protocol.wait_readable(control.fileno(), wake_read, parent)
            _reap(children, control)
            if is_request and not _serve_request(control, children, (wake_read, wake_write)):
                break
    except (OSError, EOFError, SystemExit):
        pass  # the parent is gone
    finally:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os._exit(0)


@contextmanager
def _ending_with_parent(control: Any) -> Iterator[None]:
    """End while modules are imported, which takes seconds, if the parent does.

    By a timer: a thread would have to be gone before the first fork, and the kernel's own way
    (PR_SET_PDEATHSIG) takes the end of the thread that started us for the end of the parent.
    """
    parent = os.getppid()

    def look(*_: Any) -> None:
        if os.getppid() != parent or control.has_hung_up():
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _reap(children: set[int], control: Any) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            children.discard(pid)
            control.send(("exit", pid, os.waitstatus_to_exitcode(status)))


def _serve_request(control: Any, children: set[int], wake: tuple[int, int]) -> bool:
    received = control.receive()
    if received is None:
        return False
    (kind, body), fds = received
    if kind == "import":
        with _ending_with_parent(control):
            _import_all(*body)
        control.send(("imported", os.getpid()))
        return True
    modules, path, payload = body
    with _ending_with_parent(control):
        answer, pid = _import_all(modules, path), 0
    if answer is None:
        try:
            pid = os.fork()
        except OSError as error:
            answer = ("refused", f"fork failed: {error}")
    if answer is not None:
        control.send(answer)
        for fd in fds:
            os.close(fd)
        return True
    if pid == 0:
        for fd in wake:
            os.close(fd)
        signal.set_wakeup_fd(-1)
        control.close()
        _become_worker(payload, fds)
    for fd in fds:
        os.close(fd)
    children.add(pid)
    control.send(("forked", pid))
    return True


def _import_all(modules: Any, path: list[str]) -> tuple[str, str] | None:
    """Import the user's modules once for all workers; says why this process is unfit to fork."""
    for name, generation in modules:
        if _generations.setdefault(name, generation) != generation:
            return "stale", f"{name} was reloaded since it was imported here"
    new = [name for name, _ in modules if name not in sys.modules]
    if new:
        sys.path[:] = path
    import importlib

    for name in new:
        try:
            importlib.import_module(name)
        except BaseException:
            continue  # the worker meets the same error, and reports it with its place
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        reason = f"importing {', '.join(new) or 'torch'} started {num_threads - 1} thread(s)"
        return "tainted", reason
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "tainted", f"importing {', '.join(new)} initialised the GPU"
    return None


_generations: dict[str, int] = {}


def _become_worker(body: bytes, fds: list[int]) -> None:
    """The rest of a forked child's life."""

    def become() -> None:
        import atexit
        import ctypes
        from multiprocessing import connection, util

        fork_server = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != fork_server:
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        atexit._clear()
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
        channel = connection.Connection(fds[0])
        assignment = protocol.place_fds(pickle.loads(body), fds)
        worker_main(channel, assignment, fds[3:])

    end_process(_exit_code_of(become))


def _exit_code_of(life: Callable[[], None]) -> int:
    """Run a worker to its end; what the interpreter would have made of it as an exit code."""
    try:
        life()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0
