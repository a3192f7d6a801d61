"""Checks that a loader gives the same bits under every setting: ``penstock.verify(make_loader)``.

::

    comparison      runs the factory's loader under each setting, and compares
      factory       arguments of the factory; turns a loader into a factory
      settings      the settings to compare
      hashed_run    one run of a loader, with delays, or killed and resumed
      hashing       hashes of a batch and its samples
      fresh_process the same run in a new interpreter, with a different hash seed
      differences   the first sample and field that differ, and how they differ
      causes        the likely cause, found by further runs
      verdict       the result: a table and the difference, as text and as plain values
    training        trains a small model twice and compares every bit, without a loader

This package works with any iterable and does not depend on Penstock's loader.
"""

from __future__ import annotations

from penstock.callable_package import make_callable

make_callable(__name__, "penstock.verify.comparison", "verify")
