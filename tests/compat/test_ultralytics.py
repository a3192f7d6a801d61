"""YOLOv8n trained by Ultralytics gives bit-identical losses with any workers and with kills."""

from __future__ import annotations

from typing import Any

import pytest

from support import scripts
from support.example_runs import End, Run, train

pytestmark = [pytest.mark.vision, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("ultralytics")

HALF_WAY = r"1/2 .* [1-5]/16 "
"""Eight batches are in flight (prefetch_factor=4), so a worker killed here has batches left."""
SEEDED = ("--seed", "0")
RUNS = {
    "inline": Run(example="ultralytics_yolo", options=(*SEEDED, "--workers", "0")),
    "fork server, one killed": Run(
        example="ultralytics_yolo", options=(*SEEDED, "--workers", "2"), kill_at=HALF_WAY
    ),
    "spawn, one killed": Run(
        example="ultralytics_yolo",
        options=(*SEEDED, "--workers", "2", "--start-method", "spawn"),
        kill_at=HALF_WAY,
    ),
    "another seed": Run(example="ultralytics_yolo", options=("--seed", "1", "--workers", "0")),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("yolo")

    def one(name: str) -> End:
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        return train(RUNS[name], folder)

    return scripts.run_all(one, list(RUNS))


@pytest.mark.parametrize("name", RUNS)
def test_yolo_trains_two_epochs_unmodified(name: str, ends: dict[str, Any]) -> None:
    end = scripts.told(ends[name])
    assert end.status == 0, end.err[-3000:]
    assert len(end.told("loss")) == 1
    assert "2 loaders ran on Penstock's engine" in end.err
    assert "Mosaic takes its images from the whole dataset" in end.err


@pytest.mark.parametrize("name", ["fork server, one killed", "spawn, one killed"])
def test_a_worker_killed_half_way_changes_no_bit_of_the_loss(
    name: str, ends: dict[str, Any]
) -> None:
    end = scripts.told(ends[name])
    assert "recovered: 1 lost worker(s) were replaced" in end.err
    assert end.told("loss") == scripts.told(ends["inline"]).told("loss")


def test_another_seed_gives_another_loss(ends: dict[str, Any]) -> None:
    other, first = (scripts.told(ends[name]) for name in ("another seed", "inline"))
    assert other.told("loss") != first.told("loss")
