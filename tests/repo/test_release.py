"""The archives build, and the wheel works in an empty environment."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import penstock
from support.paths import REPO

SOURCE = REPO / "src" / "penstock"
NEEDS = {"cloudpickle", "numpy", "psutil", "rich", "torch"}
SCRIPT = """
import sys
import penstock
assert penstock.__file__.startswith(sys.prefix), penstock.__file__
dataset = [(float(i), i) for i in range(8)]
loader = penstock.DataLoader(dataset, batch_size=4, shuffle=True, seed=0, num_workers=1)
assert sorted(i for _, indices in loader for i in indices.tolist()) == list(range(8))
print(loader.plan.start_method.value)
"""


FIND_NEEDS = """
import importlib.util, pathlib, sys
origins = [importlib.util.find_spec(name).origin for name in sys.argv[1:]]
print(*{str(pathlib.Path(origin).parents[1]) for origin in origins}, sep="\\n")
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None and "CI" not in os.environ:
        pytest.skip("nothing to build with: pip install -r requirements/build.txt")
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], REPO)
    return folder


def run(command: list[str], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_package_its_version_and_its_needs(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = [name for name in names if name.endswith("/METADATA")]
        told = Parser().parsestr(archive.read(meta).decode())
    assert told["Version"] == penstock.__version__
    assert {name.split("/")[0].split("-")[0] for name in names} == {"penstock"}
    needs = [need for need in told.get_all("Requires-Dist", []) if "extra ==" not in need]
    bare = {need.partition(">")[0].strip() for need in needs}
    assert bare == NEEDS
    assert "penstock/py.typed" in names


def test_the_sdist_has_what_the_tests_and_documents_need(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "mkdocs.yml")
    assert [name for name in wanted if name not in names] == []
    assert {"src/penstock/loader.py", "tests/conftest.py", "docs/index.md"} <= names


@pytest.mark.parametrize("leg", ["core", "vision", "legacy"])
def test_the_wheel_works_in_an_empty_environment(archives: Path, tmp_path: Path, leg: str) -> None:
    """Each leg has its own Python and torch. Dependencies come from the leg's environment."""
    source = sys.executable
    if leg != "core":
        source = str(REPO / f".venv-{leg}" / "bin" / "python")
        if not (REPO / f".venv-{leg}" / ".ready").exists():
            pytest.skip(f"no environment of the leg: make env-{leg}")
    (wheel,) = archives.glob("*.whl")
    run([source, "-m", "venv", "--without-pip", str(tmp_path / "new")], tmp_path)
    is_windows = os.name == "nt"
    binaries = tmp_path / "new" / ("Scripts" if is_windows else "bin")
    python = str(binaries / ("python.exe" if is_windows else "python"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel)], tmp_path)
    place = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path)
    borrowed = run([source, "-c", FIND_NEEDS, *sorted(NEEDS)], tmp_path)
    (Path(place.strip()) / "borrowed.pth").write_text(borrowed, encoding="utf-8")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    assert run([python, "script.py"], tmp_path).strip() in ("forkserver", "spawn")
    told = run([str(binaries / "penstock"), "--version"], tmp_path)
    assert told.strip() == f"penstock {penstock.__version__}"


def test_the_version_stands_in_one_place() -> None:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{penstock.__version__}"' not in text
    assert 'dynamic = ["version"]' in text
    changes = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changes
    assert f"## [{penstock.__version__}] - 20" in changes


# Statements in SECURITY.md about the code


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def calls_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls
    }


def test_no_pickle_is_in_the_modules_of_packed_sets() -> None:
    pickles = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    found = {path.name: imports_of(path) & pickles for path in (SOURCE / "sources").rglob("*.py")}
    assert len(found) > 10
    # Readers of other formats unpickle fields, with allow_pickle=True only.
    others = {"litdata_leaves.py", "mds_dataset.py", "member_decoders.py"}
    assert {name for name, names in found.items() if names} == others
    assert imports_of(SOURCE / "engine" / "parent" / "fork_server.py") & pickles  # control


def test_nothing_listens_but_the_metrics_endpoint() -> None:
    listening = {"listen", "accept", "bind", "make_server", "start_http_server"}
    found = {path.name: calls_of(path) & listening for path in SOURCE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {
        "prometheus.py": {"make_server"}
    }
    assert "socketpair" in calls_of(SOURCE / "engine" / "parent" / "fork_server.py")
