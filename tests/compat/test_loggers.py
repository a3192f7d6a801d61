"""The programs in docs/metrics.md that hand metrics to loggers, with the real libraries.

The core leg has prometheus-client and the SDK of OpenTelemetry. Where tensorboard and wandb are
installed, their programs run too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO
from support.typed_commands import steps_of

pytestmark = pytest.mark.slow
FILES = {
    step["name"]: step["text"]
    for step in steps_of((REPO / "docs" / "metrics.md").read_text("utf-8"))
    if step["kind"] == "python"
}


def run_logger(name: str, folder: Path) -> str:
    """Run a program of the page next to its loader, and return what it printed."""
    for file in ("photos.py", name):
        (folder / file).write_text(FILES[file])
    command = [sys.executable, "-W", "error::DeprecationWarning:photos", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    assert run_logger("with_prometheus.py", tmp_path).startswith("http://127.0.0.1:")


def test_tensorboard(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    run_logger("with_tensorboard.py", tmp_path)
    events = reading.EventAccumulator(str(tmp_path / "runs" / "photos"))
    events.Reload()
    waits = events.Scalars("loading/wait_share")
    assert [event.step for event in waits] == [49, 99]
    assert all(0 < event.value <= 1 for event in waits)
    assert "loading/verdict/text_summary" in events.Tags()["tensors"]


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_logger("with_wandb.py", tmp_path)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert b"wait_share" in content
    assert b"no_such_field" not in content


def test_opentelemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
    printed = run_logger("with_opentelemetry.py", tmp_path)
    assert '"penstock.wait_ratio"' in printed
    assert '"value": 100' in printed  # batches
