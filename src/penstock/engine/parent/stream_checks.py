"""Warns before the first batch if workers or ranks deliver the same samples of an iterable dataset.

    warn_of_shards    fewer shards than workers, so some workers get nothing (Hugging Face)
    WorkerComparison  two workers whose first samples are equal, although neither asked its number
    compare_ranks     two ranks whose first samples are equal

A dataset that divides itself in any way delivers different first samples, and is not mentioned.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.engine.loading.first_samples import FirstSamples
from penstock.user_objects import probe

_comparisons = itertools.count()
"""Numbers the comparisons between ranks, which create their loaders in the same order."""


def is_hugging_face(dataset: Any) -> bool:
    """Return True for an ``IterableDataset`` of Hugging Face."""
    return any(
        base.__name__ == "IterableDataset" and base.__module__.partition(".")[0] == "datasets"
        for base in type(dataset).__mro__
    )


def warn_of_shards(dataset: Any, num_workers: int, warn: Callable[[str], None]) -> None:
    """Warn if a Hugging Face dataset has fewer shards than workers."""
    if not is_hugging_face(dataset):
        return
    num_shards = probe(dataset, "num_shards")
    num_shards = probe(dataset, "n_shards") if num_shards is None else num_shards
    if isinstance(num_shards, int) and 0 < num_shards < num_workers:
        warn(
            f"the dataset has {num_shards} shard{'s' * (num_shards > 1)} for {num_workers} "
            f"workers, so {num_workers - num_shards} of them get no samples. Try: "
            f"DataLoader(..., num_workers={num_shards}), or dataset.reshard(), or "
            f"to_iterable_dataset(num_shards={num_workers})"
        )


class WorkerComparison:
    """Compares the first samples of two workers of one loader.

    Args:
        name: The class of the dataset, for the message.
    """

    def __init__(self, name: str, num_workers: int) -> None:
        self._name = name
        self._num_workers = num_workers
        self._found: dict[int, bytes] = {}
        self.is_settled = num_workers < 2
        self.message: str | None = None
        """The warning to show. None if the first samples differ."""
        self.digest: bytes | None = None
        """Digest of the first samples of the worker with the lowest number."""
        self._lowest = num_workers

    def note(self, worker: int, first: FirstSamples | None) -> None:
        """Record a worker's first reply. ``first`` is None if it had no samples."""
        if first is not None and worker < self._lowest:
            self._lowest, self.digest = worker, first.digest
        if self.is_settled or worker in self._found:
            return
        if first is None or first.has_asked or first.digest is None:
            self.is_settled = True
            return
        self._found[worker] = first.digest
        if len(self._found) == 2:
            self.is_settled = True
            if len(set(self._found.values())) == 1:
                self.message = self._text()

    def is_waiting_for(self, worker: int) -> bool:
        """Return True if the first reply of this worker would settle the comparison."""
        return not self.is_settled and bool(self._found) and worker not in self._found

    def _text(self) -> str:
        one, other = sorted(self._found)
        return (
            f"workers {one} and {other} begin with the same samples, and {self._name} does not "
            f"ask which worker it is in, so each of the {self._num_workers} workers delivers all "
            "samples. Divide them in __iter__: info = torch.utils.data.get_worker_info(); "
            "yield from itertools.islice(samples, info.id if info else 0, None, "
            "info.num_workers if info else 1). Or use DataLoader(..., num_workers=1)"
        )


def compare_ranks(dataset: Any, digest: bytes | None, warn: Callable[[str], None]) -> None:
    """Compare the first samples with those of the neighbouring ranks, if there are several.

    Uses the key-value store of the process group and never waits: of two ranks, the later one sees
    the samples of the earlier one.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if digest is None or distributed is None or not distributed.is_available():
        return
    if not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    with suppress(Exception):  # a store without check(), or one that was closed
        store = distributed.distributed_c10d._get_default_store()
        prefix = f"penstock-stream-{next(_comparisons)}-"
        store.set(f"{prefix}{rank}", digest.hex())
        for other in sorted({(rank - 1) % world_size, (rank + 1) % world_size}):
            key = f"{prefix}{other}"
            if store.check([key]) and store.get(key).decode() == digest.hex():
                warn(_rank_text(dataset, rank, other))
                return


def _rank_text(dataset: Any, rank: int, other: int) -> str:
    if is_hugging_face(dataset):
        cure = (
            "dataset = datasets.distributed.split_dataset_by_node(dataset, "
            "rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())"
        )
    else:
        cure = (
            "divide them in __iter__, also by worker: itertools.islice(samples, "
            "rank * num_workers + worker, None, world_size * num_workers)"
        )
    return (
        f"ranks {min(rank, other)} and {max(rank, other)} begin with the same samples of "
        f"{type(dataset).__name__}. Try: {cure}. Ignore this if these ranks share their samples "
        "on purpose, as in tensor parallelism"
    )
