"""Reads the small files in which the Linux kernel describes a machine (``/proc`` and ``/sys``)."""

from __future__ import annotations

from pathlib import Path

_MAX_DIGITS = 20
"""The number of digits of 2**64. The kernel never writes more."""


def read_text(path: Path) -> str:
    """Return a file's text without surrounding whitespace, or ``""`` if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # half the time of Path.read_text
            return file.read().decode("utf-8", errors="replace").strip("\x00 \n")
    except (OSError, ValueError):  # a name that contains a null byte raises ValueError
        return ""


def read_fields(path: Path) -> dict[str, str]:
    """Return the values in a file of lines such as ``oom_kill 3`` or ``State: S``, by name."""
    lines = (line.replace(":", " ", 1).split(None, 1) for line in read_text(path).splitlines())
    return {line[0]: line[1].strip() for line in lines if len(line) == 2}


def parse_count(text: str) -> int | None:
    """Return the non-negative integer in a text, or None.

    Example:
        >>> parse_count("42 "), parse_count("max"), parse_count("-1"), parse_count("")
        (42, None, None, None)
    """
    text = text.strip()
    is_count = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_count else None
