from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.remote.node_checks import check_node, find_local_paths
from penstock.engine.remote.node_worker import versions
from penstock.errors import StartFailed

pytestmark = pytest.mark.legacy


class Photos:
    def __init__(self, root: Any, **more: Any) -> None:
        self.root = root
        self.__dict__.update(more)

    def __len__(self) -> int:
        return 1


def answer(**changes: Any) -> dict[str, Any]:
    return {"node": "10.0.0.2 (ab)", "versions": versions(), "missing": [], **changes}


def test_paths_of_a_dataset_and_of_what_it_wraps_are_found(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.touch()
    inner = Photos(tmp_path, samples=[(str(file), 0)], name="a/b", mark="\0/", number=3)
    assert find_local_paths(inner) == [str(file), str(tmp_path)]
    assert find_local_paths(Photos(None, dataset=inner)) == [str(tmp_path)]
    assert find_local_paths(list(range(3))) == []


def test_a_node_like_this_machine_passes() -> None:
    texts: list[str] = []
    check_node(answer(), texts.append)
    assert texts == []


@pytest.mark.parametrize("name", ["Penstock", "Python", "torch", "NumPy"])
def test_another_version_is_named(name: str) -> None:
    with pytest.raises(StartFailed, match=rf"node 10\.0\.0\.2 \(ab\) has {name} 0\.1 instead of"):
        check_node(answer(versions={**versions(), name: "0.1"}), print)


def test_the_patch_level_of_python_may_differ() -> None:
    there = versions()
    there["Python"] = there["Python"].rpartition(".")[0] + ".99"
    check_node(answer(versions=there), print)


def test_a_missing_file_is_an_error_and_a_missing_folder_a_warning(tmp_path: Path) -> None:
    texts: list[str] = []
    check_node(answer(missing=[str(tmp_path)]), texts.append)
    assert len(texts) == 1
    assert f"the folder {tmp_path} exists here, but not on node" in texts[0]
    file = tmp_path / "photo.jpg"
    file.touch()
    with pytest.raises(StartFailed, match=r"photo\.jpg exists here, but not on node"):
        check_node(answer(missing=[str(tmp_path), str(file)]), texts.append)
