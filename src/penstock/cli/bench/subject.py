"""What is loaded: a script's dataset or loader, a folder of pictures, or pictures made here."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.doctor.script import TrialFailed, run_script
from penstock.cli.doctor.target import find_target
from penstock.errors import BadTarget

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PIXELS, NUM_MADE, BATCH_SIZE = 224, 256, 32


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A dataset, and what its own loader says about batches of it."""

    name: str
    dataset: Any
    batch_size: int = BATCH_SIZE
    collate_fn: Any = None


class Pictures:
    """A folder's pictures, decoded by Pillow and brought to one size."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        with importlib.import_module("PIL.Image").open(self._files[index]) as image:
            return np.asarray(image.convert("RGB").resize((PIXELS, PIXELS)))


@contextmanager
def open_subject(target: str | None, arguments: tuple[str, ...]) -> Iterator[Subject]:
    """What ``target`` means; None: pictures made here.

    Raises:
        BadTarget: There is nothing to load.
    """
    if target is None:
        from penstock.cli.demo_images import GeneratedImages

        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            yield Subject(
                name="pictures made here", dataset=GeneratedImages(Path(folder), NUM_MADE)
            )
    elif Path(target).is_dir():
        yield Subject(name=target, dataset=_pictures_in(Path(target)))
    else:
        yield _from_script(target, arguments)


def _pictures_in(folder: Path) -> Pictures:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    if not files:
        kinds = ", ".join(PICTURES)
        raise BadTarget(f"there are no pictures ({kinds}) in {folder}", remedy="penstock bench")
    if importlib.util.find_spec("PIL") is None:
        raise BadTarget(
            "pictures of a folder are decoded by Pillow, which is not installed",
            remedy="pip install 'penstock[images]'",
        )
    return Pictures(files)


def _from_script(target: str, arguments: tuple[str, ...]) -> Subject:
    if ":" not in target and not Path(target).exists():
        raise BadTarget(
            f"there is no folder and no script {target!r}",
            remedy="penstock bench train.py:dataset, or a folder of pictures",
        )
    found = find_target(target, "bench")
    try:
        value = run_script(found, list(arguments), lambda doing: None)
        if isinstance(value, type) or not hasattr(value, "__getitem__"):
            value = value() if callable(value) and not hasattr(value, "dataset") else value
    except TrialFailed as error:
        raise BadTarget(error.what, where=error.where, remedy=error.cure or None) from None
    if hasattr(value, "dataset"):
        batch_size = getattr(value, "batch_size", None) or BATCH_SIZE
        collate_fn = getattr(value, "collate_fn", None)
        return Subject(
            name=target, dataset=value.dataset, batch_size=batch_size, collate_fn=collate_fn
        )
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise BadTarget(
            f"{target} is a {type(value).__name__}, which has no samples with numbers",
            remedy="penstock bench train.py:dataset",
        )
    return Subject(name=target, dataset=value)
