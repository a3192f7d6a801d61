"""The line of ``penstock run``, read without typer, whose import takes as long as some scripts.

Only what is certain is read here. Help, an option that nobody knows or a value that is none is left
to typer, which reads the line again and says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_COUNT = re.compile(r"[0-9]{1,9}")


class _Unclear(Exception):
    """Typer knows what to say about it."""


def _matching(pattern: re.Pattern[str], convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not pattern.fullmatch(text):
            raise _Unclear
        return convert(text)

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    return _matching(re.compile("|".join(words)), str)


_text = _matching(re.compile(r"[^-].*", re.DOTALL), str)

TAKES_VALUE: dict[str, Callable[[str], Any]] = {
    "--seed": _matching(_WHOLE, int),
    "--workers": _one_of("auto", "[0-9]{1,9}"),
    "--start-method": _one_of("spawn", "fork", "forkserver"),
    "--on-error": _one_of("raise", "skip", "replace"),
    "--max-bad": _matching(_NUMBER, float),
    "--bad-samples-file": _text,
    "--max-restarts": _matching(_COUNT, int),
    "--sample-timeout-s": _matching(_NUMBER, float),
    "--conv": _one_of("auto", "on", "off"),
    "--trace": _text,
}
"""Options that are followed by a value, and what reads it."""
SWITCHES = ("--persistent-workers",)


def num_own(arguments: Sequence[str]) -> int:
    """How many arguments of ``penstock run`` stand before the script, ``-m`` among them.

    Example:
        >>> num_own(["--seed", "0", "train.py", "--seed", "1"])
        2
        >>> num_own(["-m", "package.train", "--seed", "1"])
        1
    """
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "-":
        if arguments[place] in ("-m", "--"):
            return place + 1
        place += 2 if arguments[place] in TAKES_VALUE else 1
    return min(place, len(arguments))


def read_line(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What was typed behind ``penstock run``, by the names of the command's parameters.

    None: that is not certain.

    Example:
        >>> read_line(["--seed", "0", "train.py", "--epochs", "3"])
        {'seed': 0, 'target': 'train.py', 'arguments': ['--epochs', '3']}
        >>> read_line(["--sed", "0", "train.py"])
    """
    place = num_own(arguments)
    own, rest = list(arguments[:place]), list(arguments[place:])
    found: dict[str, Any] = {}
    if own[-1:] == ["-m"]:
        found["is_module"] = True
        own.pop()
    if not rest or (rest[0].startswith("-") and rest[0] != "-"):
        return None
    try:
        while own:
            name, has_value, value = own.pop(0).partition("=")
            parameter = name[2:].replace("-", "_")
            if name in SWITCHES and not has_value:
                found[parameter] = True
            elif name in TAKES_VALUE and (has_value or own):
                found[parameter] = TAKES_VALUE[name](value if has_value else own.pop(0))
            else:
                return None
    except _Unclear:
        return None
    return {**found, "target": rest[0], "arguments": rest[1:]}
