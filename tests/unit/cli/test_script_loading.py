"""A script runs up to the requested name, and later definitions are included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.script_loading import ScriptFailed, load_object, make_dataset
from penstock.cli.script_object import find_script_object

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def _own_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Protect ``__main__``, ``sys.path`` and ``sys.argv``, which a script replaces."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)


def load(source: str, name: str = "ds", *arguments: str) -> Any:
    Path("train.py").write_text(source)
    return load_object(find_script_object(f"train.py:{name}"), arguments)


def test_nothing_behind_the_name_is_run_except_definitions() -> None:
    source = (
        "log = []\nclass Data(list):\n"
        "    def double(self):\n        return [scale(x) for x in self]\n"
        "if __name__ == '__main__':\n    ds = Data([1, 2])\n    raise RuntimeError('a training')\n"
        "def scale(x):\n    return FACTOR * x\nFACTOR = 2\nlog.append('ran')\nimport not_there\n"
    )
    assert load(source).double() == [2, 4]
    assert sys.modules["__main__"].__dict__["log"] == []


def test_future_imports_hold_for_every_statement() -> None:
    source = (
        "from __future__ import annotations\nclass Data(list):\n    size: NoSuchType = 3\n"
        "ds = Data([Data.size])\n"
    )
    assert load(source) == [3]


def test_a_first_empty_value_is_not_what_was_meant() -> None:
    assert load("ds = None\nds = []\nds = [1]\nds = [2]\n") == [1]


def test_the_script_sees_its_own_arguments() -> None:
    assert load("import sys\nds = list(sys.argv)\n", "ds", "--root", "x") == [
        *("train.py", "--root", "x"),
    ]


@pytest.mark.parametrize(
    ("source", "kind", "said"),
    [
        ("x = 1\nraise OSError('gone')\nds = [1]\n", "script", "raised OSError: gone"),
        ("import sys\nsys.exit(3)\nds = [1]\n", "script", "ended with exit code 3"),
        ("return 1\nds = [1]\n", "script", "raised SyntaxError"),
        ("ds = 'a text'\n", "name", "ds is of type str"),
        ("if False:\n    ds = [1]\n", "name", "finished without defining 'ds'"),
    ],
)
def test_why_there_is_no_such_object_is_said(source: str, kind: str, said: str) -> None:
    with pytest.raises(ScriptFailed) as caught:
        load(source)
    assert caught.value.kind == kind
    assert said in caught.value.what


def test_a_function_or_class_is_called_if_it_needs_no_arguments() -> None:
    Path("train.py").write_text("def make(size=2):\n    return [0] * size\n")
    target = find_script_object("train.py:make")
    assert make_dataset(load_object(target), target) == [0, 0]
    with pytest.raises(ScriptFailed, match=r"make\(\) needs arguments: size"):
        make_dataset(lambda size: [0] * size, target)
