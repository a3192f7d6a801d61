"""Compiles Triton kernels in child processes, several at once, so that no training step waits.

::

    this process                                    the children, without torch and without a GPU
    capture(run): the kernels that run() needs
    request(job)  -- a line of JSON -->             compile into Triton's cache on disk
    a thread loads the kernel  <-- a line --
    is_compiled(job)

Triton calls a hook before it compiles a kernel. The hook here takes the description that Triton
makes of the kernel, and has Triton skip the launch. A child compiles from that description, for the
GPU of this process. Triton before 3.4 has no such hook, and compiles when a kernel is first used.

Tested by ``tests/gpu/conv/test_kernel_compiler_cuda.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.machine.child_process import ChildProcess, end_with_parent, python_command

Job = tuple[str, str, str]
"""Module and name of a kernel, and Triton's description of one of its versions."""

MARK = "penstock-compiled"
KERNEL_MODULES = [
    f"penstock.conv.algorithms.{name}_kernels" for name in ("gemm", "winograd", "depthwise")
]
LIMIT_S = 120.0
"""Time limit for one kernel. A kernel that takes longer is compiled when it is first used."""
PAUSE_S = 0.005
"""Between parts of the preparation, in which no other Python code runs."""
IDLE_S = 2.0
"""How long a child waits for another kernel."""
NUM_CHILDREN = max(1, min(8, (os.cpu_count() or 2) // 2))

_waiting: queue.Queue[Job] = queue.Queue()
_states: dict[Job, bool] = {}
"""False until a child has compiled the kernel, or has failed to."""
_num_threads = 0
_lock = threading.Lock()
_capture_lock = threading.RLock()
"""Held while Triton's hook is changed. Two threads would put back each other's hooks."""
_set_up: threading.Event | None = None


def is_set_up() -> bool:
    """Return True if Triton is ready for kernels. The first call prepares it in a thread.

    Triton compiles its access to the driver with a C compiler, asks ``ptxas`` for its version, and
    parses the kernels' sources. Together that takes longer than a training step.
    """
    global _set_up
    if _set_up is None:
        _set_up = threading.Event()
        thread = threading.Thread(target=_prepare, name="penstock-compiler", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads, or Python exits: kernels prepare it when used
            _set_up.set()
    return _set_up.is_set()


def _prepare() -> None:
    assert _set_up is not None
    try:
        # The slow import comes first: it fits into the first training step, which is slow anyway.
        importlib.import_module("triton.compiler.code_generator")
        _target()
        for name in KERNEL_MODULES:
            for value in vars(importlib.import_module(name)).values():
                getattr(value, "cache_key", None)
                time.sleep(PAUSE_S)
        merge: Any = importlib.import_module(KERNEL_MODULES[0]).merge_groups
        tensors = [importlib.import_module("torch").float32] * 2
        capture(lambda: merge.warmup(*tensors, *[1] * 10, BLOCK=16, grid=(1,)))
    except Exception:
        pass  # using a kernel tells why
    finally:
        _set_up.set()


def capture(run: Callable[[], Any]) -> list[Job]:
    """Call ``run`` without launching kernels that are not compiled yet, and return those kernels.

    Kernels that are compiled in this process are launched. What ``run`` computes is meaningless.
    """
    hooks = _hooks()
    if hooks is None:
        return []
    jobs: list[Job] = []
    thread = threading.get_ident()

    def hook(**given: Any) -> Any:
        if threading.get_ident() != thread:  # a launch of another thread, which must take place
            return before(**given) if before else None
        about = given["fn"]
        jobs.append((about.module, about.name, given["compile"]["specialization_data"]))
        return True

    with _capture_lock:
        before, hooks.jit_cache_hook = hooks.jit_cache_hook, hook
        try:
            run()
        finally:
            hooks.jit_cache_hook = before
    return jobs


def _hooks() -> Any:
    try:
        from triton.knobs import runtime
    except ImportError:  # before 3.4
        return None
    return runtime if hasattr(runtime, "jit_cache_hook") else None


def request(job: Job) -> None:
    """Compile a kernel in a child, unless it was requested before."""
    global _num_threads
    target = _target()
    with _lock:
        if job in _states:
            return
        _states[job] = False
        _waiting.put(job)
        if _num_threads < NUM_CHILDREN:
            threading.Thread(
                target=_serve, args=(target,), name="penstock-compiler", daemon=True
            ).start()
            _num_threads += 1


def is_compiled(job: Job) -> bool:
    """Return True if a child is done with a kernel. If it failed, using the kernel tells why."""
    return _states.get(job, False)


def _target() -> list[Any]:
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def _serve(target: list[Any]) -> None:
    """Have children compile what is waiting, until nothing is for a while. Runs in a thread."""
    global _num_threads
    while True:
        try:
            _serve_child(target)
        except queue.Empty:
            with _lock:
                if _waiting.empty():
                    _num_threads -= 1
                    return
        except Exception:
            continue  # the kernel is compiled when it is first used


def _serve_child(target: list[Any]) -> None:
    """Have one child compile kernels.

    Raises:
        Empty: Nothing is waiting.
        OSError, TimeoutError: The child could not be started, ended, or took too long.
    """
    job = _waiting.get(timeout=IDLE_S)
    try:
        function = "penstock.conv.kernel_compiler:compile_jobs"
        command = python_command(function, str(os.getpid()), json.dumps(target))
        with ChildProcess(command, send=None) as child:
            while True:
                child.write(json.dumps(job).encode() + b"\n")
                while (line := child.read_line(LIMIT_S)) != MARK:
                    if line is None:
                        raise OSError("the child has ended")
                with contextlib.suppress(Exception):  # using the kernel tells why
                    _load(job)
                _states[job] = True
                job = _waiting.get(timeout=IDLE_S)
    finally:
        _states[job] = True


def _load(job: Job) -> Any:
    """Have Triton compile a kernel, or read it from the cache."""
    module, name, description = job
    return getattr(importlib.import_module(module), name).preload(description)


# -- in the child ----------------------------------------------------------------------------------


class _Target:
    """Stands for the driver of a GPU that this process does not open."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_jobs(parent: str, target: str) -> None:
    """Compile the kernels that standard input lists, one in a line. Prints a line for each."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    end_with_parent(int(parent))
    driver.set_active(_Target(GPUTarget(*json.loads(target))))
    for line in sys.stdin:
        try:
            _build_launcher(json.loads(target)[0], _load(json.loads(line)))
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        print(f"\n{MARK}", flush=True)


def _build_launcher(backend: str, kernel: Any) -> None:
    """Build the C code that launches a kernel, which Triton caches too. It needs a C compiler."""
    folder, name = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}[backend]
    launcher = getattr(importlib.import_module(f"triton.backends.{folder}.driver"), name)
    launcher(kernel.src, kernel.metadata)
