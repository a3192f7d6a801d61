"""Loaders with workers in programs that other tools start, trace or embed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from support import scripts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first test waits for seven programs
    pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="every process is traced"),
]

PROGRAM = """
import torch
from torch.utils.data import Dataset


class Squares(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.tensor(i * i)


def main():
    from penstock import DataLoader

    loader = DataLoader(Squares(), batch_size=4, num_workers=2)
    total = sum(int(batch.sum()) for batch in loader)
    print("sum", total, loader.plan.start_method.reason, flush=True)


if __name__ == "__main__":
    main()
"""
CREATION = 1 + PROGRAM.splitlines().index(
    "    loader = DataLoader(Squares(), batch_size=4, num_workers=2)"
)
"""The line that creates the loader."""
RIGHT = f"sum {sum(i * i for i in range(16))}"
FORKED = f"{RIGHT} a copy of this process, from when its first loader was created, forks workers"
TRACED = (
    f"{RIGHT} a fresh Python forks workers, because a debugger, profiler or coverage tool is active"
)

CHILDREN = """
import multiprocessing

import program

if __name__ == "__main__":
    for method, is_daemon in (("fork", False), ("spawn", True)):
        context = multiprocessing.get_context(method)
        process = context.Process(target=program.main, daemon=is_daemon)
        process.start()
        process.join(250)
        print(method, process.exitcode, flush=True)
    program.main()
    process = multiprocessing.get_context("fork").Process(target=program.main)
    process.start()
    process.join(250)
    print("fork after a loader", process.exitcode)
"""

EMBEDDING = """
#include <Python.h>

int main(int count, char **arguments) {
    Py_Initialize();
    FILE *file = fopen(arguments[1], "r");
    int status = PyRun_SimpleFile(file, arguments[1]);
    return Py_FinalizeEx() < 0 ? 120 : status;
}
"""

TESTS = """
import os

import pytest

import program


@pytest.mark.parametrize("number", range(2))
def test_each_process_of_xdist_loads(number, capsys):
    program.main()
    assert capsys.readouterr().out.startswith("RIGHT")
    assert os.environ["PYTEST_XDIST_WORKER"] in ("gw0", "gw1")
""".replace("RIGHT", RIGHT)

COMMANDS: dict[str, tuple[str, ...]] = {
    "alone": ("program.py",),
    "import times": ("-X", "importtime", "program.py"),
    "pdb": ("-m", "pdb", "-c", f"break {CREATION}", "-c", "continue", "program.py"),
    "coverage": ("-m", "coverage", "run", "program.py"),
    "cProfile": ("-m", "cProfile", "program.py"),
    "children": ("children.py",),
    "xdist": ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_in_xdist.py"),
}
STDIN = {"pdb": "continue\nquit\n"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run(name: str) -> str:
        folder = scripts.make_folder(tmp_path_factory, "hosting")
        (folder / "program.py").write_text(PROGRAM)
        (folder / "children.py").write_text(CHILDREN)
        (folder / "test_in_xdist.py").write_text(TESTS)
        ended = subprocess.run(
            [sys.executable, *COMMANDS[name]],
            cwd=folder,
            input=STDIN.get(name, ""),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return scripts.run_all(run, list(COMMANDS))


def lines_of(name: str, outputs: dict[str, Any]) -> list[str]:
    output: str = scripts.told(outputs[name])
    return output.splitlines()


@pytest.mark.parametrize("name", ["alone", "import times"])
def test_a_program_that_nothing_traces_is_forked(name: str, outputs: dict[str, Any]) -> None:
    assert FORKED in lines_of(name, outputs)


@pytest.mark.parametrize("name", ["pdb", "coverage", "cProfile"])
def test_a_traced_program_starts_a_fresh_python(name: str, outputs: dict[str, Any]) -> None:
    # pdb's prompt may come before it.
    assert any(line.endswith(TRACED) for line in lines_of(name, outputs))


def test_pdb_stopped_at_its_breakpoint(outputs: dict[str, Any]) -> None:
    assert any("-> loader = DataLoader" in line for line in lines_of("pdb", outputs))


def test_children_of_multiprocessing_load(outputs: dict[str, Any]) -> None:
    lines = lines_of("children", outputs)
    ends = [line for line in lines if not line.startswith("sum")]
    assert ends == ["fork 0", "spawn 0", "fork after a loader 0"]
    assert [line.startswith(RIGHT) for line in lines if line.startswith("sum")] == [True] * 4


def test_tests_in_processes_of_xdist_load(outputs: dict[str, Any]) -> None:
    assert "2 passed" in lines_of("xdist", outputs)[-1]


def test_an_embedded_interpreter_loads(tmp_path: Path) -> None:
    executable = build_embedding(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(folder for folder in sys.path if folder)
    ended = subprocess.run(
        [executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHOME": sys.base_prefix},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(RIGHT)


def build_embedding(folder: Path) -> Path:
    """Compile a C program that runs a Python file, or skip the test."""
    if os.name != "posix" or not sysconfig.get_config_var("LDLIBRARY"):
        pytest.skip("needs a C compiler and the library of this Python")
    (folder / "embedding.c").write_text(EMBEDDING)
    library = sysconfig.get_config_var("LIBDIR")
    command = [
        "cc",
        "embedding.c",
        f"-I{sysconfig.get_paths()['include']}",
        f"-L{library}",
        f"-lpython{sysconfig.get_config_var('LDVERSION')}",
        f"-Wl,-rpath,{library}",
        "-o",
        "embedding",
    ]
    try:
        built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs a C compiler (cc)")
    if built.returncode != 0:
        pytest.skip(f"could not be linked with this Python: {built.stderr.strip()[-200:]}")
    return folder / "embedding"
