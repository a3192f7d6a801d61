"""Run pytest, and run what failed once more, alone. A test that passes then is flaky.

A flaky test fails the run, unless ``tests/quarantine.txt`` names it with a reason:

    tests/faults/engine/parent/test_watchdog.py::test_name  # why it is flaky, and since when

Usage: PYTHON tools/run_pytest.py CACHE [PYTEST ARGUMENTS...]
CACHE separates the caches of runs that go on at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = 1
"""pytest's exit status when tests failed. Others mean that it could not run."""
QUARANTINE = Path("tests/quarantine.txt")


def main(cache: str, *arguments: str) -> int:
    folder = Path(".pytest_cache") / cache
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status != FAILED:
        return status
    failed = _last_failed(folder)
    print("\n== Once more, alone: the tests that failed", flush=True)
    again = [*command, "--last-failed", "--last-failed-no-failures", "none"]
    second = subprocess.run(again, check=False).returncode
    flaky = sorted(failed - _last_failed(folder))
    quarantined = _quarantined()
    print()
    for name in flaky:
        reason = quarantined.get(name)
        print(f"== FLAKY{'' if reason is None else f', quarantined ({reason})'}: {name}")
    if second != 0:
        return second
    if set(flaky) <= quarantined.keys():
        return 0
    print(
        "== A flaky test fails the run. Fix it, or name it in tests/quarantine.txt with the reason."
    )
    return FAILED


def _last_failed(folder: Path) -> set[str]:
    file = folder / "v" / "cache" / "lastfailed"
    return set(json.loads(file.read_text("utf-8"))) if file.exists() else set()


def _quarantined() -> dict[str, str]:
    """Tests and reasons."""
    if not QUARANTINE.exists():
        return {}
    entries: dict[str, str] = {}
    for line in QUARANTINE.read_text("utf-8").splitlines():
        name, _, reason = line.partition("  # ")
        if name.strip() and not line.startswith("#"):
            if not reason.strip():
                raise SystemExit(f"{QUARANTINE}: {name} has no reason")
            entries[name.strip()] = reason.strip()
    return entries


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
