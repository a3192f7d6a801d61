"""How does a loader go on in the middle of an epoch? What it adds to torch's class for that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from penstock.errors import BadArgument, BadState, warn_user
from penstock.options import check_count
from penstock.order.bucketing import BucketedBatches
from penstock.order.epoch_state import (
    EpochIndices,
    EpochPosition,
    EpochState,
    fits_generator,
    own_state_of,
)
from penstock.order.loader_state import LoaderState
from penstock.order.ranks import rank_here
from penstock.order.samplers import Order, SeededOrder


class Resumable:
    """Epochs that are counted, state_dict, and set_epoch, over torch's index samplers.

    Pairs with: torch's DataLoader as the next base class.
    """

    seed: int | None
    _epoch_state: EpochState
    dataset: Any
    sampler: Any
    batch_sampler: Any
    batch_size: int | None
    drop_last: bool
    num_workers: int

    @property
    def _index_sampler(self) -> Any:
        indices: Any = super()._index_sampler  # type: ignore[misc]
        return EpochIndices(
            indices,
            self._epoch_state,
            self._rows_per_batch(),
            is_batched=self.batch_sampler is not None,
            is_endless=self._is_iterable(),
        )

    def _is_iterable(self) -> bool:
        raise AssertionError("the loader knows")

    def _rows_per_batch(self) -> int | None:
        sizes = (self.batch_size, getattr(self.batch_sampler, "batch_size", None))
        return next((size for size in sizes if isinstance(size, int)), None)

    def _turn(self) -> None:
        """Turn to the next epoch. Called once before each is iterated."""
        self._epoch_state.turn(self._order(), self._stateful_sampler())
        if isinstance(self.batch_sampler, BucketedBatches):
            self.batch_sampler.set_epoch(self._epoch_state.epoch)

    def _stateful_sampler(self) -> Any:
        """The user's batch sampler, if it has a state of its own; else the sampler."""
        has_state = hasattr(self.batch_sampler, "load_state_dict")
        return self.batch_sampler if has_state else self.sampler

    def set_epoch(self, epoch: int) -> None:
        """The next epoch is this one. Not needed, because epochs are counted; but honoured."""
        self._epoch_state.set_epoch(check_count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: what was delivered counts, not what was loaded ahead.

        Plain data of a few hundred bytes, valid for another number of workers, another pool, and
        another number of ranks with the same global batch.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(list(range(8)), batch_size=2, shuffle=True, seed=0)
            >>> batches = iter(loader)
            >>> first = next(batches)
            >>> state = loader.state_dict()
            >>> other = DataLoader(list(range(8)), batch_size=2, shuffle=True, seed=0)
            >>> other.load_state_dict(state)
            >>> [b.tolist() for b in other] == [b.tolist() for b in batches]
            True
        """
        mark = self._epoch_state.mark(self._global_batch(), self._end())
        if self._is_iterable() and not self.num_workers and not self._epoch_state.is_over:
            own = own_state_of(self.dataset)
            mark = replace(mark, streams={0: own} if own is not None else {})
        return self._state(mark).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` with the next epoch that is begun; nothing before it is loaded.

        Raises:
            BadState: It belongs to another loader, or is none; this one is left as it was.
        """
        saved = LoaderState.from_dict(state)
        saved.refuse_unlike(self._state(EpochPosition(epoch=0, position=0)))
        self._refuse_foreign(saved)
        self._refuse_undrawn(saved)
        self._refuse_streams(saved)
        streams = saved.dataset or {}
        self._restore_bad(saved.epoch, saved.bad or {})
        self._epoch_state.resume(
            EpochPosition(
                epoch=saved.epoch,
                position=saved.position,
                base_seed=saved.base_seed,
                base_epoch=saved.base_epoch or 0,
                shuffle_seed=saved.shuffle_seed,
                generator_state=saved.generator_state,
                own_state=saved.sampler,
                streams={int(worker): own for worker, own in streams.get("streams", {}).items()},
                next_worker=streams.get("next", 0),
            )
        )

    def _refuse_foreign(self, saved: LoaderState) -> None:
        """What another kind of loader says of itself would be dropped, and nobody would know."""
        drawing, is_iterable = self._index_sampler.drawing, self._is_iterable()
        generator = None if drawing is None else drawing.generator
        sampler = None if self._order() is not None else self._stateful_sampler()
        takes = {
            "base_seed": self.seed is None,
            "base_epoch": self.seed is None,
            "shuffle_seed": drawing is not None and generator is None,
            "generator_state": generator is not None,
            "sampler": hasattr(sampler, "load_state_dict"),
            "num_workers": is_iterable,
            "dataset": is_iterable,
        }
        foreign = [name for name, takes_it in takes.items() if not takes_it]
        foreign = [name for name in foreign if getattr(saved, name) is not None]
        if foreign:
            raise BadState(
                f"the state has {' and '.join(foreign)}, and this loader has no such thing: "
                "it belongs to another loader, or was edited",
                remedy="a loader with the arguments that the state was saved with",
            )
        known = saved.generator_state
        if known is not None and not fits_generator(generator, known):
            raise BadState("the state's generator_state is not one: it was cut off or edited")

    def _refuse_streams(self, saved: LoaderState) -> None:
        """An iterable dataset is shared out by worker, so their number must stay."""
        before, now = saved.num_workers, self.num_workers
        if before is not None and before != now and max(before, now) > 1:
            raise BadState(
                f"an iterable dataset is shared out by worker: {before} workers in the state, "
                f"{now} here",
                remedy=f"DataLoader(..., num_workers={before})",
            )
        if saved.dataset is not None and not _are_streams(saved.dataset, max(1, now)):
            raise BadState(f"the state's dataset is {str(saved.dataset)[:80]}: it was edited")

    def _replay(self, batches: Any) -> None:
        """Load and drop what was delivered before, where the dataset cannot skip it itself."""
        epoch_state = self._epoch_state
        if not self._is_iterable() or not epoch_state.start or epoch_state.streams:
            return
        num_batches, epoch_state.start = epoch_state.start // (self._rows_per_batch() or 1), 0
        warn_user(
            f"the dataset has no state_dict of its own: {num_batches} batches are loaded once more "
            "and dropped, to go on where the state was saved"
        )
        for _ in itertools.islice(batches, num_batches):
            pass

    def _state(self, mark: EpochPosition) -> LoaderState:
        streams: dict[str, Any] | None = None
        if mark.streams:
            own = {str(worker): state for worker, state in mark.streams.items()}
            streams = {"streams": own, "next": mark.next_worker}
        return LoaderState(
            sampler=mark.own_state,
            dataset=streams,
            num_workers=self.num_workers if self._is_iterable() else None,
            epoch=mark.epoch,
            position=mark.position,
            seed=self.seed,
            base_seed=mark.base_seed,
            base_epoch=mark.base_epoch or None,
            shuffle_seed=mark.shuffle_seed,
            generator_state=mark.generator_state,
            length=self._length(),
            global_batch=self._global_batch(),
            bad=self._bad_in(mark.epoch, mark.position) or None,
        )

    def _bad_in(self, epoch: int, end: int) -> dict[str, list[Any]]:
        """What the state says about bad samples before position ``end``; the loader's own."""
        return {}

    def _restore_bad(self, epoch: int, bad: dict[str, list[Any]]) -> None:
        """Take over what :meth:`_bad_in` said when the state was saved."""

    def _refuse_undrawn(self, saved: LoaderState) -> None:
        """Without ``seed=``, the middle of an epoch is known only with what was drawn for it."""
        drawing = self._index_sampler.drawing
        needed: dict[str, object] = {}
        if self.seed is None:
            needed["base_seed"] = saved.base_seed
        if drawing is not None and drawing.generator is None:
            needed["shuffle_seed"] = saved.shuffle_seed
        elif drawing is not None:
            needed["generator_state"] = saved.generator_state
        missing = [name for name, value in needed.items() if value is None]
        if saved.position and missing:
            raise BadState(f"the state has no {' and no '.join(missing)}: it was cut off or edited")

    def _order(self) -> Order | None:
        order: Order | None = self._index_sampler.order
        return order

    def _global_batch(self) -> int | None:
        rows, order = self._rows_per_batch(), self._order()
        return rows * order.world_size if rows and order is not None else rows

    def _num_samples(self) -> int | None:
        """Samples of an epoch, where that is known: of the sampler, or of the dataset."""
        try:
            most = len(self) * (self._rows_per_batch() or 1)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None  # a sampler without a length
        length = None if self._rows_per_batch() is None else self._length()
        return most if length is None else min(most, length)

    def _length(self) -> int | None:
        order = self._order()
        if order is not None:
            return order.length
        if self._is_iterable():
            return None
        is_users = self.batch_size is None and self.batch_sampler is not None
        try:
            if is_users:  # the sampler says nothing about what a batch sampler does
                return len(self.batch_sampler) * (self._rows_per_batch() or 1)
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def _end(self) -> int | None:
        """The position at which an epoch is over: before the length where a rest is dropped."""
        length, rows, order = self._length(), self._global_batch(), self._order()
        drops = self.drop_last or getattr(self.batch_sampler, "drop_last", False)
        if order is not None:
            drops = drops or order.drop_last
        return length // rows * rows if length is not None and rows and drops else length


def _are_streams(content: Any, num_workers: int) -> bool:
    """Is this what the workers of an iterable dataset told, each under its number?"""
    if not isinstance(content, dict) or set(content) != {"streams", "next"}:
        return False
    streams, workers = content["streams"], range(num_workers)
    if not isinstance(streams, dict) or not set(streams) <= {str(worker) for worker in workers}:
        return False
    return type(content["next"]) is int and content["next"] in workers


def make_order(
    dataset: Any,
    *,
    seed: int | None,
    shuffle: bool,
    batch_size: int | None,
    drop_last: bool,
    ranks: tuple[bool, int | None, int | None],
    padding: bool,
) -> SeededOrder | None:
    """The order of ours, where a seed or a rank asks for one.

    Args:
        ranks: The loader's ``shard``, ``rank`` and ``world_size``.
    """
    rank, world_size = _shared_out(*ranks)
    if seed is None and world_size == 1:
        return None
    if seed is None and shuffle:
        raise BadArgument(
            "ranks that shuffle need the same seed, or samples are lost and doubled",
            remedy="DataLoader(..., seed=0, shard=True)",
        )
    return SeededOrder(
        dataset,
        seed=seed or 0,
        shuffle=shuffle,
        batch_size=batch_size or 1,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last and world_size > 1,
        padding=padding,
    )


def _shared_out(shard: bool, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_here() if shard else (0, 1)
    if rank is None or world_size is None:
        raise BadArgument(
            f"rank={rank} and world_size={world_size}: one does not work without the other",
            remedy="DataLoader(..., rank=0, world_size=2), or shard=True under torch.distributed",
        )
    return rank, world_size
