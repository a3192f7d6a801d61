"""Repository structure: sizes, names, layers, the public package, errors and links."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.paths import REPO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCE = REPO / "src" / "penstock"
ERROR_PAGES = REPO / "docs" / "errors"

MAX_MODULE_LINES = 700
"""A module longer than this holds more than one idea. Most modules have 100 to 400 lines."""
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
HEAVY_PACKAGES = {"torch", "numpy"}
LOADER_MODULES = """
    device.setup
    engine.loading.default_collate engine.loading.fetch
    engine.parent.context engine.parent.faults
    engine.parent.inline_producer engine.parent.iterator
    errors importing loader named_tuple options user_objects
    order.base_order order.dataset_generators order.epoch_state order.global_generators order.keys
    order.object_walk order.rng order.sample_randomness order.twister_words
    trace.record trace.recorder
"""
"""Modules that ``from penstock import DataLoader`` imports. Every program pays for each of them,
about 0.5 ms. The first batch of a loader without workers imports no others."""
SELDOM_NEEDED = {
    "psutil",
    "penstock.engine.loading.bad_samples",
    "penstock.engine.memory.shared_column",
    "penstock.engine.parent.thread_pool",
    "penstock.machine.child_process",
}
"""Modules that the first batch of worker processes must not wait for."""
OWN_DEPENDENCIES = {"psutil", "cloudpickle", "rich"}
MAX_IMPORT_S = 0.050
NUM_IMPORT_RUNS = 7


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return its output."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# Sizes and names


def too_long(root: Path) -> list[str]:
    """List each module under `root` that exceeds the limit, with its length."""
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in root.rglob("*.py")}
    return [
        f"{path.relative_to(root)}: {length} lines"
        for path, length in sorted(lengths.items())
        if length > MAX_MODULE_LINES
    ]


def nameless(root: Path) -> list[str]:
    """List each module or folder under `root` whose name does not describe its purpose."""
    return [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*"))
        if path.stem.strip("_") in FORBIDDEN_NAMES and (path.is_dir() or path.suffix == ".py")
    ]


def test_no_module_is_too_long() -> None:
    assert too_long(SOURCE) == []


def test_a_long_module_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("x = 1\n" * (MAX_MODULE_LINES + 1))
    (tmp_path / "order.py").write_text("x = 1\n" * MAX_MODULE_LINES)
    assert too_long(tmp_path) == [f"engine.py: {MAX_MODULE_LINES + 1} lines"]


def twins(root: Path) -> list[str]:
    """List module names and public class names that occur twice under `root`."""
    places: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        if path.name.startswith("__"):
            continue
        names = [path.name]
        tree = ast.parse(path.read_text("utf-8"))
        names += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        for name in names:
            if not name.startswith("_"):
                places.setdefault(name, []).append(path.relative_to(root).as_posix())
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def test_no_two_modules_and_no_two_classes_share_a_name() -> None:
    assert twins(SOURCE) == []


def test_twins_would_be_noticed(tmp_path: Path) -> None:
    for folder in ("order", "trace"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plan.py").write_text("class Verdict: ...\nclass _Own: ...\n")
    both = "order/plan.py, trace/plan.py"
    assert twins(tmp_path) == [f"plan.py: {both}", f"Verdict: {both}"]


# Layers


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def modules() -> list[str]:
    """Return every module of the package except its ``__init__`` and ``__main__``."""
    parts = [path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")]
    names = [".".join(part for part in one if part != "__init__") for one in parts]
    return sorted(set(names) - {"penstock", "penstock.__main__"})


def test_every_module_stands_in_a_layer() -> None:
    layers = " ".join(contracts()[0]["layers"]).replace("|", " ").replace(":", " ").split()
    without = [
        name
        for name in modules()
        if not any(f"{name}.".startswith(f"{layer}.") for layer in layers)
        and not any(layer.startswith(f"{name}.") for layer in layers)  # a package of layers
    ]
    assert without == []
    gone = [layer for layer in layers if layer not in modules()]
    assert gone == [], "named in pyproject.toml, but there is no such module"


def front_page_users(root: Path) -> list[str]:
    """Return the places where package code imports another part through `penstock` itself.

    The linter checks modules, and these imports would bypass the layers. Imports of the version and
    of packages are allowed.
    """
    found = []
    packages = {path.name for path in root.iterdir() if path.is_dir()}
    packages |= {path.stem for path in root.glob("*.py")} | {"__version__"}
    for path in sorted(root.rglob("*.py")):
        if path == root / "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names if one.name == "penstock"]
            elif isinstance(node, ast.ImportFrom) and node.module == "penstock":
                names = [one.name for one in node.names if one.name not in packages]
            found += [f"{path.relative_to(root).as_posix()}: {name}" for name in names]
    return found


def test_no_module_goes_round_the_layers_through_the_front_page() -> None:
    assert front_page_users(SOURCE) == []


def test_a_way_round_the_layers_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("def f():\n    import penstock\n")
    (tmp_path / "engine" / "b.py").write_text("from penstock import Timeline, engine\n")
    assert front_page_users(tmp_path) == ["engine/a.py: penstock", "engine/b.py: Timeline"]


def test_the_listing_in_the_documents_has_every_module() -> None:
    page = (REPO / "docs" / "architecture.md").read_text("utf-8")
    tool = [sys.executable, str(REPO / "tools" / "list_modules.py")]
    listed = subprocess.run(tool, capture_output=True, text=True, check=True, timeout=240).stdout
    assert listed in page, "python tools/list_modules.py --write brings it up to date"


def test_every_module_and_folder_has_a_name_of_its_own() -> None:
    assert nameless(SOURCE) == []


def test_no_two_test_files_share_a_name() -> None:
    """pytest confuses two test files of the same name, and stops."""
    names = Counter(path.name for path in (REPO / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_nameless_module_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "_common.py").touch()
    (tmp_path / "utils").mkdir()
    assert nameless(tmp_path) == [os.path.join("engine", "_common.py"), "utils"]


# The public package


def heavy_packages_after(statement: str) -> set[str]:
    """Return the heavy packages that a fresh interpreter holds after running `statement`."""
    names = json.loads(
        run_python(f"{statement}\nimport json, sys\nprint(json.dumps([*sys.modules]))")
    )
    return HEAVY_PACKAGES & set(names)


def time_run_s(code: str) -> float:
    """Return the CPU time of an interpreter, start included. Other processes do not affect it."""
    return float(run_python(f"{code}\nimport time\nprint(time.process_time())"))


def import_cost_s(statement: str) -> float:
    """Return the cost of `statement` beyond the bare interpreter, from the fastest runs.

    The two alternate, so that a slow phase of the machine affects both.
    """
    run_python(statement)  # writes the bytecode and fills the page cache
    bare_s, with_import_s = [], []
    for _ in range(NUM_IMPORT_RUNS):
        bare_s.append(time_run_s("pass"))
        with_import_s.append(time_run_s(statement))
    return min(with_import_s) - min(bare_s)


def test_import_penstock_imports_no_torch_and_no_numpy() -> None:
    assert heavy_packages_after("import penstock") == set()


def test_a_heavy_import_would_be_noticed() -> None:
    assert heavy_packages_after("import numpy") == {"numpy"}


def test_import_penstock_takes_less_than_50_ms_beyond_the_interpreter() -> None:
    assert import_cost_s("import penstock") < MAX_IMPORT_S


def test_a_slow_import_would_be_noticed() -> None:
    # Twice the limit, because the interpreter's own time is subtracted, and it varies.
    busy = f"import time\nend_s = time.process_time() + {2 * MAX_IMPORT_S}"
    assert import_cost_s(f"{busy}\nwhile time.process_time() < end_s: pass") >= MAX_IMPORT_S


def modules_after(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter with torch adds by running ``statement``."""
    code = f"import json, sys, torch\nbefore = {{*sys.modules}}\n{statement}\n"
    return set(json.loads(run_python(f"{code}print(json.dumps([*({{*sys.modules}} - before)]))")))


def unexpected(modules: set[str], listed: str) -> set[str]:
    """Return our modules that are not listed (nor packages of those), and dependencies of ours."""
    known = {f"penstock.{name}" for name in listed.split()} | {"penstock"}
    known |= {name.rpartition(".")[0] for name in known}
    known |= {name.rpartition(".")[0] for name in known}
    ours = {name for name in modules if name.partition(".")[0] == "penstock"}
    return (ours - known) | {name for name in modules if name in OWN_DEPENDENCIES}


IMPORT_LOADER = "from penstock import DataLoader"
FIRST_BATCH = f"{IMPORT_LOADER}\nnext(iter(DataLoader([1, 2, 3], shuffle=True)))"


def test_the_loader_imports_only_what_every_loader_needs() -> None:
    assert unexpected(modules_after(IMPORT_LOADER), LOADER_MODULES) == set()


def test_the_first_batch_without_workers_imports_nothing_of_workers_or_the_plan() -> None:
    assert unexpected(modules_after(FIRST_BATCH), LOADER_MODULES) == set()


def test_the_first_batch_with_workers_imports_nothing_for_faults_and_threads() -> None:
    loader = "DataLoader([1, 2, 3], num_workers=1"
    quick = modules_after(f"{IMPORT_LOADER}\nnext(iter({loader})))")
    assert "penstock.engine.parent.fork_server" in quick
    assert quick & SELDOM_NEEDED == set()
    threads = modules_after(f"{IMPORT_LOADER}\nnext(iter({loader}, pool='thread')))")
    assert threads & SELDOM_NEEDED == {"penstock.engine.parent.thread_pool"}


def test_another_import_of_the_loader_would_be_noticed() -> None:
    found = unexpected(modules_after(f"{FIRST_BATCH}\nimport psutil"), LOADER_MODULES)
    assert found == {"psutil"}


# The callable package: `penstock.machine` is also a package, whatever the import order.

CALL_MACHINE = [
    "import penstock; here = penstock.machine()",
    "from penstock import machine; here = machine()",
    "import penstock.machine.facts; here = penstock.machine()",
    "import penstock.machine; here = penstock.machine()",
    "import penstock.machine.host; from penstock import machine; here = machine()",
    "from penstock import machine; import penstock.machine.facts; here = machine()",
    "from penstock import *; here = machine()",
    "from penstock.machine.collect import machine; here = machine()",
]


@pytest.mark.parametrize("statement", CALL_MACHINE)
def test_the_machine_can_be_asked_for_whatever_was_imported_first(statement: str) -> None:
    code = f"{statement}\nimport penstock\nassert type(here) is penstock.Machine"
    run_python(f"{code}\nassert isinstance(penstock.machine(), penstock.Machine)")


def test_asking_for_the_machine_imports_no_torch_and_no_numpy() -> None:
    assert heavy_packages_after("import penstock; penstock.machine()") == set()


def test_asking_for_the_machine_leaves_the_start_method_open() -> None:
    code = """
import multiprocessing, penstock
assert not penstock.machine().is_start_method_set
assert multiprocessing.get_start_method(allow_none=True) is None
multiprocessing.set_start_method("spawn")  # would raise if it had been settled
assert penstock.machine().is_start_method_set and penstock.machine().start_method == "spawn"
"""
    run_python(code)
    default = run_python("import multiprocessing as m; print(m.get_start_method())")
    assert run_python("import penstock; print(penstock.machine().start_method)") == default


# Exports in a fresh interpreter before and after every name is loaded. Submodules become attributes
# when they load. They are exports only if `__all__` lists them.
LIST_EXPORTS = """
import json
from types import ModuleType
import penstock

def names():
    return [
        name for name in dir(penstock)
        if not name.startswith("_")
        and (name in penstock.__all__ or not isinstance(getattr(penstock, name), ModuleType))
    ]

before = names()
star = {}
exec("from penstock import *", star)
star.pop("__builtins__")
print(json.dumps({"all": penstock.__all__, "before": before, "star": [*star], "after": names()}))
"""


@pytest.fixture(scope="module")
def exports() -> dict[str, list[str]]:
    listed: dict[str, list[str]] = json.loads(run_python(LIST_EXPORTS))
    return listed


def test_all_names_nothing_twice(exports: dict[str, list[str]]) -> None:
    assert sorted(set(exports["all"])) == sorted(exports["all"])


def test_every_name_in_all_can_be_imported(exports: dict[str, list[str]]) -> None:
    assert sorted(exports["star"]) == sorted(exports["all"])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_nothing_but_all_is_on_offer(exports: dict[str, list[str]], moment: str) -> None:
    public = [name for name in exports["all"] if not name.startswith("_")]
    assert sorted(exports[moment]) == sorted(public)


def test_a_name_that_is_not_in_all_cannot_be_imported() -> None:
    import penstock

    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018


# Errors and their pages


def coded_errors() -> list[type[BaseException]]:
    """List the error classes that have a code. Abstract classes have an empty code."""
    from penstock import errors

    return [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.PenstockError) and value.code
    ]


def code_of(error: type[BaseException]) -> str:
    code: str = vars(error).get("code", "")
    return code


def test_every_error_has_a_code_of_its_own() -> None:
    errors = coded_errors()
    assert errors
    assert [error.__name__ for error in errors if not code_of(error)] == [], "inherits its code"
    codes = [code_of(error) for error in errors]
    assert sorted(set(codes)) == sorted(codes)


def test_every_error_code_has_a_page_and_every_page_an_error() -> None:
    pages = {path.stem for path in ERROR_PAGES.glob("*.md")} - {"README"}
    assert pages == {code_of(error) for error in coded_errors()}


def test_every_error_page_is_in_the_index_with_its_name() -> None:
    index = (ERROR_PAGES / "README.md").read_text(encoding="utf-8")
    missing = [
        error.__name__
        for error in coded_errors()
        if f"({code_of(error)}.md)" not in index or error.__name__ not in index
    ]
    assert missing == []


# Links


LINK = re.compile(
    r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE
)
CODE = re.compile(r"^(```|~~~).*?^\1[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


MADE_PAGES = {
    REPO / "docs" / name for name in ("reference/api.md", "reference/cli.md", "examples.md")
}
"""Generated when the site is built, by tools/site/hook.py."""


def markdown_files(root: Path) -> Iterator[Path]:
    """Yield the project's Markdown files, without hidden, built or environment folders."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in {"build", "dist"}
            and not Path(folder, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


def broken_links(root: Path) -> list[str]:
    """List `file -> target` for each broken local link."""
    broken = []
    for path in markdown_files(root):
        text = CODE.sub("", path.read_text(encoding="utf-8"))
        for match in LINK.finditer(text):
            target = match.group(1) or match.group(2)
            if re.match(r"[a-z][a-z0-9+.-]*:|#", target, re.IGNORECASE):
                continue
            led = path.parent / target.partition("#")[0]
            if not led.exists() and led.resolve() not in MADE_PAGES:
                broken.append(f"{path.relative_to(root).as_posix()} -> {target}")
    return sorted(broken)


def test_every_local_link_in_the_documents_leads_somewhere() -> None:
    assert broken_links(REPO) == []


def test_a_broken_link_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "[up](../b.md#part) [away](https://example.org) [gone](c.md) `[code](d.md)`\n"
        "```\n[code](e.md)\n```\n[here](#part)\n[ref]: f.md\n"
    )
    (tmp_path / "b.md").touch()
    assert broken_links(tmp_path) == ["docs/a.md -> c.md", "docs/a.md -> f.md"]
