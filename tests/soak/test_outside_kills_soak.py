"""Hundreds of outside kills of workers and fork servers give the same stream and blame no sample.

Every other epoch has a sample that does kill its worker. Only this sample is skipped.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from support import stream_hash
from support.killer import Killer
from support.worker_faults import DEATHS, Fateful, Log

pytestmark = [pytest.mark.soak, pytest.mark.fault, pytest.mark.timeout(3000)]

NUM_KILLS = 300
LENGTH = 2000
POISON = 777


class Slowly(Fateful):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return super().__getitem__(index)


def epoch_of(dataset: Any, **arguments: Any) -> tuple[str, Any]:
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=3, on_error="skip", **arguments)
    return stream_hash.hashed(loader), [one.index for one in loader.bad_samples]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_kills_from_outside(
    num_workers: int, tmp_path: Path, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    quiet, _ = epoch_of(Fateful(length=LENGTH))
    without, _ = epoch_of(Fateful({POISON: "error"}, Log(tmp_path / "e"), length=LENGTH, times=9))
    assert quiet != without  # control
    counts: Counter[str] = Counter()
    chance, started = random.Random(num_workers), time.monotonic()
    while counts["kills"] < NUM_KILLS:
        has_poison = counts["epochs"] % 2 == 1
        log = Log(tmp_path / f"met-{counts['epochs']}")
        fates = {POISON: chance.choice(sorted(DEATHS))} if has_poison else {}
        dataset = Slowly(fates, log, length=LENGTH, times=10**6)
        seed = chance.getrandbits(32)
        with Killer(seed, max_servers=2, spares_starting=True) as killer:
            found, bad = epoch_of(dataset, num_workers=num_workers, max_restarts=10**6)
        assert (found, bad) == ((without, [POISON]) if has_poison else (quiet, [])), f"seed {seed}"
        counts["epochs"] += 1
        counts["kills"] += killer.num_killed
        counts["servers"] += killer.num_servers
        counts["poison"] += has_poison
        counts["deaths"] += len(log.lines)
    suspected = {
        text.split(" (worker")[0].split("sample ")[1]
        for text in caplog.messages
        if "retries in isolation" in text
    }
    note(
        f"{counts['epochs']} epochs of {LENGTH // 4} batches with {num_workers} workers, "
        f"{counts['kills']} kills from outside ({counts['servers']} of the fork server), 0.02 to "
        f"0.5 s apart: hashes equal. {counts['poison']} samples that kill ended "
        f"{counts['deaths']} workers, and only they were left out; "
        f"other samples tried alone, and cleared: {len(suspected - {str(POISON)})}. "
        f"{time.monotonic() - started:.0f} s"
    )
