"""``penstock doctor URL`` over a real HTTP server, and over S3 servers with and without rights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cli.doctor import network_check
from support.range_server import Fault, RangeServer
from support.remote_sets import needs_obstore
from support.s3_servers import S3Place, upload

pytestmark = [pytest.mark.remote, needs_obstore]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, obstore_threads: None) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "numbers"
    penstock.pack([np.full(1 << 18, at, np.uint8) for at in range(40)], folder, workers=0)
    return folder


def run_doctor(url: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "penstock", "doctor", url]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert as_json.returncode == shown.returncode
    return as_json.returncode, json.loads(as_json.stdout)["network"], shown.stdout


@pytest.mark.slow
def test_latency_and_rates_are_those_of_the_server(packed: Path) -> None:
    with RangeServer(packed, latency_s=0.05, bytes_per_s=50e6) as server:
        status, found, shown = run_doctor(server.url)
    assert status == 0
    assert (found["kind"], found["access"]["read"]) == ("packed set", "allowed")
    assert found["latency_s"] >= 0.05
    rates = {int(num): rate for num, rate in found["rates"].items()}
    assert list(rates) == [1, 8, 32, 128]
    assert rates[1] < 50e6  # the latency is paid for each request
    assert max(rates.values()) < 60e6
    assert "128 requests" in shown
    assert "MB/s" in shown


@pytest.mark.slow
def test_a_storage_that_refuses_is_an_error_with_the_cause(packed: Path) -> None:
    with RangeServer(packed) as server:
        server.faults.append(Fault("status", "", 9999, status=403))
        status, found, shown = run_doctor(server.url)
    assert status == 1
    assert found["access"]["read"] == "refused"
    assert not found["rates"]
    assert "credentials" in shown


@pytest.fixture
def short_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "_LEVEL_S", 0.05)


def test_a_folder_of_objects_is_listed_and_measured(
    packed: Path, tmp_path: Path, short_levels: None
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100_000))
    found = network_check.check_network(tmp_path.as_uri())
    assert found.access == {"list": "allowed", "read": "allowed"}
    assert (found.kind, found.num_bytes) == ("objects", 100_000)
    assert all(found.rates.values())
    (tmp_path / "a.bin").unlink()
    failed = network_check.check_network(tmp_path.as_uri())
    assert failed.failure is not None
    assert "no objects" in failed.failure["what"]


def test_a_set_in_s3_is_measured_and_a_wrong_key_is_refused(
    s3: S3Place, packed: Path, short_levels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(packed, s3.url)
    found = network_check.check_network(s3.url)
    assert found.access == {"list": "allowed", "read": "allowed"}
    assert found.kind == "packed set"
    assert list(found.rates) == [1, 8, 32, 128]
    assert all(found.rates.values())
    if not s3.checks_keys:
        return
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    failed = network_check.check_network(s3.url)
    assert failed.access == {"list": "refused", "read": "refused"}
    assert failed.failure is not None
    assert "credentials" in failed.failure["likely"]
    assert not any(secret in str(failed) for secret in ("another-secret", "key-of-the-tests"))
