"""Which knob is wrong? One sentence with numbers, what it was concluded from, a line to paste."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.trace.accounting import Account, WorkerAccount

CAUSES = (
    *("decode", "collate", "storage", "transfer", "slots", "slow sample", "slow worker"),
    *("main process", "step", "start-up", "memory", "nothing"),
)
NOTHING_LOST = 0.10
"""A training loop that waits less than this part of its time is limited by its own step."""
MIN_BATCHES = 4
"""Of fewer, most were loaded ahead while the workers started."""
STARTUP_SHARE, LONG_START_S = 0.5, 20.0
MANY_FAULTS, LOW_MEMORY = 1000, 0.03
"""Pages fetched from the disk again, and the machine's free memory, that tell of pressure."""
SLOW_RATIO = 2.5
"""A worker, or a sample, that takes this much longer than the others is an outlier."""
OTHERS_BUSY = 0.75
"""Workers that are busy more than this part of a stall do not wait for another one."""

Predict = Callable[..., float | None]
"""Samples a second with other settings (as penstock.simulate takes them), or None."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What limits a run.

    Args:
        cause: One of :data:`CAUSES`.
        sentence: For a person.
        evidence: The numbers that it was concluded from.
        remedy: A line to paste; empty where there is nothing to gain.
    """

    cause: str
    sentence: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        lines = [self.sentence, *(f"  {line}" for line in self.evidence)]
        return "\n".join([*lines, f"  Try: {self.remedy}"] if self.remedy else lines)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "evidence": list(self.evidence)}


def judge(
    account: Account, facts: dict[str, Any], predict: Predict = lambda **_: None
) -> Diagnosis:
    """The verdict on a run.

    Example:
        >>> judge(Account(num_batches=9, steady_s=1.0, step_s=0.98, stall_s=0.02), {}).cause
        'step'
    """
    return _Judge(account, facts, predict).judge()


class _Judge:
    """Tries the causes one after the other: the ones that hide others first."""

    def __init__(self, account: Account, facts: dict[str, Any], predict: Predict) -> None:
        self.it = account
        self.facts = facts
        self.predict = predict
        self.workers = account.workers
        self.is_inline = not account.workers
        it = account
        lost_s = it.stall_s + it.deliver_s + it.transfer_s + it.loading_s
        self.lost = self.loop_lost = it.share(lost_s)
        self.worker_name = "training loop"
        if it.gpu_s:  # its own clock says more than the loop's
            self.worker_name, self.lost = "GPU", max(0.0, 1.0 - it.share(it.gpu_s))

    def judge(self) -> Diagnosis:
        it = self.it
        if not it.num_batches and self.facts.get("is_off") is True:
            return Diagnosis(
                cause="nothing",
                sentence="Nothing was noted: tracing is off (trace=False, or PENSTOCK_TRACE=0).",
                remedy="DataLoader(..., trace=True), and no PENSTOCK_TRACE in the environment",
            )
        if it.num_batches < MIN_BATCHES or it.steady_s <= 0:
            return Diagnosis(
                cause="nothing",
                sentence=f"{_batches(it.num_batches)} delivered: too few to say anything.",
            )
        for look in (
            *(self._memory, self._start_up, self._step, self._transfer, self._main),
            *(self._slow_sample, self._slow_worker, self._workers, self._slots),
        ):
            found = look()
            if found is not None:
                return found
        return self._say("decode", "Loading limits.", self._worker_evidence())

    def _say(self, cause: str, text: str, evidence: list[str], remedy: str = "") -> Diagnosis:
        it = self.it
        waits = f"The {self.worker_name} waits {self.lost:.0%} of the time. "
        shares = (
            f"steady run: {it.steady_s:.3g} s, {it.rate:,.0f} samples/s; step "
            f"{it.share(it.step_s):.0%}, waiting {it.share(it.stall_s + it.loading_s):.0%}, "
            f"to the device {it.share(it.transfer_s):.0%}, putting together "
            f"{it.share(it.deliver_s):.0%}"
        )
        if it.startup_s > it.steady_s and cause != "start-up":
            evidence = [*evidence, f"before that, the first batch took {it.startup_s:.2f} s"]
        return Diagnosis(
            cause=cause,
            sentence=(waits if cause not in ("step", "start-up") else "") + text,
            evidence=(shares, *evidence),
            remedy=remedy,
        )

    # -- one look for each cause -----------------------------------------------------------------

    def _memory(self) -> Diagnosis | None:
        it = self.it
        if it.num_faults < MANY_FAULTS and it.free_memory_share >= LOW_MEMORY:
            return None
        if self.lost < NOTHING_LOST:
            return None
        evidence = [
            f"{it.num_faults:,} pages had to be read from the disk again",
            f"free memory went down to {it.free_memory_share:.0%}",
        ]
        fewer = max(1, len(self.workers) // 2)
        text = "Memory is short: workers wait for their own pages."
        return self._say("memory", text, evidence, f"DataLoader(..., num_workers={fewer})")

    def _start_up(self) -> Diagnosis | None:
        it = self.it
        share = it.startup_s / max(it.startup_s + it.steady_s, 1e-9)
        num_later = it.num_passes - 1
        later_s = it.startup_s - it.first_start_s
        later_steady_s = it.steady_s * num_later / max(1, it.num_passes)
        is_often = later_s > max(0.05 * num_later, later_steady_s)
        if share < STARTUP_SHARE or not (is_often or it.startup_s >= LONG_START_S):
            return None  # a short run has started once: that says nothing about a long one
        epochs = f"{it.num_passes} epochs ({it.first_start_s:.2f} s in the first)"
        text = (
            f"{share:.0%} of the time is start-up: {it.startup_s:.2f} s until the first batch of "
            f"{epochs if num_later else '1 epoch'}, then {it.steady_s:.2f} s."
        )
        are_kept = self.facts.get("persistent_workers") is True
        remedy = "DataLoader(..., persistent_workers=True)"
        return self._say("start-up", text, [], "" if self.is_inline or are_kept else remedy)

    def _step(self) -> Diagnosis | None:
        it = self.it
        if self.loop_lost < NOTHING_LOST <= self.lost and not self._copies_unseen():
            text = (
                f"The GPU waits {self.lost:.0%} of the time, but not for batches: your step holds "
                f"the loop {it.share(it.step_s):.0%} of it, and they are ready when it asks."
            )
            remedy = (
                'with penstock.span("forward"): ... shows where the step waits (.item(), print)'
            )
            return self._say("step", text, self._worker_evidence(), remedy)
        if self.lost >= NOTHING_LOST:
            return None
        text = (
            f"Your step takes {it.share(it.step_s):.0%} of the time and batches are ready when it "
            f"asks: faster loading would bring at most {self.lost:.0%}."
        )
        if self.loop_lost >= NOTHING_LOST:  # it runs ahead of the GPU, and waits there
            text = (
                f"The GPU is busy {1 - self.lost:.0%} of the time, although the loop waits "
                f"{self.loop_lost:.0%}: faster loading would bring at most {self.lost:.0%}."
            )
        return self._say("step", text, self._worker_evidence())

    def _transfer(self) -> Diagnosis | None:
        it = self.it
        other = it.stall_s + it.loading_s + it.deliver_s
        is_unseen = self._copies_unseen()
        if it.transfer_s <= other and not is_unseen:
            return None
        took_s = max(it.transfer_s, it.copy_s if is_unseen else 0.0)
        text = f"The way to the device limits: {it.share(took_s):.0%} of the time."
        device = self.facts.get("device") or "cuda"
        remedy = (
            f"DataLoader(..., device='{device}', pin_memory=True), samples as uint8 and finish="
        )
        return self._say("transfer", text, [f"copies: {took_s:.2f} s"], remedy)

    def _copies_unseen(self) -> bool:
        """Copies that the device makes by itself hold up no loop: the step waits for them."""
        it = self.it
        other = it.stall_s + it.loading_s + it.deliver_s
        return it.gpu_s > 0 and it.copy_s > other and it.share(it.copy_s) > 0.5

    def _main(self) -> Diagnosis | None:
        it = self.it
        if self.is_inline:
            text = f"Samples are loaded in the training process: {it.share(it.loading_s):.0%}."
            text += self._promise(num_workers=self._cores())
            return self._say("main process", text, [], 'DataLoader(..., num_workers="auto")')
        if it.deliver_s <= it.stall_s:
            return None
        text = (
            f"The training process limits: putting batches together takes it "
            f"{it.share(it.deliver_s):.0%} of the time."
        )
        remedy = "tensors or arrays instead of many small objects in each sample"
        return self._say("main process", text, self._worker_evidence(), remedy)

    def _slow_sample(self) -> Diagnosis | None:
        it = self.it
        slowest = it.slowest
        is_outlier = it.top_stall_share > 0.6 and it.slowest_ratio >= 2 * SLOW_RATIO
        if slowest is None or not is_outlier or len(self._slow_ones()) == 1:
            return None
        text = (
            f"A few slow samples hold up the rest: batch {slowest.batch} of epoch {slowest.pass_} "
            f"took {slowest.took_ns * 1e-9:.2f} s, {it.slowest_ratio:.0f} times as long as usual."
        )
        evidence = [f"the longest tenth of the waits is {it.top_stall_share:.0%} of all waiting"]
        remedy = "DataLoader(..., prefetch_factor=8), and trace=penstock.Tracing(samples=True)"
        return self._say("slow sample", text, evidence, remedy)

    def _slow_ones(self) -> list[WorkerAccount]:
        """Workers that are much slower than the others of their loader."""
        found = []
        for first_pass in {worker.first_pass for worker in self.workers}:
            worker_rings = [worker for worker in self.workers if worker.first_pass == first_pass]
            rows = sorted(worker.row_s for worker in worker_rings if worker.row_s)
            if len(rows) > 1:
                usual = rows[(len(rows) - 1) // 2]
                found += [worker for worker in worker_rings if worker.row_s >= SLOW_RATIO * usual]
        return found

    def _slow_worker(self) -> Diagnosis | None:
        slow = self._slow_ones()
        if len(slow) != 1:
            return None
        one = slow[0]
        others = [w for w in self.workers if w is not one and w.first_pass == one.first_pass]
        usual = sorted(worker.row_s for worker in others)[len(others) // 2]
        is_in_order = self.facts.get("in_order") is not False
        others_busy = sum(worker.stall_busy_share for worker in others) / len(others)
        if is_in_order and others_busy > OTHERS_BUSY:
            return None
        text = (
            f"Worker {one.number} is {one.row_s / usual:.1f} times slower than the others"
            f"{', which wait for it.' if is_in_order else '.'}"
        )
        evidence = [
            f"a sample takes it {one.row_s * 1e3:.3g} ms, the others {usual * 1e3:.3g} ms",
            f"while the loop waits it is busy {one.stall_busy_share:.0%} of the time, the others "
            f"{others_busy:.0%}",
        ]
        remedy = "DataLoader(..., in_order=False), and look what else runs on its core"
        if not is_in_order:
            remedy = "look what else runs on its core: top -H"
        return self._say("slow worker", text, evidence, remedy)

    def _workers(self) -> Diagnosis | None:
        busy = sum(w.stall_busy_share for w in self.workers) / len(self.workers)
        if busy < 0.5:
            return None
        busy_s = sum(worker.busy_s for worker in self.workers) or 1e-9
        collate = sum(w.collate_s + w.copied_s for w in self.workers) / busy_s
        waits = sum(worker.wait_share * worker.busy_s for worker in self.workers) / busy_s
        evidence = self._worker_evidence()
        if collate > 0.5:
            text = f"Collating in workers limits: it takes {collate:.0%} of their time."
            remedy = "DataLoader(..., collate_fn=None), with the work moved to dataset[i]"
            if self.facts.get("collate_fn") == "default":
                remedy = "samples of fewer bytes (uint8, not float32), in one tensor, not in many"
            return self._say("collate", text, evidence, remedy)
        if waits > 0.5 and self.facts.get("pool") != "thread":
            more = max(2 * len(self.workers), self._cores())
            text = f"Reading limits: workers wait for data {waits:.0%} of their time."
            text += self._promise(num_workers=more)
            return self._say("storage", text, evidence, f"DataLoader(..., num_workers={more})")
        return self._decode(evidence)

    def _decode(self, evidence: list[str]) -> Diagnosis:
        cores, num_workers = self._cores(), len(self.workers)
        text = "Decoding and transforms in workers limit."
        if self.facts.get("pool") == "thread":
            remedy = "DataLoader(..., pool='process'): threads share one interpreter"
        elif self._others_compute():
            text += " Other programs hold the cores, which workers wait for."
            remedy = "look what else runs here (top), or ask for cores of your own"
        elif num_workers < cores:
            promise = self._promise(num_workers=cores)
            text = text[:-1] + ":" + promise if promise else text
            remedy = f"DataLoader(..., num_workers={cores})"
        else:
            text += f" All {cores} cores are in use."
            remedy = (
                "penstock pack DATA PACKED, which does once what is the same in each epoch; images "
                "by penstock.ImageFolder, which has the fastest decoder here"
            )
        return self._say("decode", text, evidence, remedy)

    def _others_compute(self) -> bool:
        """Do workers wait for cores that neither they nor the step can be using?"""
        it = self.it
        busy_s = sum(worker.busy_s for worker in self.workers) or 1e-9
        queued = sum(worker.queued_s for worker in self.workers) / busy_s
        used = sum(worker.cpu_s for worker in self.workers) / max(it.total_s - it.startup_s, 1e-9)
        return queued > 0.5 and used + it.share(it.step_s + it.deliver_s) < 0.6 * self._cores()

    def _slots(self) -> Diagnosis | None:
        it = self.it
        asked = self.facts.get("prefetch_factor")
        text = "Workers stand idle while the loop waits: too few batches are under way."
        evidence = self._worker_evidence()
        if it.refused:
            evidence.append(f"{it.refused:,} times there was no slot for another batch")
        depth = max(4, 2 * asked) if isinstance(asked, int) else 16
        return self._say("slots", text, evidence, f"DataLoader(..., prefetch_factor={depth})")

    # -- numbers ---------------------------------------------------------------------------------

    def _cores(self) -> int:
        cores = self.facts.get("cores")
        return cores if isinstance(cores, int) and cores > 0 else max(1, len(self.workers))

    def _promise(self, **settings: Any) -> str:
        rate = self.predict(**settings)
        if rate is None or rate < 1.05 * self.it.rate:
            return ""
        count = settings["num_workers"]
        now = f" instead of {len(self.workers)}" if self.workers else ""
        return f" {count} workers{now} would bring {self.it.rate:,.0f} to {rate:,.0f} samples/s."

    def _worker_evidence(self) -> list[str]:
        if not self.workers:
            return []
        busy_s = sum(worker.busy_s for worker in self.workers) or 1e-9
        # Each is measured in some parts of the batches only, and scaled.
        cpu = min(1.0, sum(worker.cpu_s for worker in self.workers) / busy_s)
        queued = min(1.0 - cpu, sum(worker.queued_s for worker in self.workers) / busy_s)
        collate = sum(w.collate_s + w.copied_s for w in self.workers) / busy_s
        idle = 1 - sum(w.stall_busy_share for w in self.workers) / len(self.workers)
        rows = [worker.row_s for worker in self.workers if worker.row_s]
        typical = sorted(rows)[len(rows) // 2] * 1e3 if rows else 0.0
        return [
            f"{len(self.workers)} worker{'s' * (len(self.workers) > 1)}, {typical:.3g} ms a "
            f"sample: computing {cpu:.0%}, waiting for a core {queued:.0%}, "
            f"for data {max(0.0, 1 - cpu - queued):.0%}; collating {collate:.0%}",
            f"while the loop waits, workers are idle {idle:.0%} of the time",
        ]


def _batches(count: int) -> str:
    return {0: "No batch was", 1: "One batch was"}.get(count, f"{count:,} batches were")
