"""Each cause is diagnosed from its numbers, and not from a run that differs in only those."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Timeline
from penstock.trace.accounting import Account, WorkerAccount
from penstock.trace.diagnosis import CAUSES, MIN_BATCHES_OF_WINDOW, Diagnosis, diagnose
from penstock.trace.record import Kind, Record
from penstock.trace.recorder import merge_records
from support import synthetic_traces

pytestmark = pytest.mark.legacy

NUM_BATCHES = 240  # over a second


def cause_of(**changes: Any) -> str:
    return Timeline(synthetic_traces.make_records(num_batches=NUM_BATCHES, **changes)).verdict.cause


def test_workers_that_compute_are_decoding() -> None:
    assert cause_of(cpu_share=0.95) == "decode"
    assert cause_of(cpu_share=0.95, step_ms=30.0) == "step"


def test_workers_that_wait_are_reading() -> None:
    assert cause_of(cpu_share=0.05) == "storage"
    assert cause_of(cpu_share=0.05, pool="thread") == "decode"  # threads may wait for each other


def test_workers_that_wait_for_object_storage() -> None:
    def verdict(share: float, **network: Any) -> Any:
        records = synthetic_traces.make_records(num_batches=NUM_BATCHES, cpu_share=0.05)
        records["facts"]["network"] = network
        for lane in records["lanes"][1:]:
            for span in [span for span in lane["spans"] if span.kind == Kind.LEASE]:
                end_ns = span.start_ns + int(share * (span.end_ns - span.start_ns))
                lane["spans"].append(Record(Kind.NETWORK, "object storage", span.start_ns, end_ns))
        return Timeline(records).verdict

    slow = verdict(0.9, bytes_per_s=25e6, set_bytes=100, limit_bytes=40, is_ahead=True)
    assert slow.cause == "network"
    assert "25 MB/s" in "".join(slow.evidence)
    assert slow.remedy.startswith("Packed(..., cache_bytes=100)")
    assert "block_order" in verdict(0.9, set_bytes=1, limit_bytes=2, is_ahead=False).remedy
    assert verdict(0.9, set_bytes="odd").cause == "network"
    assert verdict(0.1).cause == "storage"


def test_the_parts_of_the_waiting_add_up_as_shown() -> None:
    times = {"step_s": 0.032, "loading_s": 0.864, "deliver_s": 0.104}
    found = diagnose(Account(num_batches=90, steady_s=1.0, **times), {})
    assert found.sentence.startswith("The training loop waits 96% of the time")
    assert "waiting 86%, copying to the device 0%, assembling batches 10%" in found.evidence[0]
    one_part = Account(num_batches=90, steady_s=1.0, step_s=0.032, loading_s=0.968)
    assert diagnose(one_part, {}).sentence.startswith("The training loop waits 97% of the time")


def test_a_long_way_to_the_device() -> None:
    assert cause_of(fetch_ms=1.0, transfer_ms=20.0) == "transfer"
    assert cause_of(fetch_ms=1.0, transfer_ms=0.1) == "step"


def test_copies_that_only_the_device_sees() -> None:
    def with_device(copy_share: float, gpu_share: float) -> Timeline:
        records = synthetic_traces.make_records(num_batches=NUM_BATCHES, fetch_ms=1.0, step_ms=20.0)
        main = records["lanes"][0]["spans"]
        for span in [span for span in main if span.kind == Kind.BATCH]:
            start, step = span.end_ns, 20 * synthetic_traces.MS
            copied = start + int(step * copy_share)
            main.append(Record(Kind.COPY, "", start, copied, batch=span.batch))
            main.append(
                Record(Kind.GPU, "", copied, copied + int(step * gpu_share), batch=span.batch)
            )
        return Timeline(records)

    slow = with_device(0.7, 0.3).verdict
    assert slow.cause == "transfer"
    assert slow.sentence.startswith("The GPU waits 7")
    assert with_device(0.02, 0.97).verdict.cause == "step"
    starved = with_device(0.02, 0.4).verdict  # the loop waits only for the step
    assert starved.cause == "step"
    assert "but not for batches" in starved.sentence


def test_a_loop_that_waits_ahead_of_a_busy_gpu_is_not_told_that_batches_are_ready() -> None:
    def sentence(**seconds: float) -> str:
        return diagnose(Account(num_batches=90, steady_s=1.0, **seconds), {}).sentence

    ahead = sentence(step_s=0.4, stall_s=0.6, gpu_s=0.95)
    assert "ready" not in ahead
    for words in ("busy 95%", "the loop waits 60%", "at most 5%"):
        assert words in ahead
    assert "batches are ready" in sentence(step_s=0.97, stall_s=0.03, gpu_s=0.95)


def test_a_busy_training_process() -> None:
    assert cause_of(fetch_ms=1.0, deliver_ms=20.0) == "main process"


def test_one_slow_worker() -> None:
    assert cause_of(num_workers=4, slow_worker=2) == "slow worker"
    assert cause_of(num_workers=4, step_ms=1.0) != "slow worker"


@pytest.mark.parametrize(("busy", "cause"), [(0.3, "slow worker"), (0.95, "collate")])
def test_a_worker_is_waited_for_only_by_those_that_are_idle(busy: float, cause: str) -> None:
    """The per-sample work of a collating worker is small, and varies widely under other load."""
    rows_ms, shares = (0.67, 0.24), (0.99, busy)
    workers = tuple(
        WorkerAccount(
            number=number,
            fetch_s=0.1,
            collate_s=0.8,
            cpu_s=0.9,
            row_s=row_ms * 1e-3,
            stall_busy_share=share,
        )
        for number, (row_ms, share) in enumerate(zip(rows_ms, shares, strict=True))
    )
    assert diagnose(idle(workers=workers, stall_s=0.9, step_s=0.1), {}).cause == cause


def test_a_few_slow_samples() -> None:
    slow = dict.fromkeys((20, 41), 40.0)
    assert cause_of(slow=slow, step_ms=11.0) == "slow sample"
    assert cause_of(slow={}, step_ms=11.0) == "step"


def test_a_long_start() -> None:
    assert cause_of(start_ms=25_000.0) == "start-up"
    # A short run. A long one pays for the start only once, too.
    assert cause_of(start_ms=5_000.0) == "decode"


def test_a_start_in_every_epoch() -> None:
    def three_epochs(start_ms: float) -> Timeline:
        starts = (1_000.0, 11_000.0, 21_000.0)
        return Timeline(
            merge_records(
                [
                    synthetic_traces.make_records(num_batches=45, start_ms=start_ms, at_ms=start)
                    for start in starts
                ]
            )
        )

    assert three_epochs(1000.0).verdict.cause == "start-up"
    assert three_epochs(10.0).verdict.cause == "decode"


def test_a_start_that_is_paid_once_says_nothing_about_more_epochs() -> None:
    def account(first_start_s: float) -> Account:
        starts = {"startup_s": 4.0, "first_start_s": first_start_s}
        return idle(steady_s=0.2, stall_s=0.15, step_s=0.05, num_passes=4, **starts)

    assert diagnose(account(3.9), {}).cause != "start-up"
    assert diagnose(account(1.0), {}).remedy == "DataLoader(..., persistent_workers=True)"
    kept = diagnose(account(1.0), {"persistent_workers": True})
    assert (kept.cause, kept.remedy) == ("start-up", "")


@pytest.mark.parametrize(("in_order", "is_proposed"), [(True, True), (False, False)])
def test_whoever_waits_for_one_worker_is_told_not_to(in_order: bool, is_proposed: bool) -> None:
    records = synthetic_traces.make_records(
        num_batches=NUM_BATCHES, num_workers=4, slow_worker=2, in_order=in_order
    )
    assert ("in_order=False" in Timeline(records).verdict.remedy) is is_proposed


def test_a_default_collate_is_not_replaced_by_itself() -> None:
    records = with_collating(0.8)
    assert "collate_fn=None" in Timeline(records).verdict.remedy
    records["facts"]["collate_fn"] = "default"
    assert "collate_fn=None" not in Timeline(records).verdict.remedy


@pytest.mark.parametrize(
    ("cpu_s", "queued_s", "main_cpu_s", "cause", "says"),
    [
        (0.1, 0.6, 0.1, "other programs", "free core 60% of their time"),
        (0.3, 0.9, 0.1, "other programs", "free core 70% of their time"),
        (0.06, 0.44, 0.1, "storage", "Workers wait for data 50%"),
        (0.1, 0.6, 1.5, "decode", "All 2 cores are in use."),  # the training process uses them
        (0.6, 0.35, 0.1, "decode", "Other programs use them too: workers wait 35%"),
        (0.9, 0.05, 0.1, "decode", "All 2 cores are in use."),
    ],
)
def test_cores_that_others_hold_are_not_blamed_on_decoding(
    cpu_s: float, queued_s: float, main_cpu_s: float, cause: str, says: str
) -> None:
    worker = WorkerAccount(
        number=0, fetch_s=1.0, cpu_s=cpu_s, queued_s=queued_s, row_s=0.01, stall_busy_share=1.0
    )
    account = idle(
        workers=(worker, worker), total_s=1.0, stall_s=0.9, step_s=0.1, main_cpu_s=main_cpu_s
    )
    verdict = diagnose(account, {"cores": 2})
    assert verdict.cause == cause
    assert says in verdict.sentence
    if cause == "other programs":  # one number, although measured times can overlap
        assert f"waiting for a core {says.split()[2]}, " in verdict.evidence[1]


def test_what_more_workers_would_bring_is_a_sentence() -> None:
    verdict = Timeline(
        synthetic_traces.make_records(num_batches=NUM_BATCHES, num_workers=1)
    ).verdict
    assert "in the workers. 8 workers instead of 1 would raise the rate" in verdict.sentence
    assert any(line.startswith("1 worker,") for line in verdict.evidence)


def with_collating(share: float) -> dict[str, Any]:
    records = synthetic_traces.make_records(num_batches=NUM_BATCHES)
    for lane in records["lanes"][1:]:
        for span in list(lane["spans"])[1:]:
            start = int(span.end_ns - (span.end_ns - span.start_ns) * share)
            lane["spans"].append(Record(Kind.COLLATE, "", start, span.end_ns, 0, 0, span.batch))
    return records


def test_collating_that_takes_most_of_the_time() -> None:
    assert Timeline(with_collating(0.8)).verdict.cause == "collate"
    assert Timeline(with_collating(0.1)).verdict.cause == "decode"


def test_pages_that_come_back_from_the_disk() -> None:
    records = synthetic_traces.make_records(num_batches=NUM_BATCHES)
    last = records["lanes"][1]["spans"][-1].end_ns
    records["lanes"][1]["spans"].append(Record(Kind.MEMORY, "", last, last, a=1000, b=100))
    assert Timeline(records).verdict.cause == "decode"
    records["lanes"][1]["spans"].append(Record(Kind.MEMORY, "", last, last, a=1000, b=90_000))
    assert Timeline(records).verdict.cause == "memory"


def idle(**changes: Any) -> Account:
    workers = tuple(WorkerAccount(number=n, fetch_s=0.2, row_s=0.001) for n in range(3))
    given = {"num_batches": 50, "steady_s": 1.0, "stall_s": 0.5, "step_s": 0.5, "workers": workers}
    return Account(**{**given, **changes})


def test_workers_that_stand_idle_while_the_loop_waits_have_too_little_to_do() -> None:
    verdict = diagnose(idle(refused=7), {"prefetch_factor": 2})
    assert verdict.cause == "slots"
    assert "prefetch_factor=4" in verdict.remedy
    assert "no slot was free for the next batch 7 times" in verdict.evidence


def test_without_workers_the_training_process_loads() -> None:
    account = Account(num_batches=50, steady_s=1.0, loading_s=0.9, step_s=0.1)
    verdict = diagnose(account, {"cores": 8}, lambda num_workers: 500.0)
    assert verdict.cause == "main process"
    assert "8 workers would raise the rate from 0 to 500 samples/s" in verdict.sentence


def test_a_run_that_is_too_short_is_not_judged() -> None:
    def verdict(num_batches: int, fetch_ms: float) -> Diagnosis:
        records = synthetic_traces.make_records(num_batches=num_batches, fetch_ms=fetch_ms)
        return Timeline(records).verdict

    assert verdict(0, 20.0).sentence == "No batch was delivered."
    batches, loading = "20 batches", "1 s of loading"
    for num_batches, fetch_ms, missed in (
        (1, 20.0, f"{batches} and {loading}"),
        (19, 200.0, batches),
        (60, 20.0, loading),  # 0.6 s
    ):
        short = verdict(num_batches, fetch_ms)
        assert short.cause == "nothing"
        assert short.sentence.startswith(f"Too short to judge: {num_batches} batch")
        assert short.remedy == f"a longer run, with at least {missed}"
    assert "waiting" in short.evidence[0]
    for num_batches, fetch_ms in ((20, 200.0), (120, 20.0)):  # the same program, longer
        assert verdict(num_batches, fetch_ms).cause == "decode"


def test_a_window_of_a_longer_run_may_hold_few_batches() -> None:
    few = idle(num_batches=5, steady_s=30.0, stall_s=1.0, step_s=29.0)
    assert diagnose(few, {}, min_batches=MIN_BATCHES_OF_WINDOW).cause == "step"
    assert diagnose(few, {}).cause == "nothing"


def test_a_short_run_with_many_start_ups_is_judged() -> None:
    def cause(startup_s: float) -> str:
        starts = {"num_passes": 6, "startup_s": startup_s, "first_start_s": startup_s / 6}
        return diagnose(idle(num_batches=12, steady_s=0.1, **starts), {}).cause

    assert cause(3.0) == "start-up"
    assert cause(0.6) == "nothing"


@pytest.mark.parametrize(("queued_s", "num_lines"), [(0.3, 1), (0.01, 0)])
def test_a_verdict_from_a_busy_machine_says_so(queued_s: float, num_lines: int) -> None:
    worker = WorkerAccount(number=0, fetch_s=0.5, cpu_s=0.2, queued_s=queued_s, row_s=0.01)
    verdict = diagnose(idle(workers=(worker,), stall_s=0.02, step_s=0.2, total_s=1.0), {"cores": 8})
    assert verdict.cause == "step"
    lines = [line for line in verdict.evidence if line.startswith("other programs use the cores")]
    assert len(lines) == num_lines


def test_a_verdict_has_numbers_evidence_and_a_line_to_paste() -> None:
    verdict = Timeline(synthetic_traces.make_records(num_batches=NUM_BATCHES)).verdict
    assert verdict.cause in CAUSES
    assert "%" in verdict.sentence
    assert "8 workers instead of 2 would raise the rate" in verdict.sentence
    assert verdict.remedy == "DataLoader(..., num_workers=8)"
    assert str(verdict).splitlines()[-1] == f"  Try: {verdict.remedy}"


def test_workers_of_loaders_that_ran_one_after_the_other_are_not_added_up() -> None:
    def two_loaders(at_ms: float) -> Timeline:
        first = synthetic_traces.make_records(num_batches=NUM_BATCHES, num_workers=4)
        second = synthetic_traces.make_records(num_batches=20, num_workers=4, at_ms=at_ms)
        return Timeline(merge_records([first, second]))

    apart, together = two_loaders(60_000.0), two_loaders(1_000.0)
    assert len(apart.account.workers) == 8
    assert apart.account.num_workers == 4
    assert any(line.startswith("4 workers,") for line in apart.verdict.evidence)
    assert together.account.num_workers == 8  # control


def test_a_loop_that_never_waits_is_not_told_what_workers_did_meanwhile() -> None:
    fast = Timeline(
        synthetic_traces.make_records(num_batches=NUM_BATCHES, fetch_ms=1.0, step_ms=30.0)
    )
    assert fast.verdict.cause == "step"
    assert not any("while the loop waits" in line for line in fast.verdict.evidence)
    slow = Timeline(synthetic_traces.make_records(num_batches=NUM_BATCHES))
    assert any("while the loop waits" in line for line in slow.verdict.evidence)


def test_more_workers_are_advised_only_where_they_help() -> None:
    busy = WorkerAccount(number=0, fetch_s=0.9, cpu_s=0.9, row_s=0.01, stall_busy_share=1.0)
    run = idle(workers=(busy,), stall_s=0.9, step_s=0.1, steady_rows=100)
    helped = diagnose(run, {"cores": 4}, lambda num_workers: 300.0)
    assert helped.remedy == "DataLoader(..., num_workers=4)"
    refused = diagnose(run, {"cores": 4}, lambda num_workers: 101.0)
    assert "num_workers" not in refused.remedy
    assert "More workers would not load faster here." in refused.sentence


def test_no_setting_is_advised_that_is_on_already() -> None:
    inline = Account(num_batches=50, steady_s=1.0, loading_s=0.9, step_s=0.1)
    assert "auto" in diagnose(inline, {"cores": 8}).remedy
    assert "auto" not in diagnose(inline, {"cores": 8, "is_auto": True}).remedy
    copies = Account(num_batches=50, steady_s=1.0, transfer_s=0.8, step_s=0.2)
    assert "device=" in diagnose(copies, {}).remedy
    assert "device=" not in diagnose(copies, {"device": "cuda"}).remedy


@pytest.mark.parametrize("cpu_share", [0.05, 0.95])
def test_a_loader_that_chooses_its_workers_is_not_told_a_number(cpu_share: float) -> None:
    def verdict(**facts: Any) -> Any:
        records = synthetic_traces.make_records(
            num_batches=NUM_BATCHES, cpu_share=cpu_share, **facts
        )
        return Timeline(records).verdict

    chosen, asked = verdict(is_auto=True), verdict()
    assert "num_workers=" in asked.remedy
    assert "num_workers" not in chosen.remedy
    assert 'num_workers="auto" chooses the number' in chosen.sentence


def test_tracing_of_samples_is_not_advised_where_it_is_on() -> None:
    def remedy(**facts: Any) -> str:
        slow = dict.fromkeys((20, 41), 40.0)
        records = synthetic_traces.make_records(
            num_batches=NUM_BATCHES, slow=slow, step_ms=11.0, **facts
        )
        return Timeline(records).verdict.remedy

    assert "Tracing(samples=True)" in remedy()
    assert remedy(traces_samples=True) == "DataLoader(..., prefetch_factor=8)"


def test_too_little_memory_with_automatic_workers_is_not_answered_with_a_number() -> None:
    busy = WorkerAccount(number=0, fetch_s=0.9, row_s=0.01, stall_busy_share=1.0)
    run = idle(workers=(busy,) * 4, stall_s=0.9, step_s=0.1, num_faults=5000)
    assert diagnose(run, {}).remedy == "DataLoader(..., num_workers=2)"
    assert diagnose(run, {"is_auto": True}).remedy == "a smaller batch_size"
