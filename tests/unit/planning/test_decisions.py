"""Every choice has a value, a reason and a source."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.machine.facts import Gpu, Machine
from penstock.planning.decisions import choose_start_method, make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice, label

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


def test_without_the_gil_workers_are_threads() -> None:
    free = box(is_gil_enabled=False)
    plan = make_plan(free, LoaderRequest(num_workers=2), Workload())
    assert (plan.pool.value, plan.start_method.value) == ("thread", None)
    assert plan.pool.reason.startswith("the GIL is off")
    asked = make_plan(free, LoaderRequest(num_workers=2, pool="process"), Workload())
    assert asked.pool.value == "process"
    assert make_plan(box(), LoaderRequest(num_workers=2), Workload()).pool.value == "process"


def test_a_gil_that_was_turned_on_again_is_a_reason_for_processes() -> None:
    machine = box(gil_enabled_by="cv2")
    pool = make_plan(machine, LoaderRequest(num_workers=2), Workload()).pool
    assert (pool.value, pool.reason) == ("process", "cv2 turned the GIL on")


@pytest.mark.parametrize(
    ("options", "work", "reason"),
    [
        ({"start_method": "spawn"}, {}, "multiprocessing_context='spawn' was given"),
        ({"has_sample_limit": True}, {}, "sample_timeout_s"),
        ({"has_init_fn": True}, {}, "worker_init_fn"),
        ({}, {"is_iterable": True}, "iterable"),
    ],
)
def test_without_the_gil_processes_are_used_for_what_threads_cannot_do(
    options: dict[str, Any], work: dict[str, Any], reason: str
) -> None:
    request = LoaderRequest(num_workers=2, **options)
    pool = make_plan(box(is_gil_enabled=False), request, Workload(**work)).pool
    assert pool.value == "process"
    assert reason in pool.reason


def test_threads_start_at_once_and_need_no_memory_of_their_own() -> None:
    work = Workload(sample_s=0.01, busy_share=1.0, num_samples=300)
    facts = {"os": "win32", "torch_build": "cuda", "available_bytes": GIB}
    free, usual = box(**facts, is_gil_enabled=False), box(**facts)
    request = LoaderRequest(batch_size=8)
    assert make_plan(free, request, work).num_workers.value == 4
    assert make_plan(usual, request, work).num_workers.value == 0  # control: spawning costs more


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
        make_plan(box(), LoaderRequest(num_workers=2), Workload()).prefetch_factor.source == "rule"
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
    work = Workload(sample_s=0.01, busy_share=1.0, num_samples=50_000, sample_bytes=150_000)
    plan = make_plan(box(), request, work)
    assert plan.slot_memory.value == 4 * 2 * 64 * 150_000
    assert plan.warnings == ()
    tight = make_plan(box(available_bytes=50 << 20), request, work)
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
        assert label(name) in text
        assert choice.reason in text
    assert {name for name in plan.choices if label(name) != name} == {
        *("start_method", "threads_per_worker", "slot_memory")  # no arguments of DataLoader
    }
    assert "warning: " in text
    assert "slot memory         - (rule: known after the first batch)" in text
    known = str(plan._replace(slot_memory=Choice(38_535_680, "4 batches", "measured")))
    assert "slot memory         36.8 MiB (measured: 4 batches)" in known
    assert "None" not in text
    assert json.loads(json.dumps(plan.to_dict()))["num_workers"]["value"] == 2


def test_starting_more_workers_than_cores_costs_more_than_starting_two() -> None:
    waits = Workload(sample_s=0.004, busy_share=0.1, num_samples=3_000)
    pair = Machine(os="linux", num_cpus=2, memory_bytes=16 << 30, available_bytes=16 << 30)
    request = LoaderRequest(batch_size=8, start_method="spawn")
    assert make_plan(pair, request, waits).num_workers.value == 0
    long = make_plan(pair, request, waits._replace(num_samples=300_000)).num_workers
    short = make_plan(
        pair, LoaderRequest(batch_size=8), waits._replace(num_samples=300)
    ).num_workers
    assert 2 < short.value < long.value


def test_a_dataset_smaller_than_a_batch_is_not_counted_as_a_whole_one() -> None:
    one = Workload(sample_s=0.02, busy_share=1.0, num_samples=1)
    pair = Machine(os="linux", num_cpus=2)
    assert make_plan(pair, LoaderRequest(batch_size=64), one).num_workers.value == 0


@pytest.mark.parametrize("asked", [None, "forkserver"])
def test_without_proc_workers_are_spawned(asked: str | None) -> None:
    request = LoaderRequest(start_method=asked)
    choice = choose_start_method(Machine(os="linux", has_proc=False), request)
    assert (choice.value, "without /proc" in choice.reason) == ("spawn", True)
    assert choose_start_method(Machine(os="linux"), request).value == "forkserver"
