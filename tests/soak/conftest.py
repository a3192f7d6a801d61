"""What the long counts found, as text: `make soak` gathers it in benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def note(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says a line, and adds it to the file that SOAK_RESULTS names."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")
        path = os.environ.get("SOAK_RESULTS")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    return write
