"""``penstock run --seed``: seeds each generator once, as early as possible.

    Python's hashes   first: Python is restarted with PYTHONHASHSEED
    Python's random   before the script starts
    NumPy's           when NumPy is imported
    torch's           when torch is imported, with the settings for deterministic algorithms

What the script itself seeds or draws in between is preserved. Imports are inside functions, because
a restarted Python would run them twice.
"""

from __future__ import annotations

import os
import sys

HASH_SEED = "PYTHONHASHSEED"
_MASK = (1 << 64) - 1


def restart_with_hash_seed(seed: int) -> None:
    """Restart Python with a hash seed, which determines the order of sets of strings.

    Does nothing if a hash seed is already set, or on Windows, which cannot replace a process.
    """
    if HASH_SEED in os.environ or sys.platform == "win32" or not sys.orig_argv:
        return
    environ = dict(os.environ, **{HASH_SEED: str(seed % (1 << 32))})
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def seed_early(seed: int) -> None:
    """Seed Python's generator now, and NumPy's when NumPy is imported."""
    import random

    from penstock.integrations.script_runner import when_imported

    random.seed(seed & _MASK)
    when_imported("numpy", lambda: _seed_numpy(seed & _MASK))


def _seed_numpy(bits: int) -> None:
    from penstock.order.seeding import seed_numpy

    seed_numpy(bits)


def seed_torch(seed: int) -> None:
    """Seed torch after it is imported. Python's and NumPy's generators keep their state."""
    import random

    import numpy as np

    from penstock.order.seeding import seed_all

    python, numpy = random.getstate(), np.random.get_state()
    seed_all(seed)
    random.setstate(python)
    np.random.set_state(numpy)


def hash_notes(seed: int) -> list[str]:
    """Return a note if Python's hash seed does not match ``seed``."""
    given = os.environ.get(HASH_SEED)
    if given == str(seed % (1 << 32)) and not sys.flags.ignore_environment:
        return []
    if sys.flags.ignore_environment:
        reason = f"python -E ignores {HASH_SEED}"
    elif given is None:
        reason = f"set {HASH_SEED}={seed % (1 << 32)} before Python starts"
    else:
        reason = f"{HASH_SEED}={given} is set"
    return [f"the order of sets of strings does not depend on --seed: {reason}"]
