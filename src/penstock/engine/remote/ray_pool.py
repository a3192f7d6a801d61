"""A pool of workers on the nodes of a Ray cluster.

    this process: RayPool.send -> NodeWorker.enqueue, NodeWorker.take     (actor calls, in order)
    a node:       NodeWorker -> its worker process -> the batch in the node's shared memory
    this process: RayPool.receive <- the result of take, in Ray's object store -> the batch's slot

The dataset is put into the object store once, and each node fetches it once. A batch's bytes cross
the object store once, and are copied into the slot that the lease names. Each actor has one worker
process, so a sample that crashes costs a process, not the actor. A lost actor or node costs a new
actor, which loads the unanswered leases again.

The cells on the control page are copies: once a second, each actor reports what its worker does.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.engine.memory.messages import (
    CELLS_PER_WORKER,
    IS_IDLE,
    NOTHING,
    PASS_CELL,
    SINCE,
    STACK_FD,
    Lease,
    WorkerTask,
    control_bytes,
    on_node,
    position_cell,
    trace_buffers,
)
from penstock.engine.memory.shared_file import SharedFile, round_up
from penstock.engine.parent.pools import WorkerExit, living_pools
from penstock.engine.parent.process_pool import dump_leases
from penstock.engine.pickling.environment import describe_environment
from penstock.engine.pickling.exceptions import describe, rebuild
from penstock.engine.pickling.pickler import PickledObjects
from penstock.engine.remote.node_checks import check_node, find_local_paths
from penstock.engine.remote.node_clock import NodeClock
from penstock.engine.remote.node_worker import SENT_SETTINGS, NodeStatus, NodeWorker, Taken
from penstock.errors import MissingExtra, StartFailed

STATUS_S = 1.0
"""How often an actor reports what its worker does."""
LOST_S = 60.0
"""An actor that has not answered for this long is replaced. Ray reports most losses earlier."""
GATHER_S = 10.0
"""How long the pool waits for other nodes after the first has answered. Later ones join later."""
FREE_CPU_S = 15.0
"""How long actors wait if no CPU is free. After that, they share CPUs."""
REPLACED_S = 3.0
"""The same for an actor that replaces a lost one. The training loop waits for it."""
SLOW_START_S = 45.0
"""After this time, all actors that have not started share a CPU."""
START_LIMIT_S = 300.0
"""Time limit for the start of an actor."""
FETCH_LIMIT_S = 600.0
"""Time limit for a node that fetches the dataset and starts a process."""
READY_LIMIT_S = 600.0
"""Time limit for a worker that unpickles the dataset."""
MAX_LOST = 3
"""New actors that may be lost while they start."""
CALL_LIMIT_S = 30.0
"""Time limit for a call that needs milliseconds."""
_CONTROL, _LEASES = "control", "leases"


def connect() -> Any:
    """Return Ray, connected to a cluster.

    Raises:
        MissingExtra: Ray is not installed.
        StartFailed: There is no cluster.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise MissingExtra.named("ray", "pool='ray' needs Ray, which is not installed") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR")
        except ConnectionError as error:
            raise StartFailed(
                f"pool='ray' found no Ray cluster: {str(error).splitlines()[0]}",
                likely="no cluster runs on this machine, and RAY_ADDRESS is not set.",
                remedy="ray.init() before the loader is made, or `ray start --head`",
            ) from error
    return ray


def num_other_cpus() -> int:
    """Return the number of CPUs on the other nodes of the cluster."""
    ray = connect()
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return int(sum(node["Resources"].get("CPU", 0) for node in others))


def _on_other_nodes(ray: Any) -> Any:
    """Return a scheduling strategy for actors that must not take the cores of local workers."""
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    here = ray.get_runtime_context().get_node_id()
    return strategies.NodeLabelSchedulingStrategy({"ray.io/node-id": strategies.NotIn(here)})


class RemoteWorker:
    """A worker on a node, with the interface of a process.

    Its ``pid`` is None, because a pid of another machine means nothing here. ``address`` has it.
    """

    pid = None
    daemon = True

    def __init__(self, number: int, actor: Any, hello: Any, *, has_cpu: bool) -> None:
        self.name = f"penstock-worker-{number}"
        self.actor = actor
        self.has_cpu = has_cpu
        self.step = "hello"
        """What the new actor does: "hello", then "start", "clock", and at last "ready"."""
        self.pending: Any = hello
        """The result of the step. None if there is nothing to wait for."""
        self.begun_s = time.monotonic()
        self.unsent: list[Any] = []
        """Messages that wait until the worker is ready."""
        self.node = ""
        self.address = ""
        self.exitcode: int | None = None
        self.is_lost = False
        """True if the actor is gone or does not answer."""
        self.generation = 0
        self.takes: deque[Any] = deque()
        self.owed: dict[tuple[int, int, int], tuple[Lease, tuple[int, int]]] = {}
        """Unanswered leases, and the place of each in the node's shared memory."""
        self.free: list[tuple[int, int]] = []
        """Unused places in the node's shared memory."""
        self.file_bytes = 0
        self.status: Any = None
        """The status that the actor was asked for, and when."""
        self.asked_s = 0.0
        self.asked_ns = 0
        self.ready_limit_s: float | None = None
        """When the worker must have unpickled the dataset. None once it has."""
        self.head = 0
        self.clock = NodeClock()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor beside the calls that wait for replies. Returns a reference."""
        bound: Any = getattr(self.actor, method)
        return bound.options(concurrency_group=_CONTROL).remote(*arguments)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Do nothing. The pool notices the end of the worker."""

    def kill(self) -> None:
        self.call("end_worker")

    terminate = kill

    def take_place(self, num_bytes: int) -> tuple[int, int]:
        """Return a place for a batch of this capacity in the node's shared memory."""
        self.free = [place for place in self.free if place[1] >= num_bytes]
        if self.free:
            return self.free.pop()
        offset, size = self.file_bytes, round_up(num_bytes)
        self.file_bytes = offset + size
        return offset, size

    def restart(self) -> None:
        """Prepare for a new worker process."""
        self.generation += 1
        self.takes.clear()
        self.free += [place for _, place in self.owed.values()]
        self.owed.clear()
        self.exitcode, self.status = None, None


class RayPool:
    """Workers as Ray actors. Call :meth:`stop` to end them all.

    If any worker can load any batch, the pool is complete when the first one is ready. The others
    join later: those on slow nodes, and those that wait for a free CPU or for a new node.

    Args:
        num_workers: Workers of the loader, here and on nodes. Those from ``first`` on are on nodes.
        pickled: ``objects``, if they are already pickled.
        memory: The shared file that holds the slots.
        note: Adds a note to the plan. See :meth:`penstock.engine.parent.context.LoadContext.note`.
        warn: Warns the user.
    """

    can_replace = True
    host = "Ray actor or node"

    def __init__(
        self,
        *,
        num_workers: int,
        first: int = 0,
        task: WorkerTask,
        objects: dict[str, Any],
        pickled: PickledObjects | None,
        memory: SharedFile,
        cells: memoryview,
        note: Callable[..., None],
        warn: Callable[[str], None],
    ) -> None:
        self._ray = connect()
        self._task = task
        self._memory = memory
        self._cells = cells
        self._note = note
        self._warn = warn
        self._num_workers = num_workers
        self._first = first
        self._buffers = trace_buffers(cells, num_workers, task.trace_bytes)[first:]
        self._is_stopped = False
        self._owner = os.getpid()
        self._pass_number = NOTHING
        self._segments: dict[tuple[int, int], Any] = {}
        self._paths = find_local_paths(objects["dataset"])
        environment = describe_environment()
        self._environment = {name: environment[name] for name in SENT_SETTINGS}
        self._strategy = _on_other_nodes(self._ray) if first else "SPREAD"
        self._class = self._ray.remote(concurrency_groups={_CONTROL: 3, _LEASES: 1})(NodeWorker)
        self._needs_all = not task.per_sample
        self._num_lost = 0
        """Actors that were lost while they started, since one has joined."""
        self._num_losses = 0
        """Workers that were lost while they loaded."""
        self._heard_s = math.inf
        """When the first actor answered."""
        self.processes: list[Any] = [None] * (num_workers - first)
        self.ready: set[int] = set()
        pickled = pickled or PickledObjects(objects)
        for text in pickled.notes:
            note(text)
        try:
            self._objects = self._ray.put(pickled.for_other_machines())
            num_free = int(self._ray.available_resources().get("CPU", 0))
            workers = range(len(self.processes))
            for worker in workers:
                self._begin(worker)
            if self._needs_all or not first:
                self._await(workers, FREE_CPU_S, num_free)
        except BaseException:
            self.stop()
            raise
        living_pools.add(self)

    # -- starting --------------------------------------------------------------------------------

    def _begin(self, worker: int, *, has_cpu: bool = True) -> None:
        """Create the actor of a worker."""
        options = self._class.options(
            num_cpus=int(has_cpu), max_restarts=0, scheduling_strategy=self._strategy
        )
        actor = options.remote()
        hello = actor.hello.options(concurrency_group=_CONTROL).remote(self._paths)
        self.ready.discard(worker)
        self.processes[worker] = RemoteWorker(self._first + worker, actor, hello, has_cpu=has_cpu)

    def _await(self, workers: Sequence[int], free_cpu_s: float, num_free: int) -> None:
        """Wait until enough of these new workers are ready.

        Args:
            free_cpu_s: How long an actor that finds no free CPU waits for one.
            num_free: The number of CPUs that were free.
        """
        begin_s = time.monotonic()
        while not self._are_enough(workers, num_free):
            by_ref = {self.processes[worker].pending: worker for worker in workers}
            by_ref.pop(None, None)
            ready, _ = self._ray.wait(list(by_ref), num_returns=1, timeout=0.5)
            for ref in ready:
                self._proceed(by_ref[ref])
            waited_s = time.monotonic() - begin_s
            unplaced = [one for one in workers if self.processes[one].step == "hello"]
            if waited_s > START_LIMIT_S and unplaced:
                raise self._no_actor(unplaced)
            must_place = self._needs_all or len(unplaced) == len(workers)
            if waited_s > free_cpu_s and must_place:
                # At first, only as many as did not fit: the others may be slow to start.
                num_fit = num_free - (len(workers) - len(unplaced))
                is_late = waited_s > free_cpu_s + SLOW_START_S
                self._share_cpus(unplaced[0 if is_late else max(0, num_fit) :])
            for worker in workers:
                self._check_start(worker)

    def _are_enough(self, workers: Sequence[int], num_free: int) -> bool:
        num_ready = len(self.ready.intersection(workers))
        if self._needs_all or not num_ready:
            return num_ready == len(workers)
        num_heard = sum(self.processes[one].step != "hello" for one in workers)
        is_late = time.monotonic() > self._heard_s + GATHER_S
        return num_heard >= min(len(workers), num_free) or is_late

    def _proceed(self, worker: int) -> None:
        """Take the result of a worker's step, and begin the next one.

        Raises:
            StartFailed: The node is not fit, or too many actors were lost.
        """
        remote = self.processes[worker]
        try:
            found = self._ray.get(remote.pending, timeout=CALL_LIMIT_S)
        except self._ray.exceptions.RayError as error:
            self._num_lost += 1
            if self._num_lost > MAX_LOST or isinstance(error, self._ray.exceptions.RayTaskError):
                raise self._not_started(worker, error) from error
            self._kill(remote)
            self._begin(worker, has_cpu=remote.has_cpu)
            return
        if remote.step == "hello":
            self._heard_s = min(self._heard_s, time.monotonic())
            remote.node = found["node"]
            check_node(found, self._warn)
            remote.begun_s = time.monotonic()
            remote.file_bytes = round_up(control_bytes(self._num_workers, self._task.trace_bytes))
            number, task = self._first + worker, self._task._replace(node=remote.node)
            remote.step, remote.pending = (
                "start",
                remote.actor.start.remote(
                    number, self._num_workers, task, self._objects, self._environment, READY_LIMIT_S
                ),
            )
        elif remote.step == "start":
            state, detail = found
            if state == "failed":
                raise rebuild(pickle.loads(detail)[1])
            if state == "late":
                raise self._late(worker, detail)
            remote.asked_ns = remote.clock.now_ns()
            remote.step, remote.pending = "clock", remote.call("clock")
        else:
            remote.clock.note(remote.asked_ns, found)
            self._join(worker)

    def _join(self, worker: int) -> None:
        remote = self.processes[worker]
        remote.step, remote.pending, self._num_lost = "ready", None, 0
        self.ready.add(worker)
        runs = f"worker {self._first + worker} runs on node "
        exact = f"in the timeline, its clock is exact to {remote.clock.error_ns / 1e6:.1f} ms"
        self._note(f"{runs}{remote.node}; {exact}", instead_of=runs)
        if remote.unsent:
            self.send(worker, remote.unsent)

    def _check_start(self, worker: int) -> None:
        """Raise StartFailed if a node takes too long to fetch the dataset."""
        remote, limit_s = self.processes[worker], FETCH_LIMIT_S + READY_LIMIT_S
        if remote.step == "start" and time.monotonic() - remote.begun_s > limit_s:
            raise self._not_started(worker, TimeoutError("the dataset did not arrive there"))

    def _share_cpus(self, workers: list[int]) -> None:
        """Replace actors that wait for a CPU by actors that need none of their own."""
        workers = [worker for worker in workers if self.processes[worker].has_cpu]
        for worker in workers:
            self._kill(self.processes[worker])
            self._begin(worker, has_cpu=False)
        if workers:
            names = ", ".join(str(self._first + worker) for worker in workers)
            self._note(f"no CPU of the Ray cluster was free for worker {names}, which shares one")

    def _not_started(self, worker: int, error: BaseException) -> StartFailed:
        node = self.processes[worker].node
        return StartFailed(
            f"worker {self._first + worker} did not start{on_node(node)}: {_last_line(error)}",
            likely="Penstock is not installed on the node, or the node was lost.",
            remedy="install the same packages on all nodes, or ray.init(runtime_env={...})",
        )

    def _no_actor(self, workers: list[int]) -> StartFailed:
        resources = self._ray.available_resources()
        return StartFailed(
            f"{len(workers)} of {len(self.processes)} Ray actors did not start within "
            f"{START_LIMIT_S:g} s",
            likely=f"the cluster has no node for them. Free: {resources.get('CPU', 0):g} CPUs.",
            remedy="`ray status`, or a smaller num_workers",
        )

    def _late(self, worker: int, stack: str) -> StartFailed:
        return StartFailed(
            f"worker {self._first + worker} on node {self.processes[worker].node} did not unpickle "
            f"the dataset within {READY_LIMIT_S:g} s. Its stack:\n{stack}",
            likely="__setstate__ of the dataset waits for a lock, a file or a server.",
            remedy="open files and connections in __getitem__, on first use",
        )

    # -- leases and replies ----------------------------------------------------------------------

    def send(self, worker: int, leases: list[Any]) -> None:
        remote, places, sent = self.processes[worker], {}, []
        if remote.step != "ready":
            remote.unsent += leases
            return
        self._tell_pass()
        for lease in leases:
            if isinstance(lease, Lease):
                known = remote.owed.get(lease.key)  # a trial has the key of its lease
                place = known[1] if known else remote.take_place(lease.slot_bytes)
                remote.owed[lease.key] = lease, place
                places[lease.key] = place
                lease = lease._replace(segment=place, start=0)
            sent.append(lease)
        pass_number = max((one.pass_number for one in leases), default=NOTHING)
        remote.actor.enqueue.options(concurrency_group=_LEASES).remote(
            remote.generation, pass_number, remote.file_bytes, places, dump_leases(sent)
        )
        num_replies = sum(isinstance(one, Lease) for one in leases)
        take = remote.actor.take
        remote.takes.extend(take.remote(remote.generation) for _ in range(num_replies))

    def _tell_pass(self) -> None:
        """Tell all nodes that a new pass has begun, so that they drop leases of earlier ones."""
        if self._cells[PASS_CELL] != self._pass_number:
            self._pass_number = self._cells[PASS_CELL]
            for remote in self.processes:
                if remote.takes:
                    remote.call("set_pass", self._pass_number)

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return the replies that have arrived. Waits up to ``timeout_s`` for the first."""
        if self._is_stopped:
            time.sleep(min(timeout_s, 0.05))
            return []
        limit = time.monotonic() + timeout_s
        while True:
            self._ask_status()
            by_ref = self._references()
            left_s = max(0.0, limit - time.monotonic())
            if by_ref:
                ready, _ = self._ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
                if not ready and left_s:
                    ready, _ = self._ray.wait(list(by_ref), num_returns=1, timeout=left_s)
            else:
                ready = []
                time.sleep(min(left_s, 0.05))
            events: list[tuple[int, Any]] = []
            for worker in dict.fromkeys(map(by_ref.__getitem__, ready)):
                if self.processes[worker].pending is not None:
                    events += self._let_join(worker)
                else:
                    events += [(worker, event) for event in self._take_all(worker, set(ready))]
            events += self._find_lost()
            if events or time.monotonic() >= limit:
                return events

    def _let_join(self, worker: int) -> list[tuple[int, Any]]:
        """Take the next step of a worker that joins while others load."""
        remote = self.processes[worker]
        try:
            self._proceed(worker)
        except StartFailed as error:
            self._warn(f"worker {self._first + worker} is not used: {error}")
            remote.step, remote.pending = "refused", None
            self._kill(remote)
        except Exception as error:  # the dataset's own
            return [(worker, self._failed(worker, error))]
        return []

    def _references(self) -> dict[Any, int]:
        """Return what the actors have been asked for, and of which worker."""
        found = {}
        for number, remote in enumerate(self.processes):
            if remote.pending is not None:
                found[remote.pending] = number
            elif remote.exitcode is None:
                found.update(dict.fromkeys(remote.takes, number))
                if remote.status is not None:
                    found[remote.status] = number
        return found

    def _take_all(self, worker: int, ready: set[Any]) -> list[Any]:
        """Return the messages of a worker that have arrived, in order."""
        remote, events = self.processes[worker], []
        try:
            if remote.status in ready:
                found = self._ray.get(remote.status, timeout=CALL_LIMIT_S)
                remote.status = None
                self._show(worker, found, asked_ns=remote.asked_ns)
            while remote.takes and remote.takes[0] in ready:
                taken = self._ray.get(remote.takes[0], timeout=CALL_LIMIT_S)
                remote.takes.popleft()
                events += self._open(worker, taken)
        except self._ray.exceptions.RayTaskError as error:
            events.append(self._failed(worker, error.as_instanceof_cause()))
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            events.append(self._lose(worker, _first_line(error)))
        return events

    def _open(self, worker: int, taken: Taken) -> list[Any]:
        """Copy a batch into its slot. Returns the messages of the worker."""
        remote = self.processes[worker]
        events = [pickle.loads(message) for message in taken.messages]
        if taken.key is not None:
            lease, place = remote.owed[taken.key]
            if taken.content is not None:
                self._write(lease, taken.content)
            if events[-1].kind != "tried":
                del remote.owed[taken.key]
                if not taken.is_slot_lost:
                    remote.free.append(place)
            events[-1] = events[-1]._replace(is_slot_lost=False)  # it is the node's
        if taken.end is not None:
            self._show(worker, taken.end, is_exact=True)
            code = taken.end.exit_code
            remote.exitcode = 1 if code is None else code
            remote.takes.clear()
            events.append(WorkerExit(pid=self._address(remote, taken.end.pid), exit_code=code))
        return events

    def _write(self, lease: Lease, content: np.ndarray) -> None:
        mapping = self._segments.get(lease.segment)
        if mapping is None:
            mapping = self._segments[lease.segment] = self._memory.map(*lease.segment)
        size = content.nbytes
        slot = np.frombuffer(mapping, dtype=np.uint8, count=size, offset=lease.start)
        slot[:] = content

    def _failed(self, worker: int, error: BaseException) -> tuple[str, Any]:
        """Return the event for an error of an actor, such as a full object store."""
        number = self._first + worker
        where = f"in Ray actor {number} on node {self.processes[worker].node}"
        return "failed", describe(error, worker=number, where=where)

    def _lose(self, worker: int, why: str) -> WorkerExit:
        remote = self.processes[worker]
        remote.exitcode, remote.is_lost = 1, True
        remote.takes.clear()
        self._num_losses += 1
        lost, last = "lost remote workers: ", f"worker {self._first + worker} on node {remote.node}"
        self._note(f"{lost}{self._num_losses}; the last was {last}: {why}", instead_of=lost)
        return WorkerExit(pid=remote.address, exit_code=None, is_orphaned=True)

    # -- watching --------------------------------------------------------------------------------

    def _ask_status(self) -> None:
        now_s = time.monotonic()
        period_s = STATUS_S / 2 if self._task.has_limit else STATUS_S
        for remote in self.processes:
            is_due = remote.status is None and now_s - remote.asked_s >= period_s
            if is_due and remote.exitcode is None and remote.step == "ready":
                remote.asked_s, remote.asked_ns = now_s, remote.clock.now_ns()
                remote.status = remote.call("status", remote.head)

    def _find_lost(self) -> list[tuple[int, Any]]:
        """Return the workers whose actor does not answer, or which do not become ready."""
        now_s = time.monotonic()
        events: list[tuple[int, Any]] = []
        for number, remote in enumerate(self.processes):
            if remote.exitcode is not None:
                continue
            try:
                self._check_start(number)
            except StartFailed as error:
                events.append((number, self._failed(number, error)))
            if remote.status is not None and now_s - remote.asked_s > LOST_S:
                ready, _ = self._ray.wait([remote.status], timeout=0)
                if not ready:
                    why = f"its actor did not answer for {LOST_S:g} s"
                    events.append((number, self._lose(number, why)))
            elif remote.ready_limit_s is not None and now_s > remote.ready_limit_s:
                late = self._late(number, self.stack_of(number))
                events.append((number, self._failed(number, late)))
        return events

    def _show(
        self, worker: int, status: NodeStatus, *, asked_ns: int = 0, is_exact: bool = False
    ) -> None:
        """Copy the status of a worker to the control page, and its records to the timeline.

        Args:
            is_exact: The worker has exited, so the status cannot have changed since.
        """
        remote = self.processes[worker]
        if asked_ns:
            remote.clock.note(asked_ns, status.now_ns)
        remote.address = self._address(remote, status.pid)
        cells = list(status.cells)
        if cells[IS_IDLE] != NOTHING:
            remote.ready_limit_s = None
        if not is_exact:
            # Leases and replies may be under way, so an idle worker is not a silent one.
            if cells[IS_IDLE] == 1 and remote.owed:
                cells[IS_IDLE] = 0
            limit_s = self._task.sample_timeout_s
            is_late = limit_s is not None and cells[SINCE] > limit_s * 1e9
            # Later, the sample may have ended. Only an age that was measured there counts.
            cells[SINCE] = time.monotonic_ns() - cells[SINCE] if is_late else 0
        cells[STACK_FD] = NOTHING
        first = position_cell(self._first + worker)
        for place, value in enumerate(cells):
            self._cells[first + place] = value
        if status.head is not None and status.head != remote.head:
            remote.clock.copy(status.records, self._buffers[worker])
            remote.head = status.head

    def _address(self, remote: RemoteWorker, pid: int | None) -> str:
        return f"{pid} on node {remote.node}"

    # -- ending ----------------------------------------------------------------------------------

    def replace(self, worker: int) -> None:
        """End a worker, and start a new one with the same number.

        A new actor joins later if others can load its leases meanwhile.

        Raises:
            StartFailed: The new worker does not start.
        """
        remote, first = self.processes[worker], position_cell(self._first + worker)
        for cell in range(first, first + CELLS_PER_WORKER):
            self._cells[cell] = NOTHING
        if remote.is_lost or not self._restart(remote):
            self._kill(remote)
            self._begin(worker)
            can_wait = remote.is_lost and not self._needs_all and (self.ready or self._first)
            if not can_wait:
                self._await([worker], REPLACED_S, 0)

    def _restart(self, remote: RemoteWorker) -> bool:
        """Start a new worker process in the same actor. Returns False if the actor fails too."""
        remote.restart()
        try:
            self._ray.get(remote.call("restart", remote.generation), timeout=CALL_LIMIT_S)
        except Exception:
            return False
        remote.ready_limit_s = time.monotonic() + READY_LIMIT_S
        return True

    def stack_of(self, worker: int) -> str:
        """Return the stack of a worker as text."""
        try:
            stack = self._ray.get(self.processes[worker].call("stack"), timeout=CALL_LIMIT_S)
        except Exception as error:
            return f"  (the stack could not be read: {_first_line(error)})"
        return str(stack)

    def stop(self) -> None:
        """End all workers. The time is bounded."""
        if self._is_stopped or self._owner != os.getpid():
            return
        self._is_stopped = True
        living_pools.discard(self)
        with suppress(Exception):  # Ray may have been shut down
            self._read_last()
        for remote in filter(None, self.processes):
            self._kill(remote)

    def _read_last(self) -> None:
        """Read the last records of the timeline."""
        asked = {
            remote.call("status", remote.head): number
            for number, remote in enumerate(self.processes)
            if self._buffers and remote and remote.exitcode is None and remote.step == "ready"
        }
        if asked:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=STATUS_S)
            for ref in ready:
                with suppress(Exception):
                    self._show(asked[ref], self._ray.get(ref, timeout=CALL_LIMIT_S))

    def _kill(self, remote: RemoteWorker) -> None:
        with suppress(Exception):  # it is dead, or Ray was shut down
            self._ray.kill(remote.actor)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_lines(error)[0]}"


def _last_line(error: BaseException) -> str:
    """Return the end of the text. In Ray's errors, it is the original exception."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
