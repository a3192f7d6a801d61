"""The number of workers and its reason."""

from __future__ import annotations

import pytest

from penstock.machine.facts import Machine
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.worker_count import choose_num_workers, should_measure

pytestmark = pytest.mark.legacy

GIB = 1 << 30


def box(**facts: object) -> Machine:
    """Return a plain Linux machine with 4 cores, except for ``facts``."""
    plain: dict[str, object] = {
        "os": "linux",
        "num_cpus": 4,
        "memory_bytes": 16 * GIB,
        "available_bytes": 12 * GIB,
        "torch_build": "cpu",
    }
    return Machine(**{**plain, **facts})  # type: ignore[arg-type]


SLOW = Workload(sample_s=0.01, busy_share=1.0, num_samples=50_000, sample_bytes=150_000)
TINY = Workload(sample_s=2e-6, busy_share=1.0, num_samples=1_000_000, sample_bytes=16)


def workers(
    work: Workload, machine: Machine | None = None, method: str = "forkserver", **request: object
) -> Choice:
    given: dict[str, object] = {"batch_size": 64, **request}
    return choose_num_workers(machine or box(), LoaderRequest(**given), work, method)  # type: ignore[arg-type]


def test_a_number_of_workers_that_was_given_is_obeyed() -> None:
    assert workers(Workload(), num_workers=0) == Choice(0, "num_workers was given", "asked")
    assert workers(TINY, num_workers=99).value == 99


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_auto_starts_from_the_usable_cores_and_says_so(cores: int) -> None:
    machine = box(num_cpus=cores, available_bytes=256 * GIB, memory_bytes=256 * GIB)
    choice = workers(Workload(), machine)
    assert (choice.value, choice.source) == (cores, "rule")
    assert str(cores) in choice.reason


def test_slow_samples_use_the_cores() -> None:
    choice = workers(SLOW)
    assert (choice.value, choice.source) == (4, "measured")
    assert "640 ms" in choice.reason


def test_tiny_samples_stay_here_because_handing_over_costs_more() -> None:
    choice = workers(TINY)
    assert choice.value == 0
    assert "; with workers, about" in choice.reason


def test_a_short_epoch_is_not_worth_starting_workers() -> None:
    few = Workload(sample_s=1e-4, busy_share=1.0, num_samples=2_000)
    assert workers(few).value == 0
    assert "starting them takes" in workers(few).reason
    many = Workload(sample_s=1e-4, busy_share=1.0, num_samples=2_000_000)
    assert workers(many).value > 0


def test_spawning_must_save_more_than_forking_from_the_fork_server() -> None:
    work = Workload(sample_s=1e-3, busy_share=1.0, num_samples=5_000)
    assert workers(work, method="forkserver").value == 4
    assert workers(work, method="spawn").value == 0


def test_a_step_that_limits_needs_no_worker() -> None:
    quick = Workload(sample_s=1e-4, busy_share=1.0, num_samples=10**6, step_s=0.5)
    choice = workers(quick)
    assert choice.value == 0
    assert "the bottleneck is the step" in choice.reason


def test_no_more_workers_than_the_step_can_use() -> None:
    work = Workload(sample_s=0.001, busy_share=1.0, num_samples=10**6, step_s=0.08)
    assert workers(work, box(num_cpus=16)).value == 1  # 64 ms of loading behind a step of 80 ms
    quicker = Workload(sample_s=0.001, busy_share=1.0, num_samples=10**6, step_s=0.02)
    assert workers(quicker, box(num_cpus=16)).value == 4
    assert workers(Workload(sample_s=0.001, num_samples=10**6), box(num_cpus=16)).value == 16


def test_a_step_that_fills_the_cores_leaves_nothing_for_workers() -> None:
    work = Workload(sample_s=0.001, busy_share=1.0, num_samples=10**6, step_s=1.0, step_busy_s=3.9)
    choice = workers(work)
    assert choice.value == 0
    assert "; with workers, about" in choice.reason
    idle = Workload(sample_s=0.002, busy_share=1.0, num_samples=10**6, step_s=1.0, step_busy_s=0.1)
    assert workers(idle).value == 1


def test_samples_that_wait_get_more_workers_than_cores() -> None:
    waiting = Workload(sample_s=0.01, busy_share=0.02, num_samples=50_000)
    choice = workers(waiting, box(num_cpus=2))
    assert 48 <= choice.value <= 64
    assert "wait" in choice.reason


def test_only_as_many_waiting_workers_as_keep_the_step_fed() -> None:
    waiting = Workload(sample_s=0.02, busy_share=0.01, num_samples=50_000, step_s=0.1)
    assert 13 <= workers(waiting, box(num_cpus=2)).value <= 20  # 64 samples of 20 ms in 0.1 s


@pytest.mark.parametrize(
    ("facts", "most"), [({"available_bytes": GIB}, 10), ({"max_fds": 128}, 16)]
)
def test_waiting_workers_are_bounded_by_memory_and_open_files(
    facts: dict[str, int], most: int
) -> None:
    waiting = Workload(sample_s=0.02, busy_share=0.01, num_samples=50_000)
    assert workers(waiting, box(num_cpus=2, **facts)).value <= most
    assert workers(waiting, box(num_cpus=2)).value > most


def test_a_number_that_was_chosen_while_loading_is_kept_with_its_reason() -> None:
    waiting = Workload(sample_s=0.02, busy_share=0.01, num_samples=50_000)
    tuned = waiting._replace(tuned=(8, "16 were tried and were not faster"))
    choice = workers(tuned, box(num_cpus=2))
    assert choice.value == 8
    assert "samples wait 99% of the time" in choice.reason
    assert "16 were tried and were not faster" in choice.reason
    assert workers(waiting, box(num_cpus=2)).value > 8
    assert workers(tuned, box(num_cpus=2, max_fds=80)).value == 4


def test_more_than_64_need_times_that_were_measured_in_workers() -> None:
    waiting = Workload(sample_s=0.02, busy_share=0.005, num_samples=50_000)
    assert workers(waiting, box(num_cpus=2)).value <= 64
    assert workers(waiting._replace(num_running=64), box(num_cpus=2)).value > 64


def test_async_samples_wait_in_few_workers() -> None:
    work = Workload(sample_s=0.02 / 64, busy_share=0.01, num_samples=50_000, in_flight=64)
    choice = workers(work, box(num_cpus=2))
    assert 1 <= choice.value <= 2
    assert "64 async samples in flight" in choice.reason
    assert workers(work._replace(in_flight=0), box(num_cpus=2)).value > 2


def test_memory_bounds_the_workers() -> None:
    choice = workers(Workload(), box(num_cpus=64, available_bytes=GIB), method="spawn")
    assert choice.value == 1
    assert "memory" in choice.reason


def test_cuda_on_windows_bounds_the_workers_by_what_each_commits() -> None:
    laptop = box(os="win32", num_cpus=16, torch_build="cuda")
    choice = workers(Workload(), laptop, method="spawn")
    assert choice.value == 2
    assert "CUDA" in choice.reason
    assert workers(Workload(), box(os="win32", num_cpus=16), method="spawn").value == 16


def test_a_small_limit_on_files_bounds_the_workers() -> None:
    assert workers(Workload(), box(num_cpus=64, max_fds=128)).value == 16


@pytest.mark.parametrize(
    ("work", "value", "words"),
    [
        (Workload(is_iterable=True), 1, "iterable"),
        (Workload(is_in_memory=True), 0, "memory speed"),
        (Workload(stays_because="dataset.lock cannot travel"), 0, "dataset.lock"),
    ],
)
def test_some_work_needs_no_measuring(work: Workload, value: int, words: str) -> None:
    choice = workers(work)
    assert choice.value == value
    assert words in choice.reason
    assert not should_measure(box(), LoaderRequest(), work, "forkserver")


def test_a_worker_init_fn_is_not_gone_round() -> None:
    choice = workers(Workload(), has_init_fn=True)
    assert (choice.value, choice.source) == (4, "rule")
    assert "worker_init_fn" in choice.reason
    assert not should_measure(box(), LoaderRequest(has_init_fn=True), Workload(), "forkserver")


def test_samples_that_needed_no_workers_are_measured_again() -> None:
    assert should_measure(box(), LoaderRequest(batch_size=64), TINY, "forkserver")
    assert not should_measure(box(), LoaderRequest(batch_size=64), SLOW, "forkserver")
