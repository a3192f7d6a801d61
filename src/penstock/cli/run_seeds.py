"""``penstock run --seed``: each generator is seeded as early as it exists, and only once.

    Python's hashes   before anything: Python starts again with PYTHONHASHSEED
    Python's random   before the script begins
    NumPy's           when NumPy is imported
    torch's           when torch is imported, with the switches for repeatable algorithms

What the script draws or seeds by itself in between stays as it is. Imports are late: a Python that
starts again pays for them twice.
"""

from __future__ import annotations

import os
import sys

HASH_SEED = "PYTHONHASHSEED"
_MASK = (1 << 64) - 1


def restart_with_hash_seed(seed: int) -> None:
    """Start Python again with a hash seed, which decides the order of sets of strings.

    Returns where a hash seed is set already, and on Windows, which cannot replace a process.
    """
    if HASH_SEED in os.environ or sys.platform == "win32" or not sys.orig_argv:
        return
    environ = dict(os.environ, **{HASH_SEED: str(seed % (1 << 32))})
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def seed_early(seed: int) -> None:
    """Seed what exists before the script begins, and NumPy when it is imported."""
    import random

    from penstock.integrations.script_runner import when_imported

    random.seed(seed & _MASK)
    when_imported("numpy", lambda: _seed_numpy(seed & _MASK))


def _seed_numpy(bits: int) -> None:
    from penstock.order.seeding import seed_numpy

    seed_numpy(bits)


def seed_torch(seed: int) -> None:
    """Seed torch, which was imported just now. Python's and NumPy's generators keep their state."""
    import random

    import numpy as np

    from penstock.order.seeding import seed_all

    python, numpy = random.getstate(), np.random.get_state()
    seed_all(seed)
    random.setstate(python)
    np.random.set_state(numpy)


def hash_notes(seed: int) -> list[str]:
    """What to say where Python's hash seed is not the one that was asked for."""
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
