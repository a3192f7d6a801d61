"""``penstock run --seed``: each generator is seeded as early as it exists, and only once.

    Python's random   before the script begins
    NumPy's           when NumPy is imported
    torch's           when torch is imported, with the switches for repeatable algorithms

What the script draws or seeds by itself in between stays as it is.
"""

from __future__ import annotations

import os
import random
import sys

from penstock.cli.early import HASH_SEED
from penstock.integrations import script_runner as running

_MASK = (1 << 64) - 1


def seed_early(seed: int) -> None:
    """Before the script begins."""
    random.seed(seed & _MASK)
    running.when_imported("numpy", lambda: _seed_numpy(seed & _MASK))


def _seed_numpy(bits: int) -> None:
    from penstock.order.seeding import seed_numpy

    seed_numpy(bits)


def seed_torch(seed: int) -> None:
    """torch is there. What was drawn from the other generators so far is not drawn again."""
    import numpy as np

    from penstock.order.seeding import seed_all

    python, numpy = random.getstate(), np.random.get_state()
    seed_all(seed)
    random.setstate(python)
    np.random.set_state(numpy)


def hash_notes(seed: int) -> list[str]:
    """Is Python's hash seed another one than was asked for?"""
    given = os.environ.get(HASH_SEED)
    if given == str(seed % (1 << 32)) and not sys.flags.ignore_environment:
        return []
    if sys.flags.ignore_environment:
        reason = "python -E ignores the variable that sets it"
    elif given is None:
        reason = f"it must be set before Python starts: {HASH_SEED}={seed % (1 << 32)}"
    else:
        reason = f"{HASH_SEED}={given} is set"
    return [f"the order of sets of strings does not follow --seed: {reason}"]
