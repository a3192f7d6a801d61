"""Text reports of the soak runs. `make soak` collects them in benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def note(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line and append it to the file named by SOAK_RESULTS."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")
        path = os.environ.get("SOAK_RESULTS")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    return write
