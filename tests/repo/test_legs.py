"""``make test`` runs every part once in its three lanes, and fails if one of them does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a shell script")

PARTS = [
    "core: faults",
    "core: integration",
    "core: others",
    "core: repo",
    "core: unit",
    "legacy",
    "vision",
]
MORE_PARTS = ["formats", "python314", "ray", "remote", "windows"]
"""Legs of ``make test-all`` only."""
MAKE = """#!/bin/sh
echo "$2" >>called
[ "$2" != "$SKIPPED" ] || echo "needs apt" >"$SKIP_NOTE"
[ "$2" != "$FAILING" ]
"""


def run_legs(
    folder: Path, failing: str = "", skipped: str = "", slow: str = "", machine: str = "x86_64"
) -> tuple[int, dict[str, str], list[str]]:
    """Run the script with a make that only records its targets, and a uname."""
    (folder / "tools").mkdir()
    (folder / ".venv-legacy").mkdir()
    (folder / ".venv-legacy" / ".ready").touch()
    shutil.copy(REPO / "tools" / "test_legs.sh", folder / "tools")
    programs = {
        "make": MAKE,
        "tools/install_programs.sh": "#!/bin/sh\n",
        "bin/uname": f"#!/bin/sh\necho {machine}\n",
    }
    (folder / "bin").mkdir()
    for name, source in programs.items():
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
    ended = subprocess.run(
        ["tools/test_legs.sh"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "MAKE": str(folder / "make"),
            "FAILING": failing,
            "SKIPPED": skipped,
            "SLOW": slow,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = dict(re.findall(r"^  (.+): (\w+) \((?:\d+ s|needs \w+)\)$", ended.stdout, re.M))
    return ended.returncode, outcomes, sorted((folder / "called").read_text().splitlines())


def test_each_part_runs_once(tmp_path: Path) -> None:
    status, outcomes, called = run_legs(tmp_path)
    assert (status, outcomes) == (0, dict.fromkeys(PARTS, "passed"))
    targets = [f"test-{part.removeprefix('core: ')}" for part in PARTS]
    assert called == sorted(["env-core", "env-legacy", "env-vision", *targets])


def test_a_part_that_fails_fails_the_run_and_the_others_run(tmp_path: Path) -> None:
    status, outcomes, _ = run_legs(tmp_path, failing="test-vision")
    assert (status, outcomes) == (1, {**dict.fromkeys(PARTS, "passed"), "vision": "FAILED"})


def test_make_test_all_runs_the_legs_of_other_versions_too(tmp_path: Path) -> None:
    status, outcomes, called = run_legs(tmp_path, slow="yes")
    assert (status, outcomes) == (0, dict.fromkeys([*PARTS, *MORE_PARTS], "passed"))
    assert {f"test-{part}" for part in MORE_PARTS} | {"env-formats", "env-windows"} <= set(called)


def test_the_windows_leg_is_left_out_on_arm64(tmp_path: Path) -> None:
    status, outcomes, called = run_legs(tmp_path, slow="yes", machine="aarch64")
    assert (status, "windows" in outcomes) == (0, False)
    assert [target for target in called if "windows" in target] == []


@pytest.mark.parametrize("leg", ["python314", "windows"])
def test_a_leg_that_cannot_run_here_is_named_with_the_reason(leg: str, tmp_path: Path) -> None:
    status, outcomes, _ = run_legs(tmp_path, skipped=f"test-{leg}", slow="yes")
    assert (status, outcomes[leg]) == (0, "skipped")
    assert [name for name, outcome in outcomes.items() if outcome != "passed"] == [leg]


@pytest.mark.parametrize("part", PARTS)
def test_only_make_test_all_runs_the_slow_tests(part: str) -> None:
    target = f"test-{part.removeprefix('core: ')}"
    quick, whole = (
        subprocess.run(
            ["make", "--no-print-directory", "-n", target, f"SLOW={slow}"],
            cwd=REPO,
            env={key: value for key, value in os.environ.items() if key != "MAKEFLAGS"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for slow in ("", "yes")
    )
    assert "and not slow" in quick
    assert "slow" not in whole
    assert "SLOW=yes" in (REPO / "Makefile").read_text("utf-8").split("\ntest-all:")[1]


def test_the_parts_of_core_are_all_folders_of_tests() -> None:
    makefile = (REPO / "Makefile").read_text("utf-8")
    named = re.search(r"OTHERS = \$\(addprefix tests/,(.+)\)", makefile)
    assert named is not None
    parts = {*named[1].split(), *re.findall(r"run_pytest.py .+ tests/(\w+) ", makefile)}
    folders = {path.parts[len(REPO.parts) + 1] for path in (REPO / "tests").rglob("test_*.py")}
    assert parts == folders - {"soak"}


@pytest.mark.parametrize(("leg", "least"), [("formats", 5), ("remote", 1), ("ray", 0)])
def test_a_leg_runs_every_file_marked_for_it(leg: str, least: int) -> None:
    makefile = (REPO / "Makefile").read_text("utf-8")
    (folders,) = re.findall(rf"^{leg.upper()} = (.+)$", makefile, re.M)
    marked = [
        path.relative_to(REPO).as_posix()
        for path in (REPO / "tests").rglob("test_*.py")
        if f"pytest.mark.{leg}" in path.read_text("utf-8")
        and path.name != "test_legs.py"
        and "soak" not in path.parts  # make soak runs them
    ]
    assert len(marked) > least
    assert [path for path in marked if not path.startswith(tuple(folders.split()))] == []
