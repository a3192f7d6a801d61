"""WorkerRestarts detects hung, silent and suspended workers from the status cells."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.loading.bad_samples import MAX_SUBSTITUTES
from penstock.engine.memory.messages import (
    CONTROL_BYTES,
    IS_IDLE,
    NOTHING,
    NUM_SAMPLES,
    SINCE,
    Lease,
    WorkerTask,
    position_cell,
)
from penstock.engine.parent import restarts as recovery
from penstock.engine.parent.faults import Faults
from penstock.engine.parent.in_flight import LeaseQueue
from penstock.engine.parent.restart_decision import DEATHS_ALONE, SUSPECT, RestartPolicy
from penstock.engine.parent.restarts import WorkerRestarts, is_crash
from penstock.errors import SampleTimeout, Stuck, WorkerDied
from penstock.options import SharedOptions, options_of
from penstock.order.epoch_state import EpochState

pytestmark = pytest.mark.legacy

PASS_NUMBER = 3


class Clock:
    now_s = 1000.0

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Pool:
    """Two workers that are never started."""

    can_replace = True
    host = "fork server"

    def __init__(self) -> None:
        self.processes = [SimpleNamespace(pid=pid, exitcode=None) for pid in (100, 101)]
        self.replaced: list[int] = []

    def stack_of(self, worker: int) -> str:
        return f"  File of worker {worker}"

    def replace(self, worker: int) -> None:
        self.replaced.append(worker)


class Scene:
    """Worker 0 has samples 70 to 73 at positions 20 to 23. Worker 1 is idle."""

    def __init__(self, **limits: Any) -> None:
        self.cells = memoryview(bytearray(CONTROL_BYTES)).cast("q")
        for cell in range(64):
            self.cells[cell] = NOTHING
        self.pool = Pool()
        self.lease_queue = LeaseQueue(2, in_turn=True)
        options = {name: option.default for name, option in options_of(SharedOptions).items()}
        self.faults = Faults({**options, **limits}, EpochState(None))
        self.recovery = WorkerRestarts(
            pool=self.pool,  # type: ignore[arg-type]
            lease_queue=self.lease_queue,
            cells=self.cells,
            faults=self.faults,
            task=WorkerTask(
                is_iterable=False,
                auto_collation=True,
                drop_last=False,
                per_sample=True,
                base_seed=0,
                substitute_seed=0,
                shared_seed=None,
            ),
            policy=RestartPolicy(self.faults.max_restarts),
        )
        self.recovery.begin(PASS_NUMBER, None)
        self.lease_queue.give(
            Lease(PASS_NUMBER, 5, 0, [70, 71, 72, 73], 20, 4, 0, True, (0, 0), 0, 0)
        )
        self.show(IS_IDLE, 1)

    def show(self, cell: int, value: int) -> None:
        self.cells[position_cell(0) + cell] = value

    def load(self, position: int, since_s: float) -> None:
        for cell, value in ((0, position), (NUM_SAMPLES, 1), (IS_IDLE, 0)):
            self.show(cell, value)
        self.show(SINCE, int(since_s * 1e9))

    def look(self) -> list[Any]:
        return self.recovery.overdue(waiting_since=0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recovery, "time", clock)
    return clock


def wait(scene: Scene, clock: Clock, seconds: float) -> list[Any]:
    """Check four times a second. Returns the first faults."""
    for _ in range(int(seconds * 4)):
        clock.now_s += 0.25
        faults = scene.look()
        if faults:
            return faults
    return []


def test_a_sample_past_its_limit_is_a_fault_with_index_position_and_stack(clock: Clock) -> None:
    scene = Scene(sample_timeout_s=2.0)
    scene.load(22, clock.now_s)
    assert wait(scene, clock, 2.0) == []
    (fault,) = wait(scene, clock, 0.25)
    assert (fault.worker, fault.index, fault.position, fault.how) == (0, 72, 22, "hung")
    assert fault.stack == "  File of worker 0"


def test_the_second_time_is_the_end_although_the_worker_moved_on_since(clock: Clock) -> None:
    scene = Scene(sample_timeout_s=2.0)
    scene.load(22, clock.now_s)
    (fault,) = wait(scene, clock, 3)
    scene.load(NOTHING, 0)  # the signal that requested its stack has ended the wait
    scene.recovery.replace(fault)
    scene.load(22, clock.now_s)
    (fault,) = wait(scene, clock, 3)
    scene.load(NOTHING, 0)
    with pytest.raises(SampleTimeout) as info:
        scene.recovery.replace(fault)
    assert info.value.sample_index == 72  # type: ignore[attr-defined]
    assert scene.pool.replaced == [0]


def test_a_thread_is_named_the_first_time_and_never_replaced(clock: Clock) -> None:
    scene = Scene(sample_timeout_s=2.0, on_error="skip")
    scene.pool.can_replace = False
    scene.load(22, clock.now_s)
    (fault,) = wait(scene, clock, 3)
    with pytest.raises(SampleTimeout):
        scene.recovery.replace(fault)
    assert scene.pool.replaced == []


def test_a_machine_that_slept_blames_nobody(clock: Clock) -> None:
    scene = Scene(sample_timeout_s=2.0)
    scene.load(22, clock.now_s)
    clock.now_s += 3600
    assert scene.look() == []
    (fault,) = wait(scene, clock, 3.0)  # control: from here on it counts
    assert 2.0 < fault.seconds < 3.0


def test_a_worker_that_does_not_take_its_work_is_replaced_and_the_second_time_stuck(
    clock: Clock,
) -> None:
    scene = Scene()
    assert wait(scene, clock, recovery.OWN_LIMIT_S - 1) == []
    (fault,) = wait(scene, clock, 2)
    assert (fault.worker, fault.how) == (0, "silent")
    scene.recovery.replace(fault)
    assert scene.pool.replaced == [0]
    (fault,) = wait(scene, clock, recovery.OWN_LIMIT_S + 1)
    with pytest.raises(Stuck, match="worker 0 has work but does not start it") as info:
        scene.recovery.replace(fault)
    assert "File of worker 1" in info.value.stacks  # type: ignore[attr-defined]


def test_one_that_works_for_long_is_not_silent(clock: Clock) -> None:
    scene = Scene()
    scene.load(22, 0)
    assert wait(scene, clock, 10 * recovery.OWN_LIMIT_S) == []


def test_waiting_for_nobody_is_stuck(clock: Clock) -> None:
    scene = Scene()
    scene.lease_queue.take_back(0, (PASS_NUMBER, 5, 0))
    with pytest.raises(Stuck, match="no worker has work, but a batch is missing"):
        wait(scene, clock, recovery.OWN_LIMIT_S + 1)


def lose(scene: Scene, position: int, **facts: Any) -> list[Any]:
    """Let worker 0 die at this position. Returns the first message to its replacement."""
    scene.load(position, 0)
    death = SimpleNamespace(pid=100, exit_code=-11, **{"is_orphaned": False, **facts})
    return scene.recovery.replace(scene.recovery.fault_of(0, death))  # type: ignore[arg-type]


DEATHS = SUSPECT + DEATHS_ALONE


def test_a_sample_is_tried_alone_from_the_second_death_on(clock: Clock) -> None:
    scene = Scene(on_error="skip")
    assert lose(scene, 22) == []
    (trial,) = lose(scene, 22)
    assert trial.trial == (2, 1)
    assert lose(scene, 22) == [trial]
    assert lose(scene, 22) == []  # the sample is skipped
    assert list(scene.faults.poison) == [72]


def test_a_trial_is_repeated_by_a_worker_that_was_lost_before_it(clock: Clock) -> None:
    scene = Scene()
    lose(scene, 22)
    (trial,) = lose(scene, 22)
    for _ in range(3):
        assert lose(scene, NOTHING, is_orphaned=True) == [trial]


def test_a_trial_that_succeeds_clears_the_sample(clock: Clock) -> None:
    scene = Scene()
    for _ in range(4):
        lose(scene, 22)
        assert len(lose(scene, 22)) == 1
        scene.recovery.note_trial(0)
    assert not scene.faults.poison


@pytest.mark.parametrize("how", ["idle", "together", "orphaned", "one after the other", "none"])
def test_a_loss_that_no_sample_explains_is_known(clock: Clock, how: str) -> None:
    scene = Scene()
    if how == "together":
        scene.pool.processes[1].exitcode = -9
    scene.load(22, 0)
    scene.show(IS_IDLE, int(how == "idle"))
    death: Any = SimpleNamespace(pid=100, exit_code=-9, is_orphaned=how == "orphaned")
    fault = scene.recovery.fault_of(0, death)
    assert fault.is_outside is (how in ("idle", "together", "orphaned"))
    clock.now_s += 10.0 if how == "one after the other" else 0.01
    scene.cells[position_cell(1) + IS_IDLE] = 0
    fault = scene.recovery.fault_of(1, death)
    assert fault.is_outside is (how != "one after the other")


@pytest.mark.skipif(sys.platform == "win32", reason="exit codes do not tell there")
def test_an_exit_code_tells_a_crash_from_a_kill() -> None:
    kills = [-9, -15, -1, -2, -3, None]
    assert [code for code in (*kills, -11, -6, -7, 0, 1, 7) if is_crash(code)] == [
        -11,
        -6,
        -7,
        0,
        1,
        7,
    ]


def test_two_that_crash_at_once_were_not_killed_from_outside(clock: Clock) -> None:
    scene = Scene()
    scene.pool.processes[1].exitcode = -11
    scene.load(22, 0)
    for code, is_outside in ((-11, False), (-9, True)):
        death: Any = SimpleNamespace(pid=100, exit_code=code, is_orphaned=False)
        assert scene.recovery.fault_of(0, death).is_outside is is_outside


def test_a_stopped_worker_is_no_hung_sample(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(sample_timeout_s=2.0)
    monkeypatch.setattr(scene.recovery, "_is_stopped", lambda worker: True)
    for _ in range(SUSPECT + DEATHS_ALONE):  # a hang is fatal the second time
        scene.load(22, clock.now_s)
        (fault,) = wait(scene, clock, 3)
        scene.recovery.replace(fault)
    assert scene.pool.replaced == [0] * 4


def test_what_is_left_out_once_and_still_loses_workers_is_the_end(clock: Clock) -> None:
    scene = Scene(on_error="skip")
    for _ in range(DEATHS):
        lose(scene, 22)
    assert [row for row, _ in scene.lease_queue.owed(0)[0].poison_rows] == [2]
    assert list(scene.faults.poison) == [72]
    for _ in range(DEATHS - 1):
        lose(scene, 22)
    with pytest.raises(WorkerDied):
        lose(scene, 22)  # for example, an on_error function that crashes


def test_substitutes_that_lose_workers_are_passed_over_up_to_their_number(clock: Clock) -> None:
    scene = Scene(on_error="replace")
    for _ in range(DEATHS * (MAX_SUBSTITUTES + 2) - 1):
        lose(scene, 22)
    assert [row for row, _ in scene.lease_queue.owed(0)[0].poison_rows] == [2] * (
        MAX_SUBSTITUTES + 1
    )
    with pytest.raises(WorkerDied):
        lose(scene, 22)
