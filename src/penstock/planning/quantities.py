"""Counts, durations and sizes as human-readable text.

Tested by ``tests/unit/planning/test_decisions.py``.
"""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """Return a number with its noun.

    Example:
        >>> count(1, "core"), count(2, "core")
        ('1 core', '2 cores')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def duration(seconds: float) -> str:
    """Return seconds as text, in a readable unit.

    Example:
        >>> duration(0.0123), duration(2.5), duration(4e-6)
        ('12.3 ms', '2.5 s', '4 µs')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def size(num_bytes: float) -> str:
    """Return bytes as text, in a readable unit.

    Example:
        >>> size(512), size(3 << 20), size(16 << 30)
        ('512 B', '3 MiB', '16 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
