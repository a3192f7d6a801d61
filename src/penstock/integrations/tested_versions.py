"""The versions of other libraries that this is tested with.

Another version runs all the same. Where one is met, a line says so, once in a process: what goes
wrong there may be nobody's fault. The extras in ``pyproject.toml`` name the same ranges.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library as people import and install it, and the versions that the tests have seen.

    Args:
        first: The oldest one that was tested.
        below: The next one that may break what it promises to the one that was tested last.
    """

    name: str
    package: str
    first: str
    below: str

    @property
    def requirement(self) -> str:
        """What pip is told.

        Example:
            >>> Library(name="timm", package="timm", first="1.0.30", below="1.1").requirement
            'timm>=1.0.30,<1.1'
        """
        return f"{self.package}>={self.first},<{self.below}"

    def is_tested(self, version: str) -> bool:
        """Is this version within the range?

        Example:
            >>> timm = Library(name="timm", package="timm", first="1.0.30", below="1.1")
            >>> [timm.is_tested(version) for version in ("1.0.30", "1.0.31.dev0", "1.1", "0.9.16")]
            [True, True, False, False]
        """
        return _numbers(self.first) <= _numbers(version) < _numbers(self.below)


LIBRARIES = tuple(
    Library(name=name, package=package, first=first, below=below)
    for name, package, first, below in (
        ("accelerate", "accelerate", "0.34.2", "2"),
        ("albumentations", "albumentations", "2.0.0", "2.1"),
        ("datasets", "datasets", "4.0.0", "6"),
        ("fastai", "fastai", "2.8.12", "2.9"),
        ("monai", "monai", "1.6.1", "1.7"),
        ("pytorch_lightning", "pytorch-lightning", "2.6.0", "2.7"),
        ("timm", "timm", "1.0.15", "1.1"),
        ("torchdata", "torchdata", "0.10.1", "0.12"),
        ("transformers", "transformers", "5.22.2", "6"),
        ("ultralytics", "ultralytics", "8.4.190", "8.5"),
        ("webdataset", "webdataset", "0.2.100", "2"),
    )
)

_told: set[str] = set()


def untested_here() -> Iterator[str]:
    """A line for each library that is imported in a version outside its range; each only once.

    Called from: what sees other people's code at work. Costs a few lookups.
    """
    for library in LIBRARIES:
        module = sys.modules.get(library.name)
        if module is None or library.name in _told:
            continue
        version = _version_of(module, library)
        if version is None:  # it is being imported at this moment
            continue
        _told.add(library.name)
        if not library.is_tested(version):
            yield (
                f"{library.package} {version} is outside what this is tested with "
                f"({library.requirement}): it runs, but what is odd may come from there. "
                f'Try: pip install "{library.requirement}"'
            )


def _version_of(module: Any, library: Library) -> str | None:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version(library.package)
    except metadata.PackageNotFoundError:  # under another name, or not installed at all
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, without zeros at the end: 1.0 is 1."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
