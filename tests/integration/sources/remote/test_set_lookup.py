"""Messages of the process that makes the first requests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.legacy]
PROGRAM = """
import sys, threading
from penstock.sources.remote import set_lookup
sys.setswitchinterval(1e-6)
def tell_often():
    for number in range(200):
        set_lookup._tell(f"request {number} failed")
threads = [threading.Thread(target=tell_often) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_requests_that_fail_at_the_same_time_are_told_in_a_line_each() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True
    )
    told = [json.loads(line)["trying"] for line in done.stdout.splitlines()]
    assert sorted(told) == sorted([f"request {number} failed" for number in range(200)] * 8)
