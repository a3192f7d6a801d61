"""The number of workers follows the work: simulated windows, no processes."""

from __future__ import annotations

import math

import pytest

from penstock.engine.parent.worker_tuning import NUM_AGREEING, WindowTotals, WorkerTuning
from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.worker_count import choose_num_workers, most_workers

pytestmark = pytest.mark.legacy

BOX = Machine(os="linux", num_cpus=2, memory_bytes=64 << 30, available_bytes=48 << 30)
REQUEST = LoaderRequest(batch_size=16)


def window(
    num_workers: int, *, wait_s: float, work_s: float = 0.0, step_s: float = 0.0, most: float = 1e9
) -> WindowTotals:
    """Return one second of ``num_workers`` on 2 cores that load from a server.

    Args:
        most: Requests a second that the server answers.
    """
    free = num_workers / (wait_s + work_s)
    by_cores = 2 / work_s if work_s else math.inf
    by_step = 16 / step_s if step_s else math.inf
    rate = min(free, by_cores, by_step, most)
    is_fed = rate == by_step
    leased_s = num_workers if not is_fed else rate * (wait_s + work_s)
    queued_s = leased_s - rate * (wait_s + work_s) if rate == by_cores else 0.0
    num_loaded = max(1, int(rate))
    return WindowTotals(
        wall_s=1.0,
        waited_s=0.0 if is_fed else 0.9,
        own_s=0.01,
        leased_s=float(leased_s),
        busy_s=rate * work_s + queued_s,
        num_batches=max(1, num_loaded // 16),
        num_loaded=num_loaded,
    )


def run(
    num_workers: int, num_windows: int, machine: Machine = BOX, **work: float
) -> tuple[list[int], list[str]]:
    """Return the number of workers after each window, and the reasons."""
    tuning, numbers, reasons = WorkerTuning(), [], []
    for second in range(num_windows):
        seen = window(num_workers, **work)
        known = Workload(
            **seen.measured(), num_samples=10**6, sample_bytes=8, num_running=num_workers
        )
        decided = tuning.decide(
            seen,
            num_workers,
            wanted=choose_num_workers(machine, REQUEST, known, "forkserver").value,
            most=most_workers(machine, REQUEST, known, "forkserver").num_workers - num_workers,
            now_s=float(second),
        )
        if decided is not None:
            num_workers = decided[0]
            reasons.append(decided[1])
        numbers.append(num_workers)
    return numbers, reasons


def test_it_goes_on_beyond_64_while_each_raise_pays() -> None:
    numbers, _ = run(64, 12, wait_s=0.02, work_s=0.0001)
    assert max(numbers) >= 128
    limited, reasons = run(64, 12, wait_s=0.02, work_s=0.0001, most=3_300)
    assert limited[-1] == 64
    assert any("not faster" in reason for reason in reasons)


def test_a_first_number_that_was_too_small_is_corrected_in_the_first_window() -> None:
    numbers, _ = run(1, 6, wait_s=0.02, work_s=0.0001)
    assert numbers[0] >= 8
    assert numbers[-1] >= 64


@pytest.mark.parametrize("facts", [{"max_fds": 512}, {"available_bytes": 8 << 30}])
def test_memory_and_open_files_hold_for_both_pools(facts: dict[str, int]) -> None:
    machine = BOX._replace(**facts)  # type: ignore[arg-type]
    most = most_workers(machine, REQUEST, Workload(), "forkserver").num_workers
    assert most < 512
    numbers, _ = run(32, 20, machine, wait_s=0.02)
    steps = zip([32, *numbers], numbers, strict=False)
    assert all(before + after <= most for before, after in steps if before != after)
    assert numbers[-1] > 32


def test_samples_that_compute_never_get_more_workers_than_cores() -> None:
    numbers, _ = run(2, 10, wait_s=0.0, work_s=0.01)
    assert numbers == [2] * 10


def test_fewer_are_taken_only_if_several_windows_agree() -> None:
    numbers, reasons = run(64, 4, wait_s=0.02, step_s=0.1)
    assert numbers[: NUM_AGREEING - 1] == [64] * (NUM_AGREEING - 1)
    assert numbers[-1] <= 8
    assert "enough" in reasons[0]
    assert run(4, 8, wait_s=0.02, step_s=0.1)[0][-1] >= 4  # these are needed


def test_waiting_and_decoding_gets_as_many_as_fill_the_cores() -> None:
    numbers, _ = run(20, 30, wait_s=0.018, work_s=0.002)
    assert 20 <= numbers[-1] <= 64
    assert numbers[-1] == numbers[-2]


def test_samples_that_compute_give_up_workers_though_the_training_loop_waits() -> None:
    assert run(64, 4, wait_s=0.0, work_s=0.002)[0][-1] == 2
    assert run(64, 8, wait_s=0.018, work_s=0.002)[0] == [64] * 8  # these wait in between


def test_fewer_that_are_not_enough_are_raised_again_and_kept() -> None:
    tuning, numbers, num_workers = WorkerTuning(), [], 40
    for second in range(50):
        seen = window(num_workers, wait_s=0.02, step_s=0.011)  # 29 workers are enough
        decided = tuning.decide(seen, num_workers, wanted=14, most=99, now_s=float(second))
        num_workers = decided[0] if decided is not None else num_workers
        numbers.append(num_workers)
    assert 14 in numbers  # tried
    last = len(numbers) - numbers[::-1].index(14)
    assert last < 20
    assert numbers[-1] >= 28


def test_a_window_with_a_worker_that_ended_says_nothing() -> None:
    seen = window(4, wait_s=0.02)
    assert seen.is_known
    assert not seen.plus(seen._replace(busy_s=math.nan)).is_known
    assert not WindowTotals().is_known


def test_a_number_that_could_not_be_started_is_asked_for_later() -> None:
    tuning, seen = WorkerTuning(), window(8, wait_s=0.02)

    def ask(now_s: float) -> bool:
        decided = tuning.decide(seen, 8, wanted=16, most=99, now_s=now_s)
        if decided is not None:
            tuning.give_up(now_s)
        return decided is not None

    asked_s = [now_s for now_s in range(60) if ask(float(now_s))]
    assert asked_s[0] == 0
    assert 2 <= len(asked_s) <= 6
