"""The commands of documents that need torchvision and Pillow work as written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("torchvision")

from support import typed_commands
from support.documents import faults_of, type_documents
from support.paths import REPO

pytestmark = [
    pytest.mark.vision,
    pytest.mark.timeout(1200),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks for each command"),
]

TEXTS = {
    path.relative_to(REPO).as_posix(): path.read_text("utf-8")
    for path in sorted((REPO / "docs").rglob("*.md"))
    if path.read_text("utf-8").startswith(typed_commands.VISION)
}


def test_the_first_tour_is_among_them() -> None:
    assert "docs/tour.md" in TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_the_commands_of_a_vision_document_work_as_written(name: str, tmp_path: Path) -> None:
    (typed,) = type_documents([TEXTS[name]], [tmp_path], limit_s=900)
    assert len(typed) > 5
    assert faults_of(typed) == []
