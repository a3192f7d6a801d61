"""``loader.metrics()`` of real loaders: rates, faults and bytes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock import DataLoader

pytestmark = pytest.mark.legacy


class Photos:
    """Samples that take a millisecond. Some are bad."""

    def __init__(self, bad: dict[int, type[Exception]] | None = None) -> None:
        self._bad = bad or {}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        if index in self._bad:
            raise self._bad[index](f"sample {index}")
        return torch.zeros(8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_only_loads_waits_and_one_that_works_does_not(num_workers: int) -> None:
    loader = DataLoader(Photos(), batch_size=4, num_workers=num_workers)
    for _ in loader:
        pass
    loading = loader.metrics()
    assert (loading.num_batches, loading.num_samples) == (16, 64)
    assert loading.load.p50_s >= 0.004
    assert loading.wait_share > 0.5
    busy = DataLoader(Photos(), batch_size=4, num_workers=num_workers)
    for _ in busy:
        time.sleep(0.05)
    working = busy.metrics()
    assert working.step.p50_s >= 0.05
    assert working.wait_share < loading.wait_share
    assert working.step_share > loading.step_share


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_counted_by_cause(num_workers: int) -> None:
    bad: dict[int, type[Exception]] = {3: OSError, 4: OSError, 60: KeyError}
    loader = DataLoader(Photos(bad), batch_size=4, num_workers=num_workers, on_error="skip")
    for _ in loader:
        pass
    assert loader.metrics().bad_samples == {"OSError": 2, "KeyError": 1}
    sound = DataLoader(Photos(), batch_size=4, num_workers=num_workers, on_error="skip")
    for _ in sound:
        pass
    assert sound.metrics().bad_samples == {}


def test_epochs_with_new_workers_are_measured_together() -> None:
    loader = DataLoader(Photos(), batch_size=4, num_workers=2)
    for _ in range(3):
        for _ in loader:
            pass
    metrics = loader.metrics()
    assert metrics.num_batches == 48
    assert metrics.load.p50_s >= 0.004
    assert metrics.window_s > 0


class Kills(Photos):
    """Its tenth sample ends or stops the worker that loads it, once."""

    def __init__(self, flag: Path, how: str) -> None:
        super().__init__()
        self._flag, self._how = flag, how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10 and not self._flag.exists():
            self._flag.touch()
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return super().__getitem__(index)


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_workers_that_are_replaced_and_those_that_hung_are_counted(
    tmp_path: Path, how: str
) -> None:
    dataset = Kills(tmp_path / "flag", how)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, sample_timeout_s=5.0)
    assert sum(len(batch) for batch in loader) == 64
    metrics = loader.metrics()
    assert (metrics.num_restarts, metrics.num_hangs) == (1, int(how == "hung"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_that_workers_read_are_counted(tmp_path: Path) -> None:
    class Files(Photos):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            return len((tmp_path / "file").read_bytes())

    (tmp_path / "file").write_bytes(bytes(1 << 20))
    loader = DataLoader(Files(), batch_size=4, num_workers=1, persistent_workers=True)
    assert sum(int(batch.sum()) for batch in loader) == 64 << 20
    counted = loader.metrics().read_bytes
    assert counted is not None
    assert counted > 64 << 20
    loader.close()
    ended = loader.metrics().read_bytes
    assert ended is not None
    assert ended < counted
