"""``script.py:name`` is found without running the script, or the error says why not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from penstock.cli.script_object import bound_names, find_script_object
from penstock.errors import BadTarget

pytestmark = pytest.mark.legacy

SCRIPT = """
import torch
from data import Images as Pictures

def main():
    local_set = Pictures()
    return local_set

if __name__ == "__main__":
    train_set = main()
    raise SystemExit("this must never be run here")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("name", ["train_set", "Pictures", "main"])
def test_a_name_at_the_top_level_or_under_the_guard_is_found(script: Path, name: str) -> None:
    target = find_script_object(f"{script}:{name}")
    assert (target.script, target.name) == (script, name)


def refusal(text: str) -> str:
    with pytest.raises(BadTarget) as caught:
        find_script_object(text)
    message = str(caught.value)
    assert "Traceback" not in message
    return message


def test_a_name_that_is_nearly_right_is_suggested(script: Path) -> None:
    assert f"penstock doctor {script}:train_set" in refusal(f"{script}:trainset")


def test_a_local_variable_is_told_where_it_lives(script: Path) -> None:
    message = refusal(f"{script}:local_set")
    assert f"{script}:6" in message
    assert "local to main()" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "'x' is neither a script nor"),
        ("", "'' is neither a script nor"),
        ("x.py:", "x.py cannot be read: No such file"),
        (":ds", "is neither a script nor"),
        ("missing.py:ds", "cannot be read"),
        (r"C:\train.py", "cannot be read"),
    ],
)
def test_a_text_that_names_nothing_is_refused(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refusal(text)


def test_a_script_without_a_name_gets_names_suggested(script: Path) -> None:
    for text in (str(script), f"{script}:"):
        assert f"penstock doctor {script}:train_set" in refusal(text)
    assert "is not a valid name" in refusal(f"{script}:1+1")


def test_a_misspelt_file_is_suggested(script: Path) -> None:
    assert f"{script}:..." in refusal(f"{script.with_name('trian.py')}:ds")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\xff\xfe rubbish \x00", "is not valid Python"),
        (b"def f(:\n", "is not valid Python"),
        (b"\xff\xfe\xfa = 1\n", "is not valid Python"),
    ],
)
def test_a_file_that_is_no_python_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rubbish.py"
    path.write_bytes(content)
    assert said in refusal(f"{path}:ds")


def test_a_folder_and_a_notebook_are_refused(tmp_path: Path) -> None:
    assert "folder" in refusal(f"{tmp_path}:ds")
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    assert "nbconvert" in refusal(f"{notebook}:ds")


def test_a_script_that_may_bind_anything_is_given_the_benefit_of_the_doubt(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from data import *\n")
    assert find_script_object(f"{path}:anything").name == "anything"


def test_names_are_found_wherever_a_module_binds_them() -> None:
    source = (
        "with a as b:\n  c, (d, *e) = f\nfor g in h: pass\n(i := 1)\ndef j():\n  global k\n  l = 1"
    )
    assert set(bound_names(ast.parse(source))) == set("bcdegijk")


def test_what_is_imported_is_not_suggested(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import numpy as np\ndataset = [np.zeros(3)]\n")
    with pytest.raises(BadTarget, match=r"train\.py:dataset"):
        find_script_object(f"{script}:nope")  # closer to np than to dataset


CLASSES = """
class TrainSet: ...
photo_set = TrainSet()
def make_loader(): return photo_set
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pack", "train.py:photo_set packed/  (or TrainSet, make_loader)"),
        ("verify", "train.py:make_loader  (or photo_set)"),
        ("bench", "train.py:photo_set  (or make_loader, TrainSet)"),
    ],
)
def test_a_suggestion_is_a_whole_line_that_could_work(
    tmp_path: Path, command: str, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLASSES)
    with pytest.raises(BadTarget) as caught:
        find_script_object(f"{script}:xyz", command)
    assert str(caught.value).endswith(said)


ACTS = """
def get_data():
    return list(range(8))

def main():
    return train(get_data())

def train(data):
    for _ in data:
        pass

def build_all():
    def inner():
        return 1

for images, labels in get_data():
    pass
"""


@pytest.mark.parametrize("command", ["verify", "pack", "doctor", "bench"])
def test_a_function_that_trains_is_not_suggested(tmp_path: Path, command: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(ACTS)
    with pytest.raises(BadTarget) as caught:
        find_script_object(f"{script}", command)
    suggested = str(caught.value).rpartition("program.py:")[2]
    assert suggested.startswith("get_data")
    others = ("main", "train", "build_all", "images", "labels")
    assert not [name for name in others if name in suggested]
    assert (
        find_script_object(f"{script}:main", command).name == "main"
    )  # if it is named, it is used


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("p = make_parser()\na = p.parse_args()\nds = [a]\nloader = ds\n", "ds  (or loader)"),
        ("def photos(): return []\na = 1\n", "photos"),
        ("p = []\na = 1\n", "p  (or a)"),  # no better name
    ],
)
def test_variables_that_hold_other_things_are_not_suggested(
    tmp_path: Path, source: str, said: str
) -> None:
    script = tmp_path / "own.py"
    script.write_text(source)
    assert refusal(str(script)).endswith(f"Try: penstock doctor {script}:{said}")
