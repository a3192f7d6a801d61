"""The DataLoader: torch's signature plus a few keywords. Only wires the rooms together."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock.engine.iterators import InlineIterator, PooledIterator, Setup
from penstock.errors import BadArgument
from penstock.machine.host import can_start_python, usable_cores
from penstock.policy.plan import (
    Choice,
    Plan,
    choose_num_workers,
    choose_pool,
    choose_prefetch,
    choose_start_method,
)

_POOLS = ("auto", "process", "thread", "inline")
_RANDOMNESS = ("sample", "worker")
_HAS_IN_ORDER = "in_order" in TorchDataLoader.__init__.__code__.co_varnames


_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(TorchDataLoader[_T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` that needs no recipe.

    All of torch's arguments keep their meaning. The ones of our own:

    Args:
        num_workers: As in torch; ``"auto"`` chooses (see :attr:`plan` for the reason).
        pool: ``"process"``, ``"thread"``, ``"inline"``, or ``"auto"``.
        randomness: ``"sample"``: the generators are set before each sample from its position, so
            the number of workers changes nothing. ``"worker"``: torch's way, one seed per worker.

    Example:
        >>> import torch
        >>> from penstock import DataLoader
        >>> data = [(torch.full((2,), float(i)), i) for i in range(6)]
        >>> for x, y in DataLoader(data, batch_size=3, num_workers=2):
        ...     print(tuple(x.shape), y.tolist())
        (3, 2) [0, 1, 2]
        (3, 2) [3, 4, 5]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | str = 0,
        collate_fn: Any = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Any = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        pool: str = "auto",
        randomness: str = "sample",
    ) -> None:
        _check("pool", pool, _POOLS)
        _check("randomness", randomness, _RANDOMNESS)
        workers = choose_num_workers(_checked_workers(num_workers), usable_cores())
        keywords: dict[str, Any] = {"prefetch_factor": prefetch_factor, "in_order": in_order}
        if prefetch_factor is None and not _HAS_IN_ORDER:
            keywords.pop("prefetch_factor")  # torch 1.13 has no None there
        if not _HAS_IN_ORDER:
            keywords.pop("in_order")
        self._asked_prefetch = prefetch_factor
        self._plan: Plan | None = None
        self._worker_choice = workers
        self.pool = pool
        self.randomness = randomness
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            workers.value,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **keywords,
        )
        self.in_order = in_order
        self.shuffle = shuffle

    @property
    def plan(self) -> Plan:
        """What this loader does here, each choice with its reason."""
        num_workers = self.num_workers
        choice = self._worker_choice
        if choice.value != num_workers:
            choice = Choice(num_workers, "num_workers was set after the loader was made", "asked")
        pool = choose_pool(self.pool, num_workers, can_start_processes=can_start_python())
        context = self.multiprocessing_context
        asked = context.get_start_method() if context is not None else None
        is_iterable = isinstance(self.dataset, torch.utils.data.IterableDataset)
        if pool.value == "inline" or num_workers == 0:
            pool = pool if pool.value == "inline" else Choice("inline", "num_workers is 0", "rule")
        elif pool.value == "thread" and is_iterable and num_workers > 1:
            choice = Choice(1, "threads cannot share an iterable dataset out", "rule")
        return Plan(
            pool=pool,
            start_method=choose_start_method(asked, pool.value, sys.platform),
            num_workers=choice,
            prefetch_factor=choose_prefetch(self._asked_prefetch, pool.value),
            randomness=self._randomness_choice(is_iterable),
        )

    def _randomness_choice(self, is_iterable: bool) -> Choice:
        if is_iterable and self.randomness == "sample":
            reason = "samples of an iterable dataset have no position of their own"
            return Choice("worker", reason, "rule")
        if self.randomness == "worker":
            return Choice("worker", "randomness='worker' was given", "asked")
        return Choice("sample", "the same bits whatever the number of workers", "rule")

    def _get_iterator(self) -> Any:
        plan = self.plan
        setup = Setup(
            pool=plan.pool.value,
            start_method=plan.start_method.value,
            num_workers=plan.num_workers.value,
            depth=self._asked_prefetch,
            per_sample=plan.randomness.value == "sample",
            in_order=self.in_order,
        )
        if plan.pool.value == "inline":
            return InlineIterator(self, setup)
        self.check_worker_number_rationality()
        return PooledIterator(self, setup)

    def close(self) -> None:
        """Stop persistent workers now; batches that were delivered stay valid."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None


def _check(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadArgument(
            f"{name}={value!r} is not known; it is one of {', '.join(map(repr, known))}",
            remedy=f"DataLoader(..., {name}={known[0]!r})",
        )


def _checked_workers(num_workers: Any) -> int | str:
    if isinstance(num_workers, str) and num_workers != "auto":
        raise BadArgument(
            f"num_workers={num_workers!r} is neither a number nor 'auto'",
            remedy="DataLoader(..., num_workers='auto')",
        )
    return num_workers  # type: ignore[no-any-return]
