"""The files of the hosted project agree with the Makefile and with .ci/run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.paths import REPO

yaml = pytest.importorskip("yaml")

WORKFLOWS = REPO / ".github" / "workflows"


def commands_of(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (REPO / "Makefile").read_text("utf-8"), re.M))


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_calls_make_targets_and_files_that_exist(workflow: Path) -> None:
    text = "\n".join(commands_of(workflow))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets()
    for file in re.findall(r"\b(?:tools|requirements)/[\w./-]+", text):
        assert (REPO / file).exists(), file


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_hosted_ci_runs_what_ci_run_runs(name: str) -> None:
    ours = re.findall(r"^make .*", (REPO / ".ci" / "run").read_text("utf-8"), re.M)
    assert ours == ["make check", "make test-all"]
    assert set(ours) <= set(commands_of(WORKFLOWS / name))


def test_pre_commit_runs_the_tools_of_make_check() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0][
        "hooks"
    ]
    makefile = (REPO / "Makefile").read_text("utf-8").replace("$(BIN)", ".venv/bin")
    assert len(hooks) >= 4
    for hook in hooks:
        assert hook["entry"].split()[0] in makefile


def test_dependabot_and_code_owners_name_folders_that_exist() -> None:
    updates = yaml.safe_load((REPO / ".github" / "dependabot.yml").read_text("utf-8"))["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"github-actions", "pip"}
    owned = (REPO / ".github" / "CODEOWNERS").read_text("utf-8")
    for folder in re.findall(r"^/(\S+)", owned, re.M):
        assert (REPO / folder).is_dir(), folder
