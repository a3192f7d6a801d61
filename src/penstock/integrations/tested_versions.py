"""The tested version ranges of other libraries.

Other versions are allowed. A warning names them once per process, because a problem may come from
the untested version. The extras in ``pyproject.toml`` have the same ranges.
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
    """A library, its import and package names, and its tested versions.

    Args:
        first: The oldest tested version.
        below: The first version that may break compatibility with the newest tested one.
    """

    name: str
    package: str
    first: str
    below: str

    @property
    def requirement(self) -> str:
        """The requirement for pip.

        Example:
            >>> Library(name="timm", package="timm", first="1.0.30", below="1.1").requirement
            'timm>=1.0.30,<1.1'
        """
        return f"{self.package}>={self.first},<{self.below}"

    def is_tested(self, version: str) -> bool:
        """Return True if a version is within the range.

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
    """Yield a warning for each imported library with an untested version, once per library.

    Called when a loader is patched or prepared. Takes only a few lookups.
    """
    for library in LIBRARIES:
        module = sys.modules.get(library.name)
        if module is None or library.name in _told:
            continue
        version = _version_of(module, library)
        if version is None:  # the import is still running
            continue
        _told.add(library.name)
        if not library.is_tested(version):
            yield (
                f"{library.package} {version} is untested with Penstock (tested: "
                f"{library.requirement}). It runs, but may cause problems. "
                f'Try: pip install "{library.requirement}"'
            )


def _version_of(module: Any, library: Library) -> str | None:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version(library.package)
    except metadata.PackageNotFoundError:  # installed under a different name, or not at all
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros, so 1.0 equals 1."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
