"""Diagnosis of a run: its bottleneck in one sentence, the evidence, and a line to paste.

Called by :attr:`penstock.Timeline.verdict`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.trace.accounting import Account, WorkerAccount

CAUSES = (
    *("decode", "collate", "storage", "network", "transfer", "slots", "slow sample"),
    "slow worker",
    *("main process", "step", "start-up", "memory", "other programs", "nothing"),
)
NOTHING_LOST = 0.10
"""A training loop that waits for less than this share of its time is limited by its own step."""
MIN_BATCHES, MIN_S = 20, 1.0
"""Shorter runs are not judged: most batches were prefetched while the workers started."""
MIN_BATCHES_OF_WINDOW = 4
"""For a window of a longer run, which may hold few batches because they take seconds."""
STARTUP_SHARE, LONG_START_S = 0.5, 20.0
MANY_FAULTS, LOW_MEMORY = 1000, 0.03
"""Thresholds for memory pressure: number of major page faults, and share of free memory."""
SLOW_RATIO = 2.5
"""A worker or sample that takes this many times longer than the others is an outlier."""
OTHERS_BUSY = 0.75
"""Workers that are busy for more than this share of the stalls do not wait for a slow worker."""
OTHERS_HOLD_CORES = 0.1
"""Waiting longer than this share for cores of other programs is worth saying, and makes the rate of
a run depend on them."""
WORTH_SAYING = 1.05
"""Predicted gains below this factor are ignored, because the model is not more precise."""
LITTLE_WAIT = 0.01
_PACK = "penstock pack DATA PACKED, to do once the work that is the same in every epoch"

Predict = Callable[[int], float | None]
"""Returns the samples per second with a given number of workers, or None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The bottleneck of a run.

    Args:
        cause: One of :data:`CAUSES`.
        sentence: The cause in words, with numbers.
        evidence: The supporting measurements.
        remedy: A line to paste. Empty if there is nothing to gain.
    """

    cause: str
    sentence: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        lines = [self.sentence, *(f"  {line}" for line in self.evidence)]
        return "\n".join([*lines, f"  Try: {self.remedy}"] if self.remedy else lines)


def diagnose(
    account: Account,
    facts: dict[str, Any],
    predict: Predict = lambda _: None,
    *,
    min_batches: int = MIN_BATCHES,
) -> Diagnosis:
    """Find the bottleneck of a run.

    Example:
        >>> diagnose(Account(num_batches=90, steady_s=1.0, step_s=0.98, stall_s=0.02), {}).cause
        'step'
        >>> print(diagnose(Account(num_batches=9, steady_s=0.1, step_s=0.1), {}).sentence)
        Too short to judge: 9 batches in 0.1 s after start-up.
    """
    return _CauseSearch(account, facts, predict).search(min_batches)


def wait_for_others(run: Account, facts: dict[str, Any]) -> float:
    """Return the share of their time in which workers wait for a core that other programs use.

    0 if the workers and the training process use most of the cores themselves.
    """
    own_s = sum(worker.cpu_s for worker in run.workers)
    own_s += max(run.main_cpu_s, run.step_s + run.deliver_s)
    if own_s >= 0.75 * _count_cores(run, facts) * max(run.total_s - run.startup_s, 1e-9):
        return 0.0
    busy_s = sum(worker.busy_s for worker in run.workers)
    return sum(worker.queued_s for worker in run.workers) / busy_s if busy_s else 0.0


def _count_cores(run: Account, facts: dict[str, Any]) -> int:
    cores = facts.get("cores")
    return cores if isinstance(cores, int) and cores > 0 else max(1, len(run.workers))


class _CauseSearch:
    """Tries the causes in order. Causes that can mask others come first."""

    def __init__(self, account: Account, facts: dict[str, Any], predict: Predict) -> None:
        self.run = run = account
        self.facts = facts
        self.predict = predict
        self.workers = workers = account.workers
        busy_s = sum(worker.busy_s for worker in workers) or 1e-9
        # Shares of the workers' busy time, extrapolated from the parts that were measured.
        self.cpu = min(1.0, sum(worker.cpu_s for worker in workers) / busy_s)
        self.queued = min(1 - self.cpu, sum(worker.queued_s for worker in workers) / busy_s)
        self.others = wait_for_others(account, facts)
        self.waiting = sum(worker.wait_share * worker.busy_s for worker in workers) / busy_s
        self.collating = sum(worker.collate_s + worker.copied_s for worker in workers) / busy_s
        self.stall_busy = _mean([worker.stall_busy_share for worker in workers])
        self.loading_s = run.stall_s + run.loading_s + run.deliver_s
        self.lost = self.loop_lost = run.share(self.loading_s + run.transfer_s)
        self.waiter = "training loop"
        if run.gpu_s:  # the GPU's own clock is more precise than the loop's
            self.waiter, self.lost = "GPU", max(0.0, 1.0 - run.share(run.gpu_s))
        # Asynchronous copies do not block the loop. The step waits for them on the device.
        copy_share = run.share(run.copy_s)
        self.are_copies_unseen = run.gpu_s > 0 and run.copy_s > self.loading_s and copy_share > 0.5

    def search(self, min_batches: int) -> Diagnosis:
        run = self.run
        if not run.num_batches and self.facts.get("is_off") is True:
            return Diagnosis(
                cause="nothing",
                sentence="Nothing was recorded: tracing is off (trace=False or PENSTOCK_TRACE=0).",
                remedy="DataLoader(..., trace=True), with PENSTOCK_TRACE unset",
            )
        if run.num_batches < min_batches or run.steady_s < MIN_S:
            return self._start_up() or self._too_short(min_batches)
        return (
            self._memory()
            or self._start_up()
            or self._step()
            or self._transfer()
            or self._network()
            or self._main()
            or self._slow_sample()
            or self._slow_worker()
            or self._workers()
            or self._slots()
        )

    def _say(self, cause: str, text: str, evidence: list[str], remedy: str = "") -> Diagnosis:
        run = self.run
        parts_s = run.stall_s + run.loading_s, run.transfer_s, run.deliver_s
        waiting, copying, assembling = (round(100 * run.share(part_s)) for part_s in parts_s)
        percent = waiting + copying + assembling  # the sum as shown, which rounding may change
        if self.waiter == "GPU":
            percent = round(100 * self.lost)
        waits = f"The {self.waiter} waits {percent}% of the time. "
        shares = (
            f"after start-up: {run.steady_s:.3g} s, {run.rate:,.0f} samples/s; step "
            f"{run.share(run.step_s):.0%}, waiting {waiting}%, copying to the device {copying}%, "
            f"assembling batches {assembling}%"
        )
        if self.others > OTHERS_HOLD_CORES and cause not in ("decode", "other programs"):
            evidence = [*evidence, "other programs use the cores that the workers wait for"]
        if run.startup_s > run.steady_s and cause != "start-up":
            evidence = [*evidence, f"start-up: {run.startup_s:.2f} s until the first batch"]
        return Diagnosis(
            cause=cause,
            sentence=(waits if cause not in ("step", "start-up", "nothing") else "") + text,
            evidence=(shares, *evidence),
            remedy=remedy,
        )

    def _too_short(self, min_batches: int) -> Diagnosis:
        run = self.run
        if not run.num_batches:
            return Diagnosis(cause="nothing", sentence="No batch was delivered.")
        num_batches = f"{run.num_batches:,} batch{'es' * (run.num_batches > 1)}"
        text = f"Too short to judge: {num_batches} in {run.steady_s:.2g} s after start-up."
        missed = []
        if run.num_batches < min_batches:
            missed.append(f"{min_batches} batches")
        if run.steady_s < MIN_S:
            missed.append(f"{MIN_S:.0f} s of loading")
        longer = f"a longer run, with at least {' and '.join(missed)}"
        return self._say("nothing", text, [], longer)

    # -- one check for each cause ----------------------------------------------------------------

    def _memory(self) -> Diagnosis | None:
        run = self.run
        is_short = run.num_faults >= MANY_FAULTS or run.free_memory_share < LOW_MEMORY
        if not is_short or self.lost < NOTHING_LOST:
            return None
        evidence = [
            f"{run.num_faults:,} memory pages were read back from disk",
            f"free memory fell to {run.free_memory_share:.0%}",
        ]
        fewer = run.num_workers // 2
        text = "Bottleneck: memory. Workers wait for their pages to be read back from disk."
        remedy = f"DataLoader(..., num_workers={fewer})"
        if not fewer or self._is_auto():
            remedy = "a smaller batch_size"
        return self._say("memory", text, evidence, remedy)

    def _start_up(self) -> Diagnosis | None:
        run = self.run
        share = run.startup_s / max(run.startup_s + run.steady_s, 1e-9)
        num_later = run.num_passes - 1
        later_s = run.startup_s - run.first_start_s
        later_steady_s = run.steady_s * num_later / max(1, run.num_passes)
        is_often = later_s > max(0.05 * num_later, later_steady_s)
        is_often = is_often and run.startup_s + run.steady_s >= MIN_S
        if share < STARTUP_SHARE or not (is_often or run.startup_s >= LONG_START_S):
            return None  # one start-up in a short run says nothing about a long run
        first = "the first batch"
        if num_later:
            first += f"es of {run.num_passes} epochs ({run.first_start_s:.2f} s in the first)"
        text = (
            f"Bottleneck: start-up, {share:.0%} of the time. {run.startup_s:.2f} s until {first}, "
            f"then {run.steady_s:.2f} s."
        )
        are_kept = self.facts.get("persistent_workers") is True
        remedy = "DataLoader(..., persistent_workers=True)"
        return self._say("start-up", text, [], remedy if self.workers and not are_kept else "")

    def _step(self) -> Diagnosis | None:
        run = self.run
        if self.loop_lost < NOTHING_LOST <= self.lost and not self.are_copies_unseen:
            text = (
                f"The GPU waits {self.lost:.0%} of the time, but not for batches. Bottleneck: your "
                f"training step, {run.share(run.step_s):.0%} of the loop's time. The batches are "
                "ready in time."
            )
            remedy = (
                'with penstock.span("forward"): ..., to see where the step waits (.item(), print)'
            )
            return self._say("step", text, self._worker_evidence(), remedy)
        if self.lost >= NOTHING_LOST:
            return None
        text = (
            f"Bottleneck: your training step, {run.share(run.step_s):.0%} of the time. The batches "
            f"are ready in time, so faster loading would save at most {self.lost:.0%}."
        )
        if self.loop_lost >= NOTHING_LOST:  # the loop runs ahead of the GPU
            text = (
                f"The GPU is busy {1 - self.lost:.0%} of the time, although the loop waits "
                f"{self.loop_lost:.0%}. Faster loading would save at most {self.lost:.0%}."
            )
        return self._say("step", text, self._worker_evidence())

    def _transfer(self) -> Diagnosis | None:
        run = self.run
        if run.transfer_s <= self.loading_s and not self.are_copies_unseen:
            return None
        took_s = max(run.transfer_s, run.copy_s if self.are_copies_unseen else 0.0)
        text = f"Bottleneck: copies to the device, {run.share(took_s):.0%} of the time."
        remedy = "uint8 samples and finish=, which copies a quarter of the bytes of float32"
        if not self.facts.get("device"):
            remedy = f"DataLoader(..., device='cuda'), with {remedy}"
        return self._say("transfer", text, [f"copies: {took_s:.2f} s"], remedy)

    def _network(self) -> Diagnosis | None:
        run = self.run
        busy_s = sum(worker.busy_s for worker in self.workers) or run.loading_s
        waited_s = sum(worker.network_s for worker in self.workers) or run.network_s
        share = waited_s / busy_s if busy_s else 0.0
        if share < 0.5 or (self.workers and self.stall_busy < 0.5):
            return None
        text = f"Bottleneck: the network. Loading waits for object storage {share:.0%} of its time."
        counted = self.facts.get("network")
        known = {
            name: value
            for name, value in (counted.items() if isinstance(counted, dict) else ())
            if isinstance(value, (int, float))
        }
        evidence, remedy = self._worker_evidence(), ""
        if known.get("bytes_per_s"):
            evidence.append(f"downloads: {known['bytes_per_s'] / 1e6:,.3g} MB/s while busy")
        num_bytes, limit = known.get("set_bytes", 0), known.get("limit_bytes", 0)
        if num_bytes > limit:
            remedy = f"Packed(..., cache_bytes={num_bytes}), which holds the whole set"
            evidence.append(f"the cache holds {limit / num_bytes:.0%} of the set")
        elif num_bytes:
            text += " The set fits in the cache, so later epochs do not download it again."
        if not known.get("is_ahead", True):
            remedy = "DataLoader(..., sampler=dataset.block_order()), which is downloaded ahead"
        return self._say("network", text, evidence, remedy)

    def _main(self) -> Diagnosis | None:
        run = self.run
        if not self.workers:
            text = (
                "Bottleneck: loading samples in the training process, "
                f"{run.share(run.loading_s):.0%} of the time."
            )
            does_help, promise = self._judge(self._cores())
            remedy = 'DataLoader(..., num_workers="auto")' if does_help else _PACK
            return self._say("main process", text + promise, [], remedy)
        if run.deliver_s <= run.stall_s:
            return None
        text = (
            "Bottleneck: assembling batches in the training process, "
            f"{run.share(run.deliver_s):.0%} of the time."
        )
        remedy = "return tensors or arrays instead of many small objects from dataset[i]"
        return self._say("main process", text, self._worker_evidence(), remedy)

    def _slow_sample(self) -> Diagnosis | None:
        run = self.run
        slowest = run.slowest
        is_outlier = run.top_stall_share > 0.6 and run.slowest_ratio >= 2 * SLOW_RATIO
        if slowest is None or not is_outlier or len(self._slow_ones()) == 1:
            return None
        text = (
            f"Bottleneck: a few slow samples. Batch {slowest.batch} of epoch {slowest.pass_} "
            f"took {slowest.took_s:.2f} s, {run.slowest_ratio:.0f} times as long as usual."
        )
        evidence = [
            f"the longest 10% of the waits add up to {run.top_stall_share:.0%} of all waiting"
        ]
        asked = self.facts.get("prefetch_factor")
        depth = max(8, 2 * asked) if isinstance(asked, int) else 8
        remedy = f"DataLoader(..., prefetch_factor={depth})"
        if self.facts.get("traces_samples") is not True:
            remedy += ", and trace=penstock.Tracing(samples=True)"
        return self._say("slow sample", text, evidence, remedy)

    def _slow_ones(self) -> list[WorkerAccount]:
        """Return the workers that are much slower than the other workers of their loader."""
        found = []
        for first_pass in {worker.first_pass for worker in self.workers}:
            pool = [w for w in self.workers if w.first_pass == first_pass and w.row_s]
            if len(pool) > 1:
                usual_s = statistics.median_low(worker.row_s for worker in pool)
                found += [worker for worker in pool if worker.row_s >= SLOW_RATIO * usual_s]
        return found

    def _slow_worker(self) -> Diagnosis | None:
        slow = self._slow_ones()
        if len(slow) != 1:
            return None
        one = slow[0]
        others = [w for w in self.workers if w is not one and w.first_pass == one.first_pass]
        usual = statistics.median_high(w.row_s for w in others if w.row_s)
        is_in_order = self.facts.get("in_order") is not False
        others_busy = _mean([worker.stall_busy_share for worker in others])
        if is_in_order and others_busy > OTHERS_BUSY:
            return None
        text = (
            f"Bottleneck: worker {one.number}, which takes {one.row_s / usual:.1f} times as long "
            f"per sample as the others.{' The others wait for it.' if is_in_order else ''}"
        )
        evidence = [
            f"worker {one.number} takes {one.row_s * 1e3:.3g} ms per sample, the others "
            f"{usual * 1e3:.3g} ms",
            f"while the loop waits, worker {one.number} is busy {one.stall_busy_share:.0%} of the "
            f"time, the others {others_busy:.0%}",
        ]
        remedy = "DataLoader(..., in_order=False), and check what else runs on its core (top -H)"
        if not is_in_order:
            remedy = "check what else runs on its core: top -H"
        return self._say("slow worker", text, evidence, remedy)

    def _workers(self) -> Diagnosis | None:
        if self.stall_busy < 0.5:
            return None
        evidence = self._worker_evidence()
        if self.collating > 0.5:
            text = f"Bottleneck: collating in the workers, {self.collating:.0%} of their time."
            remedy = "DataLoader(..., collate_fn=None), with the work moved to dataset[i]"
            if self.facts.get("collate_fn") == "default":
                remedy = "return smaller samples (uint8, not float32) in one tensor, not several"
            return self._say("collate", text, evidence, remedy)
        if self.others > max(self.cpu, self.waiting):
            text = "Bottleneck: other programs use the cores. Workers wait for a free core "
            text += f"{self.queued:.0%} of their time."
            remedy = "check what else runs here (top), or request dedicated cores"
            return self._say("other programs", text, evidence, remedy)
        if self.waiting > max(self.cpu, self.queued) and self.facts.get("pool") != "thread":
            more = max(2 * self.run.num_workers, self._cores())
            text = f"Bottleneck: reading. Workers wait for data {self.waiting:.0%} of their time."
            does_help, promise = self._judge(more)
            remedy = f"DataLoader(..., num_workers={more})" if does_help else _PACK
            return self._say("storage", text + promise, evidence, remedy)
        return self._decode(evidence)

    def _decode(self, evidence: list[str]) -> Diagnosis:
        cores, num_workers = self._cores(), self.run.num_workers
        does_help, promise = self._judge(cores)
        text = "Bottleneck: decoding and transforms in the workers."
        if self.facts.get("pool") == "thread":
            remedy = "DataLoader(..., pool='process'): threads share one interpreter"
        elif num_workers < cores and does_help:
            text += promise
            remedy = f"DataLoader(..., num_workers={cores})"
        else:
            text += f" All {cores} cores are in use." if num_workers >= cores else promise
            if self.others > OTHERS_HOLD_CORES:
                text += (
                    f" Other programs use them too: workers wait {self.queued:.0%} of their time."
                )
            remedy = (
                f"{_PACK}; for images, penstock.ImageFolder, which uses the fastest decoder "
                "available"
            )
        return self._say("decode", text, evidence, remedy)

    def _slots(self) -> Diagnosis:
        asked = self.facts.get("prefetch_factor")
        text = "Bottleneck: too few batches in flight. Workers are idle while the loop waits."
        evidence = self._worker_evidence()
        if self.run.refused:
            evidence.append(f"no slot was free for the next batch {self.run.refused:,} times")
        depth = max(4, 2 * asked) if isinstance(asked, int) else 16
        return self._say("slots", text, evidence, f"DataLoader(..., prefetch_factor={depth})")

    # -- numbers ---------------------------------------------------------------------------------

    def _cores(self) -> int:
        return _count_cores(self.run, self.facts)

    def _is_auto(self) -> bool:
        return self.facts.get("is_auto") is True

    def _judge(self, num_workers: int) -> tuple[bool, str]:
        """Return whether this number of workers may help, and a sentence about it."""
        if self._is_auto():
            return False, ' num_workers="auto" chooses the number; loader.plan says which, and why.'
        rate, now = self.predict(num_workers), self.run.rate
        if rate is None:
            return True, ""
        if rate < WORTH_SAYING * now:
            return False, " More workers would not load faster here."
        change = f"{num_workers} workers"
        if self.workers:
            change += f" instead of {self.run.num_workers}"
        return True, f" {change} would raise the rate from {now:,.0f} to {rate:,.0f} samples/s."

    def _worker_evidence(self) -> list[str]:
        if not self.workers:
            return []
        count, row_ms = self.run.num_workers, self.run.typical_row_s * 1e3
        lines = [
            f"{count} worker{'s' * (count > 1)}, {row_ms:.3g} ms per sample: "
            f"computing {self.cpu:.0%}, waiting for a core {self.queued:.0%}, waiting for data "
            f"{1 - self.cpu - self.queued:.0%}; collating {self.collating:.0%}",
        ]
        if self.run.share(self.run.stall_s) >= LITTLE_WAIT:  # otherwise there is nothing to explain
            idle = 1 - self.stall_busy
            lines.append(f"while the loop waits, workers are idle {idle:.0%} of the time")
        return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
