"""Three steps of ``penstock demo``: the same bits, a killed worker, and a broken file.

Each loads one epoch with Penstock and with PyTorch's loader, and returns what happened as plain
records, which :mod:`penstock.cli.demo` prints.

Tested by ``tests/integration/cli/test_demo.py``.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.cli.demo_images import GeneratedImages
from penstock.cli.user_code import last_line

BATCH_SIZE = 8
WORKERS = (0, 2, 4)
KILL_AFTER = 1
"""Number of batches after which a worker is killed, when most of the epoch is not loaded yet."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of a loader.

    Args:
        checksum: Checksum of all batches, in order.
        error: The error that ended the epoch early, or an empty text.
        bad: The samples that were skipped, as text.
    """

    num_images: int
    checksum: str
    error: str = ""
    bad: tuple[str, ...] = ()


def compare_workers(images: GeneratedImages) -> dict[str, list[Epoch]]:
    """Load the same epoch with each number of workers."""
    return {
        whose: [_load(whose, images, num_workers) for num_workers in WORKERS]
        for whose in ("Penstock", "PyTorch")
    }


def kill_worker(images: GeneratedImages) -> dict[str, Epoch]:
    """Load an epoch in which one of two workers is killed."""

    def kill(batches: Any) -> None:
        import psutil

        psutil.Process(batches._workers[0].pid).kill()

    return {whose: _load(whose, images, 2, kill) for whose in ("Penstock", "PyTorch")}


def break_file(images: GeneratedImages) -> dict[str, Epoch]:
    """Load an epoch in which one file is truncated. The file stays truncated."""
    file = images.files[len(images) // 2]
    file.write_bytes(file.read_bytes()[:1000])
    return {
        "Penstock": _load("Penstock", images, 2, on_error="skip"),
        "PyTorch": _load("PyTorch", images, 2),
    }


def _load(
    whose: str,
    images: GeneratedImages,
    num_workers: int,
    disturb: Callable[[Any], None] = lambda batches: None,
    **options: Any,
) -> Epoch:
    """Load one epoch. ``disturb`` is called after a few batches."""
    sums, num_images, error = hashlib.sha256(), 0, ""
    with _quiet():
        loader = _make(whose, images, num_workers, options)
        batches: Any = None
        try:
            batches = iter(loader)
            for number, (pixels, kinds) in enumerate(batches, 1):
                sums.update(pixels.numpy().tobytes() + kinds.numpy().tobytes())
                num_images += len(kinds)
                if number == KILL_AFTER:
                    disturb(batches)
        except Exception as raised:  # the result of PyTorch's loader
            error = last_line(raised)
            raised.__traceback__ = None
        bad = [f"{one.path} ({one.error})" for one in getattr(loader, "bad_samples", ())]
        del batches
        # A failed iterator of PyTorch that is freed later, in a forked worker of the next loader,
        # prints a traceback there.
        gc.collect()
    return Epoch(num_images=num_images, checksum=sums.hexdigest()[:8], error=error, bad=tuple(bad))


def _make(whose: str, images: Any, num_workers: int, options: dict[str, Any]) -> Any:
    """Return the loader. For PyTorch's, all seeds are set, as careful scripts do."""
    import numpy as np
    import torch.utils.data

    from penstock.loader import DataLoader

    if whose == "Penstock":
        options = {**options, "seed": 0}
    else:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        options = {**options, "worker_init_fn": _discard_stderr}
    make: Any = DataLoader if whose == "Penstock" else torch.utils.data.DataLoader
    return make(images, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers, **options)


def _discard_stderr(worker: int) -> None:
    """Discard what a worker of PyTorch writes to stderr.

    When one worker is killed, the others may print tracebacks before they end.
    """
    target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, 2)
    os.close(target)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and the log: the demo prints what happened."""
    log = logging.getLogger("penstock")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
