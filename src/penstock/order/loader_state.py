"""State of a loader, as a few hundred bytes that can be stored as JSON.

The epoch's order and each sample's randomness are computed from (seed, epoch, position), so these
three are the state. The other fields are used to reject a state that belongs to a different loader.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.errors import BadState
from penstock.order.epoch_state import EpochPosition, fits_generator
from penstock.order.stream_state import refuse_stateless

VERSION = 2
"""Version 1 did not record the order."""

MOST = 1 << 62
"""Largest epoch and largest position, as in ``set_epoch``."""

_SEEDS = ("seed", "base_seed", "shuffle_seed")
_OWN = ("sampler", "dataset", "order", "generator_state", "bad")
"""Entries that are not numbers. The loader they belong to checks them."""

_UNRECORDED: dict[str, Any] = {}
"""The order of a state of version 1. It is not compared."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The state of one loader.

    Args:
        position: Number of samples of the epoch that were delivered, counted over all ranks.
        base_seed, base_epoch, shuffle_seed: The seeds drawn because no ``seed=`` was given, and the
            epoch in which they were drawn.
        global_batch: Number of samples in a batch of all ranks together.
        generator_state: State of the user's generator before the order was drawn from it.
        sampler, dataset: Their ``state_dict()``, if they have one.
        order: Fingerprint of the Penstock sampler
            (:attr:`~penstock.order.samplers.ShardedOrder.fingerprint`). None for any other sampler.
        bad: ``positions`` of bad samples in this epoch, and the indices of samples that crashed or
            hung workers (``poison``).
    """

    epoch: int
    position: int
    seed: int | None = None
    base_seed: int | None = None
    base_epoch: int | None = None
    shuffle_seed: int | None = None
    generator_state: str | None = None
    length: int | None = None
    global_batch: int | None = None
    num_workers: int | None = None
    sampler: Any = None
    dataset: Any = None
    order: dict[str, Any] | None = None
    bad: dict[str, list[Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values, without entries that are None.

        Example:
            >>> LoaderState(epoch=2, position=640, seed=0, length=1000).to_dict()
            {'version': 2, 'epoch': 2, 'position': 640, 'seed': 0, 'length': 1000}
        """
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {"version": VERSION, **values}

    @classmethod
    def from_dict(cls, values: Any) -> LoaderState:
        """Return the state that ``values`` describes.

        Raises:
            BadState: ``values`` is not a state, or it has a different version, is truncated, or was
                edited.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise BadState(f"not a loader state: {str(values)[:80]}")
        version = values["version"]
        if type(version) is not int or not 1 <= version <= VERSION:
            raise BadState(
                f"the state has version {version!r}, but this version of Penstock reads 1 to "
                f"{VERSION}",
                remedy="resume with the Penstock version that saved it, or restart the epoch",
            )
        content = {name: value for name, value in values.items() if name != "version"}
        _refuse_entries(content)
        if version == 1:
            content["order"] = _UNRECORDED
        _refuse_bad(content.get("bad"))
        state = cls(**content)
        state._refuse_impossible()
        return state

    def _refuse_impossible(self) -> None:
        """Refuse a position that no loader can have.

        A completed epoch is saved as the start of the next one.
        """
        if self.base_epoch is not None and self.base_epoch > self.epoch:
            raise BadState(
                f"the state is in epoch {self.epoch}, before its base_epoch {self.base_epoch}"
            )
        if self.length is not None and self.position >= max(1, self.length):
            raise BadState(
                f"the state is at position {self.position}, but its dataset has {self.length} "
                "samples"
            )
        for name, value in (("epoch", self.epoch), ("position", self.position)):
            if value > MOST:
                raise BadState(f"the state's {name} is {value}, but the maximum is {MOST}")
        if self.global_batch and self.position % self.global_batch:
            raise BadState(
                f"the state is at position {self.position}, in the middle of a batch of "
                f"{self.global_batch} samples"
            )

    def refuse_unlike(self, now: LoaderState) -> None:
        """Check that this state belongs to a loader whose state is ``now``.

        Raises:
            BadState: The sampler, dataset length, seed or global batch differs. The message shows
                both values.
        """
        names = {"length": "samples", "seed": "seed", "global_batch": "samples in a global batch"}
        unlike = _unlike_orders(self.order, now.order) or [
            f"{words}: {getattr(self, name)} in the state, {getattr(now, name)} here"
            for name, words in names.items()
            if getattr(self, name) != getattr(now, name)
        ]
        if unlike:
            raise BadState(
                f"the state belongs to a different loader; {'; '.join(unlike)}",
                remedy="use the dataset, sampler, seed=, batch_size= and number of ranks it was "
                "saved with (the number of ranks can change if ranks x batch_size stays the same)",
            )

    def refuse_foreign(
        self, *, has_seed: bool, drawing: Any, has_sampler_state: bool, is_iterable: bool
    ) -> None:
        """Check that this loader can use every entry, so that none is ignored silently.

        Args:
            drawing: torch's RandomSampler, if the indices come from one.

        Raises:
            BadState: The state belongs to a different kind of loader.
        """
        generator = None if drawing is None else drawing.generator
        takes = {
            "base_seed": not has_seed,
            "base_epoch": not has_seed,
            "shuffle_seed": drawing is not None and generator is None,
            "generator_state": generator is not None,
            "sampler": has_sampler_state,
            "num_workers": is_iterable,
            "dataset": is_iterable,
        }
        foreign = [name for name, takes_it in takes.items() if not takes_it]
        foreign = [name for name in foreign if getattr(self, name) is not None]
        if foreign:
            raise BadState(
                f"the state has {' and '.join(foreign)}, which this loader does not use: "
                "it belongs to a different loader, or was edited",
                remedy="a loader with the arguments that the state was saved with",
            )
        known = self.generator_state
        if known is not None and not fits_generator(generator, known):
            raise BadState("the state's generator_state is invalid: it was truncated or edited")

    def refuse_undrawn(self, *, has_seed: bool, drawing: Any) -> None:
        """Check that the drawn seeds are present.

        Without ``seed=``, resuming in the middle of an epoch needs them.
        """
        needed: dict[str, object] = {}
        if not has_seed:
            needed["base_seed"] = self.base_seed
        if drawing is not None and drawing.generator is None:
            needed["shuffle_seed"] = self.shuffle_seed
        elif drawing is not None:
            needed["generator_state"] = self.generator_state
        missing = [name for name, value in needed.items() if value is None]
        if self.position and missing:
            raise BadState(
                f"the state has no {' and no '.join(missing)}: it was truncated or edited"
            )

    def refuse_streams(self, now: int, dataset: Any) -> None:
        """Check that ``now`` workers can resume, because workers divide an iterable dataset."""
        before = self.num_workers
        if before is not None and before != now and max(before, now) > 1:
            raise BadState(
                "an iterable dataset is divided among its workers, and their number differs: "
                f"{before} in the state, {now} here",
                remedy=f"DataLoader(..., num_workers={before})",
            )
        if self.dataset is not None and not _are_streams(self.dataset, max(1, now)):
            raise BadState(f"the state's dataset is {str(self.dataset)[:80]}: it was edited")
        if self.dataset is not None and self.dataset["streams"]:
            refuse_stateless(dataset)

    @classmethod
    def at(cls, position: EpochPosition, **known: Any) -> LoaderState:
        """Return the state of a loader that is at ``position``."""
        streams: dict[str, Any] | None = None
        if position.streams:
            own = {str(worker): state for worker, state in position.streams.items()}
            streams = {"streams": own, "next": position.next_worker}
            if position.ended:
                streams["ended"] = list(position.ended)
        return cls(
            epoch=position.epoch,
            position=position.position,
            base_seed=position.base_seed,
            base_epoch=position.base_epoch or None,
            shuffle_seed=position.shuffle_seed,
            generator_state=position.generator_state,
            sampler=position.own_state,
            dataset=streams,
            **known,
        )

    def epoch_position(self) -> EpochPosition:
        """Return the position to resume from. The inverse of :meth:`at`."""
        streams = self.dataset or {}
        return EpochPosition(
            epoch=self.epoch,
            position=self.position,
            base_seed=self.base_seed,
            base_epoch=self.base_epoch or 0,
            shuffle_seed=self.shuffle_seed,
            generator_state=self.generator_state,
            own_state=self.sampler,
            streams={int(worker): own for worker, own in streams.get("streams", {}).items()},
            next_worker=streams.get("next", 0),
            ended=tuple(streams.get("ended", ())),
        )


def _unlike_orders(saved: Any, now: dict[str, Any] | None) -> list[str]:
    """Return the first difference between the fingerprints of two orders, if there is one."""
    if saved == now or saved is _UNRECORDED:
        return []
    if not isinstance(saved, dict) or now is None or saved.get("sampler") != now["sampler"]:
        kinds = [
            one.get("sampler") if isinstance(one, dict) else "not a Penstock sampler"
            for one in (saved, now)
        ]
        return [f"sampler: {kinds[0]} in the state, {kinds[1]} here"]
    return [_first_difference(saved, now, f"of {now['sampler']}")]


def _first_difference(saved: dict[str, Any], now: dict[str, Any], owner: str) -> str:
    name = next(name for name in {**now, **saved} if saved.get(name) != now.get(name))
    before, after = saved.get(name), now.get(name)
    if isinstance(before, dict) and isinstance(after, dict):
        return _first_difference(before, after, f"of the {name}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        place, (before, after) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        name = f"{name}[{place}]"
    return f"{name} {owner}: {before!r} in the state, {after!r} here"


def _are_streams(content: Any, num_workers: int) -> bool:
    """Return True if ``content`` holds the states of an iterable dataset, by worker number."""
    if not isinstance(content, dict) or set(content) - {"ended"} != {"streams", "next"}:
        return False
    ended = content.get("ended", [])
    if not isinstance(ended, list) or not all(
        type(worker) is int and 0 <= worker < num_workers for worker in ended
    ):
        return False
    streams, workers = content["streams"], range(num_workers)
    if not isinstance(streams, dict) or not set(streams) <= {str(worker) for worker in workers}:
        return False
    return type(content["next"]) is int and content["next"] in workers


def _refuse_entries(content: dict[Any, Any]) -> None:
    """Check that each entry is known and has the right type, and that no required entry is missing.

    Raises:
        BadState: One of these checks fails.
    """
    known = {item.name for item in fields(LoaderState)}
    unknown = sorted(map(repr, set(content) - known))
    if unknown:
        raise BadState(f"the state has unknown entries: {', '.join(unknown)}")
    missing = [name for name in ("epoch", "position") if name not in content]
    if missing:
        raise BadState(f"the state has no {' and no '.join(missing)}: it was truncated or edited")
    for name, value in content.items():
        if name in _OWN or (value is None and name not in ("epoch", "position")):
            continue
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if name in _SEEDS:
            if not (is_whole and -(1 << 63) <= value < 1 << 64):
                raise BadState(f"the state's {name} is {value!r}, not a 64-bit integer")
        elif not (is_whole and value >= 0):
            raise BadState(f"the state's {name} is {value!r}, not a non-negative integer")


def _refuse_bad(bad: Any) -> None:
    if bad is None:
        return
    kinds = {"positions": (int,), "poison": (int, str)}
    is_right = isinstance(bad, dict) and set(bad) <= set(kinds)
    for name, values in bad.items() if is_right else ():
        is_right = is_right and isinstance(values, list)
        is_right = is_right and all(type(value) in kinds[name] for value in values)
    if not is_right:
        raise BadState(f"the state's list of bad samples is invalid: {str(bad)[:80]}")
