"""Compiles Triton kernels in child processes, several at once, so that no training step waits.

::

    this process                                    the children, without torch and without a GPU
    capture(run): the kernels that run() needs
    request(job)  -- JSON, in batches -->           compile into Triton's cache on disk
    is_compiled(job)  <-- a line for each job --
    run(): loads the kernels from the cache

Triton calls a hook before it compiles a kernel. The hook here takes the description that Triton
makes of the kernel, and has Triton skip the launch. A child compiles from that description, for the
GPU of this process. Triton before 3.4 has no such hook, and compiles when a kernel is first used.

Tested by ``tests/gpu/conv/test_kernel_compiler_cuda.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from penstock.machine.child_process import ChildProcess, end_with_parent, python_command

Job = tuple[str, str, str]
"""Module and name of a kernel, and Triton's description of one of its versions."""

MARK = "penstock-compiled:"
LIMIT_S = 120.0
"""Time limit for one kernel. A kernel that takes longer is compiled when it is first used."""
MAX_BATCH = 8
NUM_CHILDREN = max(1, min(8, (os.cpu_count() or 2) // 2))

_waiting: queue.Queue[Job] = queue.Queue()
_states: dict[Job, bool] = {}
"""False until a child has compiled the kernel, or has failed to."""
_num_threads = 0
_lock = threading.Lock()


def capture(run: Callable[[], Any]) -> list[Job]:
    """Call ``run`` without launching kernels that are not compiled yet, and return those kernels.

    Kernels that are compiled in this process are launched. What ``run`` computes is meaningless.
    """
    hooks = _hooks()
    if hooks is None:
        return []
    jobs: list[Job] = []
    thread, before = threading.get_ident(), hooks.jit_cache_hook

    def hook(**given: Any) -> Any:
        if threading.get_ident() != thread:  # a launch of another thread, which must take place
            return before(**given) if before else None
        about = given["fn"]
        jobs.append((about.module, about.name, given["compile"]["specialization_data"]))
        return True

    hooks.jit_cache_hook = hook
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
    with _lock:
        if job in _states:
            return
        _states[job] = False
        _waiting.put(job)
        if _num_threads < NUM_CHILDREN:
            _num_threads += 1
            target = _target()
            threading.Thread(
                target=_serve, args=(target,), name="penstock-compiler", daemon=True
            ).start()


def is_compiled(job: Job) -> bool:
    """Return True if a child is done with a kernel. If it failed, using the kernel tells why."""
    return _states.get(job, False)


def _target() -> list[Any]:
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def _serve(target: list[Any]) -> None:
    """Compile what is waiting, in one child after the other. Runs in a thread."""
    global _num_threads
    while True:
        batch: list[Job] = []
        with _lock:
            share = max(1, _waiting.qsize() // NUM_CHILDREN)
            while len(batch) < min(share, MAX_BATCH) and not _waiting.empty():
                batch.append(_waiting.get_nowait())
            if not batch:
                _num_threads -= 1
                return
        try:
            _compile_in_child(target, batch)
        finally:
            for job in batch:
                _states[job] = True


def _compile_in_child(target: list[Any], batch: list[Job]) -> None:
    given = {"parent": os.getpid(), "target": target, "jobs": batch}
    command = python_command("penstock.conv.kernel_compiler:compile_jobs")
    try:
        with ChildProcess(command, send=json.dumps(given).encode()) as child:
            while (line := child.read_line(LIMIT_S)) is not None:
                if line.startswith(MARK):
                    _states[batch[int(line[len(MARK) :])]] = True
    except (OSError, TimeoutError):
        pass  # the kernels are compiled when they are first used


# -- in the child ----------------------------------------------------------------------------------


class _Target:
    """Stands for the driver of a GPU that this process does not open."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_jobs() -> None:
    """Compile the kernels that standard input lists. Prints a line for each."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    given = json.loads(sys.stdin.read())
    end_with_parent(given["parent"])
    driver.set_active(_Target(GPUTarget(*given["target"])))
    for number, (module, name, description) in enumerate(given["jobs"]):
        try:
            kernel = getattr(importlib.import_module(module), name).preload(description)
            _build_launcher(given["target"][0], kernel)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        print(f"\n{MARK}{number}", flush=True)


def _build_launcher(backend: str, kernel: Any) -> None:
    """Build the C code that launches a kernel, which Triton caches too. It needs a C compiler."""
    folder, name = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}[backend]
    launcher = getattr(importlib.import_module(f"triton.backends.{folder}.driver"), name)
    launcher(kernel.src, kernel.metadata)
