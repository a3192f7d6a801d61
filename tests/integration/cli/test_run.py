"""``penstock run`` runs a script exactly like ``python``. These tests do not need torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support import scripts

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and fork")

NAMES = """
'''What it is about.'''
import sys
print(sys.argv, __name__, __file__, __doc__, __package__, __spec__, type(__loader__).__name__)
print(sys.path[0], sorted(name for name in globals() if name.startswith("__")))
print(sys.modules["__main__"].__dict__ is globals(), len(sys.path) == len(set(sys.path)))
import neighbour
print(neighbour.__file__)
"""
FAILS = """
import neighbour
def outer():
    inner()
def inner():
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("chained") from error
outer()
"""
CLASSES = """
import dataclasses, pickle, sys
@dataclasses.dataclass
class Point:
    x: int
    kind: "str" = "p"
class Meta(type):
    pass
class Odd(metaclass=Meta):
    def __eq__(self, other):
        return type(self) is type(other)
assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
assert pickle.loads(pickle.dumps(Odd())) == Odd()
print(Point.__module__, Point(2), "done")
"""
POOL = """
import multiprocessing, os, sys
def double(x):
    return 2 * x, __name__
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    with multiprocessing.Pool(2) as pool:
        print(pool.map(double, range(4)))
"""
FORKS = """
import atexit, os, sys
atexit.register(lambda: print("end of", "child" if child == 0 else "parent", flush=True))
child = os.fork()
if child == 0:
    sys.exit(3)
print("child gave", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(4)
"""
HOOKED = """
import sys
sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno)
raise RuntimeError("seen by my own hook")
"""
HOOK_FAILS = """
import sys
def hook(kind, error, trace):
    raise LookupError("of the hook")
sys.excepthook = hook
1 / 0
"""
LAST_WORDS = """
import atexit, sys
atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))
raise RuntimeError("for whoever reports crashes")
"""
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "names": (NAMES, ("--seed", "1", "-m", "x", "--", "--workers=3")),
    "exit 7": ("import sys; sys.exit(7)", ()),
    "exit with words": ("raise SystemExit('no data here')", ()),
    "exit with nothing": ("raise SystemExit", ()),
    "an exception": (FAILS, ()),
    "an exception in a module": ("import neighbour\nneighbour.fail()", ()),
    "a syntax error": ("x = 1\nif x\n    pass\n", ()),
    "a syntax error in a module": ("import crooked", ()),
    "a hook": (HOOKED, ()),
    "a hook that fails": (HOOK_FAILS, ()),
    "a crash that is looked at": (LAST_WORDS, ()),
    "classes": (CLASSES, ()),
    "stdin": ("import sys; print(input().upper(), sys.stdin.read())", ()),
    "an encoding": ("# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'), __name__)", ()),
    "a spawn pool": (POOL, ("spawn",)),
    "the last word": ("import atexit; atexit.register(print, 'last'); print('first')", ()),
}
POSIX_SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a fork": (FORKS, ()),
    "a fork pool": (POOL, ("fork",)),
    "sigterm": ("import os; os.kill(os.getpid(), 15); import time; time.sleep(9)", ()),
    "ctrl-c": ("import signal\ndef f():\n    signal.raise_signal(signal.SIGINT)\nf()", ()),
    "aborts": ("import os; os.abort()", ()),
}
if sys.platform != "win32":
    SCRIPTS.update(POSIX_SCRIPTS)
NEIGHBOUR = "def fail():\n    raise OSError(2, 'no such disk')\n"


def folder_with(folder: Path, source: str, is_latin: bool) -> Path:
    folder.mkdir()
    (folder / "program.py").write_text(source, encoding="latin-1" if is_latin else "utf-8")
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    (folder / "crooked.py").write_text("def f(:\n")
    return folder


def ended(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        input="first line\nrest\n",
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environ},
        timeout=240,
        check=False,
    )


def told(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of each script in the same folder, with python and with penstock run."""
    root = tmp_path_factory.mktemp("scripts")

    def both(name: str) -> Any:
        source, arguments = SCRIPTS[name]
        folder = folder_with(root / name.replace(" ", "-"), source, "latin-1" in source)
        plain = ended(["program.py", *arguments], folder)
        ours = ended(["-m", "penstock", "run", "program.py", *arguments], folder)
        return told(plain), told(ours)

    return scripts.run_all(both, list(SCRIPTS))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_to_the_letter_what_it_does_with_python(
    name: str, outcomes: dict[str, Any]
) -> None:
    plain, ours = scripts.told(outcomes[name])
    assert ours == plain


@posix
def test_the_ends_are_those_that_a_shell_knows(outcomes: dict[str, Any]) -> None:
    wanted = {"exit 7": 7, "an exception": 1, "sigterm": -15, "ctrl-c": -2, "a fork": 4}
    assert {name: outcomes[name][1][0] for name in wanted} == wanted


AT_EXIT = """
import atexit, signal, sys
atexit.register(lambda: exec("print('at exit')", {}))
if sys.argv[1:] == ["caught"]:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(5)
signal.raise_signal(signal.SIGINT)
"""


@posix
@pytest.mark.parametrize(("argument", "status"), [("uncaught", -2), ("caught", 5)])
def test_a_ctrl_c_is_the_end_whatever_runs_at_exit(
    argument: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(AT_EXIT)
    result = ended(["-m", "penstock", "run", "program.py", argument], tmp_path)
    assert (result.returncode, result.stdout) == (status, "at exit\n"), result.stderr


def test_no_frame_of_ours_is_in_a_traceback(outcomes: dict[str, Any]) -> None:
    for name in ("an exception", "an exception in a module", "a syntax error"):
        shown = outcomes[name][1][2]
        assert "penstock" not in shown.replace("penstock-", "")
        assert "runpy" not in shown


# -- modules, folders, archives --------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("package")
    (root / "pack").mkdir()
    (root / "pack" / "__init__.py").write_text("where = __file__\n")
    source = (
        "import sys\nfrom . import where\nprint(sys.argv, __name__, __package__, sys.path[0])\n"
    )
    (root / "pack" / "train.py").write_text(source)
    (root / "pack" / "__main__.py").write_text(source)
    (root / "pack" / "fails.py").write_text("1 / 0\n")
    (root / "parsing").mkdir()
    (root / "parsing" / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (root / "parsing" / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (root / "needy.py").write_text("import not_there_at_all\n")
    (root / "folder").mkdir()
    (root / "pack" / "empty").mkdir()
    main = "import sys, beside\nprint(sys.argv, __name__, __file__, sys.path[0], beside.x)\n"
    (root / "folder" / "__main__.py").write_text(main)
    (root / "folder" / "beside.py").write_text("x = 5\n")
    with zipfile.ZipFile(root / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", main)
        archive.writestr("beside.py", "x = 6\n")
    return root


TARGETS = {
    "a module": ["-m", "pack.train", "--seed", "1"],
    "a package": ["-m", "pack", "a"],
    "a package that reads the arguments": ["-m", "parsing.train", "--lr", "3"],
    "a module that fails": ["-m", "pack.fails"],
    "a module whose import fails": ["-m", "needy"],
    "a folder": ["folder", "a", "-m"],
    "an archive": ["archive.zip", "a"],
}


@pytest.fixture(scope="module")
def found(package: Path) -> dict[str, Any]:
    def both(name: str) -> Any:
        plain = ended(TARGETS[name], package)
        return told(plain), told(ended(["-m", "penstock", "run", *TARGETS[name]], package))

    return scripts.run_all(both, list(TARGETS))


@pytest.mark.parametrize("name", TARGETS)
def test_modules_folders_and_archives_run_as_with_python(name: str, found: dict[str, Any]) -> None:
    plain, ours = scripts.told(found[name])
    assert ours[:2] == plain[:2]
    # With -m, Python's traceback shows its own runpy frames, and Penstock's does not.
    assert ours[2].splitlines()[-1:] == plain[2].splitlines()[-1:]


# -- output of penstock itself ---------------------------------------------------------------------

COMMANDS = {
    "no script": (["gone.py"], "script 'gone.py' not found"),
    "no module": (["-m", "pack.gone"], "module 'pack.gone' not found"),
    "no package": (["-m", "gone.at.all"], "module 'gone.at.all' not found"),
    "a relative module": (["-m", ".pack"], "module '.pack' not found"),
    "no target": ([], "Missing argument"),
    "a negative part": (["--max-bad", "-1", "pack/train.py"], "--max-bad=-1 must be a count"),
    "a part without end": (["--max-bad", "inf", "pack/train.py"], "--max-bad=inf must be a count"),
    "one and a half": (["--max-bad", "1.5", "pack/train.py"], "--max-bad=1.5 must be a count"),
    "no time": (
        ["--sample-timeout-s", "0", "pack/train.py"],
        "must be a positive number of seconds",
    ),
    "a long seed": (["--seed", str(2**70), "pack/train.py"], "does not fit in 64 bits"),
    "no folder": (["--bad-samples-file", "gone/bad.jsonl", "pack/train.py"], "does not exist"),
    "bad workers": (["--workers", "many", "pack/train.py"], "many"),
    "no such option": (["--epochs", "10", "pack/train.py"], "No such option: --epochs"),
    "bad policy": (["--on-error", "ignore", "pack/train.py"], "ignore"),
    "bad start": (["--start-method", "teleport", "pack/train.py"], "teleport"),
    "bad seed": (["--seed", "x", "pack/train.py"], "seed"),
    "an empty folder": (["pack/empty"], "no __main__.py"),
}


@pytest.fixture(scope="module")
def refused(package: Path) -> dict[str, Any]:
    def run(name: str) -> Any:
        return ended(["-m", "penstock", "run", *COMMANDS[name][0]], package)

    return scripts.run_all(run, list(COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_run_is_said_with_status_2(name: str, refused: dict[str, Any]) -> None:
    result = scripts.told(refused[name])
    assert result.returncode == 2
    assert COMMANDS[name][1] in result.stderr
    assert "Traceback" not in result.stderr


def test_an_option_of_the_script_s_before_it_is_told_where_it_goes(refused: dict[str, Any]) -> None:
    assert "go after its name" in scripts.told(refused["no such option"]).stderr


def test_standard_input_is_a_script(tmp_path: Path) -> None:
    source = "import sys\nprint(sys.argv, __name__, sys.path[0] == '')\n1 / 0\n"
    ends = [
        subprocess.run(
            [sys.executable, *command, "-", "a"],
            input=source,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=240,
            check=False,
        )
        for command in ([], ["-m", "penstock", "run"])
    ]
    assert told(ends[1]) == told(ends[0])
    assert "ZeroDivisionError" in ends[0].stderr


HASHES = "import os; print(hash('a'), os.environ.get('PYTHONHASHSEED'), os.getpid() > 0)"


@posix
def test_a_seed_settles_the_order_of_sets_unless_somebody_has(tmp_path: Path) -> None:
    (tmp_path / "hashes.py").write_text(HASHES)
    command = ["-m", "penstock", "run"]
    seeded = [*command, "--seed", "5", "hashes.py"]
    runs = [
        (seeded, {}),
        ([*command, "--seed=5", "hashes.py"], {}),
        ([*command, "hashes.py", "--seed", "5"], {}),
        (seeded, {"PYTHONHASHSEED": "9"}),
        ([*command, "--seed", "1", "--seed", "5", "hashes.py"], {}),  # the last one wins
    ]
    cleared = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    shown = [
        subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**cleared, **environ},
            check=True,
            timeout=240,
        ).stdout
        for arguments, environ in runs
    ]
    assert shown[0] == shown[1] == shown[4]
    assert " 5 " in shown[0]
    assert " None " in shown[2]  # the script's own argument
    assert " 9 " in shown[3]


def test_a_plain_run_imports_nothing_slow(tmp_path: Any) -> None:
    """Control: the help text needs rich."""
    script = tmp_path / "program.py"
    script.write_text("import sys; print({'torch', 'numpy', 'rich', 'zipfile'} & {*sys.modules})")
    command = [sys.executable, "-m", "penstock", "run", "--workers", "2", str(script)]
    end = subprocess.run(command, capture_output=True, text=True, check=True)
    assert end.stdout == "set()\n"
    end = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, check=True)
    assert "--sample-timeout-s" in end.stdout
