"""The GPU watch reports usage, and says so when no tool can read it."""

from __future__ import annotations

import json

import pytest

from penstock.cli.doctor import watch
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.gpu_usage import GpuUsage

pytestmark = pytest.mark.legacy

READING = GpuReading(index=1, name="card", use_percent=5.0, power_w=70.4)


def test_nothing_to_watch_is_said_and_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        watch.run_watch(as_json=False, ask=lambda limit_s: GpuUsage(trouble="no nvidia-smi")) == 1
    )
    captured = capsys.readouterr()
    assert "no nvidia-smi" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_tool_that_falls_silent_ends_the_watch_after_a_while(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.0)
    looks = iter([GpuUsage(readings=(READING,), seen_by="x")])
    assert (
        watch.run_watch(as_json=as_json, ask=lambda s: next(looks, GpuUsage(trouble="hangs"))) == 1
    )
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 1 + watch.MAX_SILENCE
    assert "hangs" in captured.err
    if as_json:
        assert json.loads(lines[0])["readings"][0]["power_w"] == 70.4
    else:
        assert "GPU 1  5 %  -  -  70 W" in lines[0]
