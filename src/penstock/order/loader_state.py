"""Where a loader stands, as a few hundred bytes that JSON can hold.

The epoch's order and each sample's randomness are computed from (seed, epoch, position), so that is
the state; the rest is there to refuse a state that belongs to something else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.errors import BadState
from penstock.order.epoch_state import EpochPosition, fits_generator

VERSION = 1
MOST = 1 << 62
"""No epoch and no position is larger: as for ``set_epoch``."""

_SEEDS = ("seed", "base_seed", "shuffle_seed")
_OWN = ("sampler", "dataset", "generator_state", "bad")
"""Not numbers; the loader that they belong to checks them."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The state of one loader.

    Args:
        position: Samples of the epoch that were delivered, counted over all ranks.
        base_seed, base_epoch, shuffle_seed: What was drawn where no ``seed=`` was given, and when.
        global_batch: Samples in a batch of all ranks together.
        generator_state: Of the generator that the user gave, before the order was drawn from it.
        sampler, dataset: The state that these offer of their own.
        bad: ``positions`` of this epoch at which samples were bad, and the indices of samples that
            took down workers (``poison``).
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
    bad: dict[str, list[Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not known is left out.

        Example:
            >>> LoaderState(epoch=2, position=640, seed=0, length=1000).to_dict()
            {'version': 1, 'epoch': 2, 'position': 640, 'seed': 0, 'length': 1000}
        """
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {"version": VERSION, **values}

    @classmethod
    def from_dict(cls, values: Any) -> LoaderState:
        """The state that ``values`` describes.

        Raises:
            BadState: It is no state, of another version, truncated or edited.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise BadState(f"this is no state of a loader: {str(values)[:80]}")
        version = values["version"]
        if type(version) is not int or version != VERSION:
            raise BadState(
                f"the state has version {version!r}, this Penstock reads {VERSION}",
                remedy="resume with the Penstock that saved it, or start the epoch anew",
            )
        content = {name: value for name, value in values.items() if name != "version"}
        _refuse_entries(content)
        _refuse_bad(content.get("bad"))
        state = cls(**content)
        state._refuse_impossible()
        return state

    def _refuse_impossible(self) -> None:
        """No loader ever stood there: an epoch that is over is saved as the start of the next."""
        if self.base_epoch is not None and self.base_epoch > self.epoch:
            raise BadState(
                f"the state is in epoch {self.epoch}, before its base_epoch, {self.base_epoch}"
            )
        if self.length is not None and self.position >= max(1, self.length):
            raise BadState(f"the state is at {self.position} of {self.length} samples")
        for name, value in (("epoch", self.epoch), ("position", self.position)):
            if value > MOST:
                raise BadState(f"the state's {name} is {value}, the largest is {MOST}")
        if self.global_batch and self.position % self.global_batch:
            raise BadState(
                f"the state is at {self.position}, within a batch of {self.global_batch} samples"
            )

    def refuse_unlike(self, now: LoaderState) -> None:
        """Check that this state belongs to a loader that stands at ``now``.

        Raises:
            BadState: Dataset length, seed or global batch differ; both sides are printed.
        """
        names = {"length": "samples", "seed": "seed", "global_batch": "samples in a global batch"}
        unlike = [
            f"{words}: {getattr(self, name)} in the state, {getattr(now, name)} here"
            for name, words in names.items()
            if getattr(self, name) != getattr(now, name)
        ]
        if unlike:
            raise BadState(
                f"the state belongs to another loader; {'; '.join(unlike)}",
                remedy="the dataset, seed=, batch_size= and number of ranks it was saved with "
                "(ranks may change if ranks x batch_size stays)",
            )

    def refuse_foreign(
        self, *, has_seed: bool, drawing: Any, has_sampler_state: bool, is_iterable: bool
    ) -> None:
        """Check that this loader can use every entry; what it cannot use would be lost silently.

        Args:
            drawing: torch's RandomSampler, if the indices come from one.

        Raises:
            BadState: It belongs to another kind of loader.
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
                f"the state has {' and '.join(foreign)}, and this loader has no such thing: "
                "it belongs to another loader, or was edited",
                remedy="a loader with the arguments that the state was saved with",
            )
        known = self.generator_state
        if known is not None and not fits_generator(generator, known):
            raise BadState("the state's generator_state is not one: it was cut off or edited")

    def refuse_undrawn(self, *, has_seed: bool, drawing: Any) -> None:
        """Check that what was drawn is here: without ``seed=``, the middle of an epoch needs it."""
        needed: dict[str, object] = {}
        if not has_seed:
            needed["base_seed"] = self.base_seed
        if drawing is not None and drawing.generator is None:
            needed["shuffle_seed"] = self.shuffle_seed
        elif drawing is not None:
            needed["generator_state"] = self.generator_state
        missing = [name for name, value in needed.items() if value is None]
        if self.position and missing:
            raise BadState(f"the state has no {' and no '.join(missing)}: it was cut off or edited")

    def refuse_streams(self, now: int) -> None:
        """Check that ``now`` workers can go on: an iterable dataset is shared out by worker."""
        before = self.num_workers
        if before is not None and before != now and max(before, now) > 1:
            raise BadState(
                f"an iterable dataset is shared out by worker: {before} workers in the state, "
                f"{now} here",
                remedy=f"DataLoader(..., num_workers={before})",
            )
        if self.dataset is not None and not _are_streams(self.dataset, max(1, now)):
            raise BadState(f"the state's dataset is {str(self.dataset)[:80]}: it was edited")

    @classmethod
    def at(cls, position: EpochPosition, **known: Any) -> LoaderState:
        """The state of a loader that stands at ``position``."""
        streams: dict[str, Any] | None = None
        if position.streams:
            own = {str(worker): state for worker, state in position.streams.items()}
            streams = {"streams": own, "next": position.next_worker}
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
        """Where to go on; the reverse of :meth:`at`."""
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
        )


def _are_streams(content: Any, num_workers: int) -> bool:
    """Is this what the workers of an iterable dataset told, each under its number?"""
    if not isinstance(content, dict) or set(content) != {"streams", "next"}:
        return False
    streams, workers = content["streams"], range(num_workers)
    if not isinstance(streams, dict) or not set(streams) <= {str(worker) for worker in workers}:
        return False
    return type(content["next"]) is int and content["next"] in workers


def _refuse_entries(content: dict[Any, Any]) -> None:
    """Each entry must be known and hold what such an entry holds; none that counts may be missing.

    Raises:
        BadState: Otherwise.
    """
    known = {item.name for item in fields(LoaderState)}
    unknown = sorted(map(repr, set(content) - known))
    if unknown:
        raise BadState(f"the state has entries that no state has: {', '.join(unknown)}")
    missing = [name for name in ("epoch", "position") if name not in content]
    if missing:
        raise BadState(f"the state has no {' and no '.join(missing)}: it was cut off or edited")
    for name, value in content.items():
        if name in _OWN or (value is None and name not in ("epoch", "position")):
            continue
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if name in _SEEDS:
            if not (is_whole and -(1 << 63) <= value < 1 << 64):
                raise BadState(f"the state's {name} is {value!r}, not a whole number of 64 bits")
        elif not (is_whole and value >= 0):
            raise BadState(f"the state's {name} is {value!r}, not a whole number from 0 up")


def _refuse_bad(bad: Any) -> None:
    if bad is None:
        return
    kinds = {"positions": (int,), "poison": (int, str)}
    is_right = isinstance(bad, dict) and set(bad) <= set(kinds)
    for name, values in bad.items() if is_right else ():
        is_right = is_right and isinstance(values, list)
        is_right = is_right and all(type(value) in kinds[name] for value in values)
    if not is_right:
        raise BadState(f"the state's list of bad samples is none: {str(bad)[:80]}")
