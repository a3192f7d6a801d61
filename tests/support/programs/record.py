"""A program as a plain record, and random drawing of programs from a seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

Event = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Program:
    """A dataset, a loader over it, and the events in the loop.

    Every default is the simplest value, and ``repr`` shows only other values.
    """

    # The dataset.
    source: str = "made"
    length: int = 8
    form: str = "int"
    """Form of a sample: a key of :data:`support.programs.parts.FORMS`."""
    draws: tuple[str, ...] = ()
    """Sources of draws: keys of :data:`support.programs.parts.DRAWS`."""
    wraps: tuple[str, ...] = ()
    """Wrappers around the dataset, the innermost first."""
    bad: tuple[int, ...] = ()
    """Samples that cannot be loaded."""
    bad_kind: str = "raises"
    sample_ms: int = 0

    # Sampler and batches.
    order: str = "sequential"
    seed: int | None = None
    batch_size: int | None = 2
    drop_last: bool = False
    collate: str = "default"

    # Settings.
    num_workers: int | str = 1
    pool: str = "auto"
    start_method: str | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    in_order: bool = True
    randomness: str = "sample"
    on_error: str = "raise"
    worker_init: str = ""

    # The loop.
    epochs: int = 1
    keep: int = 0
    """Number of recent batches that the loop holds."""
    changes_batches: bool = False
    """True if the loop writes zeros into each batch."""
    draws_between: bool = False
    """True if the loop draws from the global generators after each batch."""
    events: tuple[Event, ...] = ()
    """(kind, epoch, number of batches before it, ...). See :mod:`support.programs.running`."""

    def __repr__(self) -> str:
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Program({', '.join(given)})"

    def having(self, **changes: Any) -> Program:
        """Return a copy with these fields replaced."""
        return dataclasses.replace(self, **changes)

    def events_of(self, *kinds: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event[0] in kinds)


def parse(text: str) -> Program:
    """Return a program from its ``repr``."""
    program = eval(text, {"Program": Program, "__builtins__": {}})
    assert isinstance(program, Program)
    return program


# Choices of each field with their weights. The first value of a list is the most common.
_CHOICES: dict[str, list[tuple[Any, int]]] = {
    "source": [
        ("made", 12),
        ("list", 1),
        ("range", 1),
        ("tensors", 2),
        ("shared_list", 1),
        ("shared_dict", 1),
        ("iterable", 3),
    ],
    "length": [(8, 3), (0, 1), (1, 1), (3, 2), (13, 4), (24, 4), (40, 2), (90, 1)],
    "sample_ms": [(0, 12), (1, 3), (8, 1), (25, 1)],
    "seed": [(None, 2), (0, 1), (7, 1), (2**63, 1)],
    "batch_size": [(2, 3), (1, 1), (3, 3), (4, 2), (16, 1), (None, 1)],
    "drop_last": [(False, 3), (True, 1)],
    "collate": [
        ("default", 8),
        ("list", 2),
        ("lambda", 1),
        ("draws", 2),
        ("held", 2),
        ("views", 1),
        ("pads", 1),
        ("numpy", 1),
    ],
    "num_workers": [(1, 3), (2, 6), (3, 3), ("auto", 1), (0, 1)],
    "pool": [("auto", 6), ("process", 1), ("thread", 3)],
    "start_method": [(None, 6), ("forkserver", 1), ("fork", 3), ("spawn", 1)],
    "prefetch_factor": [(None, 3), (1, 1), (2, 1), (5, 1)],
    "persistent_workers": [(False, 2), (True, 1)],
    "in_order": [(True, 6), (False, 1)],
    "randomness": [("sample", 8), ("worker", 1)],
    "worker_init": [("", 6), ("nothing", 1), ("seeds", 1)],
    "epochs": [(1, 3), (2, 3), (3, 1)],
    "keep": [(0, 2), (1, 2), (3, 1), (1000, 1)],
    "changes_batches": [(False, 3), (True, 1)],
    "draws_between": [(False, 1), (True, 1)],
}


def draw_program(chance: random.Random, *, allows_spawn: bool = True) -> Program:
    """Draw a random program that the documentation covers.

    Args:
        allows_spawn: Allow spawned workers. They start in seconds, forked ones in milliseconds.
    """
    from support.programs import parts, promises

    fields: dict[str, Any] = {
        name: chance.choices([value for value, _ in known], [weight for _, weight in known])[0]
        for name, known in _CHOICES.items()
    }
    fields["form"] = chance.choice([*parts.FORMS])
    fields["order"] = chance.choice([*parts.ORDERS, "sequential", "shuffle", "shuffle"])
    places = parts.usable_draws()
    fields["draws"] = tuple(chance.sample(places, chance.choice((0, 0, 1, 1, 2, 4))))
    fields["wraps"] = tuple(
        chance.choice([*parts.WRAPS]) for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3)))
    )
    if chance.random() < 0.2:
        fields["bad"] = tuple(sorted({chance.randrange(fields["length"] + 1) for _ in range(2)}))
        fields["bad_kind"] = chance.choice(("raises", "raises", "none"))
        fields["on_error"] = chance.choice(("raise", "skip", "replace", "function"))
    fields["events"] = tuple(_draw_events(chance, fields["epochs"], fields["length"]))
    if not allows_spawn and fields["start_method"] == "spawn":
        fields["start_method"] = None
    return promises.settle(Program(**fields))


def _draw_events(chance: random.Random, epochs: int, length: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3))):
        kind = chance.choice(("kill", "kill", "kill_server", "fork", "fork", "break", "resume"))
        event: Event = (kind, chance.randrange(epochs), chance.randrange(1, max(2, length // 2)))
        if kind == "resume":
            event += (chance.choice((0, 1, 2, 3)),)
        events.append(event)
    return events
