"""Every choice has a value, a reason and a source."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.machine.facts import Gpu, Machine
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.planner import make_plan
from penstock.planning.worker_count import choose_num_workers, should_measure

pytestmark = pytest.mark.legacy

GIB = 1 << 30


def box(**facts: object) -> Machine:
    """A plain Linux machine with 4 cores, except for ``facts``."""
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
    wishes: dict[str, object] = {"batch_size": 64, **request}
    return choose_num_workers(machine or box(), LoaderRequest(**wishes), work, method)  # type: ignore[arg-type]


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
    assert "with workers a round would take" in choice.reason


def test_a_short_epoch_is_not_worth_starting_workers() -> None:
    few = Workload(sample_s=1e-4, busy_share=1.0, num_samples=2_000)
    assert workers(few).value == 0
    assert "starting them costs" in workers(few).reason
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
    assert "the step limits" in choice.reason


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
    assert "a round would take" in choice.reason
    idle = Workload(sample_s=0.002, busy_share=1.0, num_samples=10**6, step_s=1.0, step_busy_s=0.1)
    assert workers(idle).value == 1


def test_samples_that_wait_get_more_workers_than_cores() -> None:
    waiting = Workload(sample_s=0.01, busy_share=0.02, num_samples=50_000)
    choice = workers(waiting, box(num_cpus=2))
    assert 8 <= choice.value <= 32
    assert "wait" in choice.reason


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


def test_the_pool_follows_the_number_of_workers_and_the_machine() -> None:
    def pool(machine: Machine, **request: object) -> Choice:
        return make_plan(machine, LoaderRequest(**request), Workload()).pool  # type: ignore[arg-type]

    assert pool(box(), num_workers=0).value == "inline"
    assert pool(box(), num_workers=2).value == "process"
    frozen = pool(box(can_start_python=False, is_frozen=True), num_workers=2)
    assert frozen.value == "thread"
    assert "frozen" in frozen.reason
    for asked in ("process", "thread", "inline"):
        choice = pool(box(), num_workers=4, pool=asked)
        assert (choice.value, choice.source) == (asked, "asked")


@pytest.mark.parametrize(
    ("asked", "platform", "value", "source"),
    [
        (None, "linux", "forkserver", "rule"),
        ("forkserver", "linux", "forkserver", "asked"),
        ("fork", "linux", "fork", "asked"),
        ("spawn", "linux", "spawn", "asked"),
        (None, "darwin", "spawn", "rule"),
        (None, "win32", "spawn", "rule"),
        ("fork", "darwin", "fork", "asked"),
    ],
)
def test_the_start_method(asked: str | None, platform: str, value: str, source: str) -> None:
    request = LoaderRequest(num_workers=2, start_method=asked)
    choice = make_plan(box(os=platform), request, Workload()).start_method
    assert (choice.value, choice.source) == (value, source)


@pytest.mark.parametrize("pool", ["thread", "inline"])
def test_pools_without_processes_have_no_start_method(pool: str) -> None:
    plan = make_plan(
        box(), LoaderRequest(num_workers=2, pool=pool, start_method="spawn"), Workload()
    )
    assert plan.start_method.value is None
    assert plan.threads_per_worker.value is None


def test_prefetch_that_was_given_is_obeyed_and_else_measured() -> None:
    given = make_plan(box(), LoaderRequest(num_workers=2, prefetch_factor=3), Workload())
    assert given.prefetch_factor == Choice(3, "prefetch_factor was given", "asked")
    assert (
        make_plan(box(), LoaderRequest(num_workers=2), Workload()).prefetch_factor.source
        == "measured"
    )
    assert make_plan(box(), LoaderRequest(num_workers=0), Workload()).prefetch_factor.value == 0


def test_workers_are_kept_where_starting_them_is_slow() -> None:
    request = LoaderRequest(num_workers=2)
    assert make_plan(box(os="win32"), request, Workload()).persistent_workers.value is True
    assert make_plan(box(), request, Workload()).persistent_workers.value is False
    asked = make_plan(box(), LoaderRequest(num_workers=2, persistent_workers=True), Workload())
    assert asked.persistent_workers.source == "asked"


def test_pinning_follows_the_gpu() -> None:
    card = Gpu(name="H200", vendor="nvidia", architecture="sm_90")
    with_gpu = box(gpus=(card,), torch_build="cuda")
    assert make_plan(with_gpu, LoaderRequest(), Workload()).pin_memory.value is True
    assert make_plan(box(), LoaderRequest(), Workload()).pin_memory.value is False
    left_out = make_plan(with_gpu, LoaderRequest(pin_memory=False), Workload()).pin_memory
    assert left_out.value is False
    assert "H200" in left_out.reason
    asked = make_plan(box(), LoaderRequest(pin_memory=True), Workload()).pin_memory
    assert (asked.value, asked.source) == (True, "asked")


def test_slot_memory_is_counted_and_checked_against_what_is_free() -> None:
    request = LoaderRequest(num_workers=4, batch_size=64, prefetch_factor=2)
    plan = make_plan(box(), request, SLOW)
    assert plan.slot_memory.value == 4 * 2 * 64 * 150_000
    assert plan.warnings == ()
    tight = make_plan(box(available_bytes=50 << 20), request, SLOW)
    assert "free" in tight.warnings[0]


def test_what_was_asked_for_and_hurts_is_obeyed_with_a_warning() -> None:
    fork = LoaderRequest(num_workers=2, start_method="fork")
    plan = make_plan(box(has_gpu_context=True), fork, Workload())
    assert plan.start_method.value == "fork"
    assert "GPU context" in plan.warnings[0]
    assert make_plan(box(), fork, Workload()).warnings == ()
    laptop = box(os="win32", torch_build="cuda")
    plan = make_plan(laptop, LoaderRequest(num_workers=12), Workload())
    assert plan.num_workers.value == 12
    assert "1455" in plan.warnings[0]


def test_a_plan_reads_as_a_table_with_every_reason_and_turns_into_json() -> None:
    plan = make_plan(
        box(has_gpu_context=True), LoaderRequest(num_workers=2, start_method="fork"), Workload()
    )
    text = str(plan)
    for name, choice in plan.choices.items():
        assert name in text
        assert choice.reason in text
    assert "warning: " in text
    assert json.loads(json.dumps(plan.to_dict()))["num_workers"]["value"] == 2


def test_starting_more_workers_than_cores_costs_more_than_starting_two() -> None:
    waits = Workload(sample_s=0.004, busy_share=0.1, num_samples=3_000)
    pair = Machine(os="linux", num_cpus=2, memory_bytes=16 << 30, available_bytes=16 << 30)
    request = LoaderRequest(batch_size=8, start_method="spawn")
    assert make_plan(pair, request, waits).num_workers.value == 0
    long = make_plan(pair, request, replace(waits, num_samples=300_000)).num_workers
    short = make_plan(
        pair, LoaderRequest(batch_size=8), replace(waits, num_samples=300)
    ).num_workers
    assert 2 < short.value < long.value


def test_a_dataset_smaller_than_a_batch_is_not_counted_as_a_whole_one() -> None:
    one = Workload(sample_s=0.02, busy_share=1.0, num_samples=1)
    pair = Machine(os="linux", num_cpus=2)
    assert make_plan(pair, LoaderRequest(batch_size=64), one).num_workers.value == 0
