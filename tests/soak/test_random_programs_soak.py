"""Random programs for SOAK_PROGRAM_MINUTES minutes: `make soak`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from support.programs.driver import Session

MINUTES = float(os.environ.get("SOAK_PROGRAM_MINUTES", "120"))
SEED = int(os.environ.get("PROGRAMS_SEED", time.strftime("%Y%m%d")))
"""A different seed each day, printed with the result."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(MINUTES * 60 + 3600)]


def test_random_programs_agree_with_their_references(note: Callable[[str], None]) -> None:
    session = Session(SEED)
    found = []
    for one in session.run(minutes=MINUTES):
        note(str(one))
        found.append(one)
    note(str(session.report))
    assert not found
