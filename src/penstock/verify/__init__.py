"""Checks that a loader gives the same bits whatever loads them: ``penstock.verify(make_loader)``.

::

    comparison      runs the factory's loader under each setting, and compares
      factory       what the factory takes; a loader as a factory of loaders like it
      settings      which settings there are
      hashed_run    one run, batch after batch: delayed, or killed and resumed
      hashing       a batch and its samples as hashes
      fresh_process the same run in a new interpreter, with another hash seed
      differences   the first sample and field that differ, and how
      causes        why, as found by further runs
      verdict       the answer: a table, the difference, for a person or a program
    training        without a loader: is the same small training twice equal to the last bit here?

Nothing here knows Penstock's own loader: any iterable can be checked.
"""

from __future__ import annotations

from penstock.callable_package import make_callable

make_callable(__name__, "penstock.verify.comparison", "verify")
