"""From a slot that workers have filled to the batch that the user sees.

Called from: the parent, when it is the batch's turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.engine.memory import payload
from penstock.engine.memory.messages import Reply
from penstock.engine.memory.ring import Ring, Slot


def open_payload(ring: Ring, slot: Slot, reply: Reply) -> tuple[Any, bool]:
    """What a collate_fn made; and whether its slot is in use from now on."""
    written: payload.PayloadLocation = reply.content
    if written.inline is not None:
        return payload.read(written, None), reply.is_kept
    root = _memory_of(ring, slot, written.num_bytes, is_kept=reply.is_kept)
    return payload.read(written, root), True


def open_fixed(
    ring: Ring,
    slot: Slot,
    rows: int,
    layout: Any,
    contents: list[Any],
    parts: list[tuple[int, int]],
) -> Any:
    """A batch of the default collate, put together from the parts that workers filled.

    Args:
        contents: Of the "fixed" replies.
        parts: First and last row of each part.
    """
    from penstock.engine.loading.collate import view_batch

    _, num_bytes = layout.places(rows)
    counts = [content[2] for content in contents]
    filled = sum(counts)
    objects = contents[0][3]
    for content in contents[1:]:
        objects = [left + right for left, right in zip(objects, content[3], strict=True)]
    if filled < rows:
        first_rows = [first for first, _ in parts]
        _close_gaps(slot.view(num_bytes), layout, rows, first_rows, counts)
    root = _memory_of(ring, slot, num_bytes)
    return view_batch(layout, root, rows, filled, objects)


def _close_gaps(
    memory: np.ndarray, layout: Any, rows: int, first_rows: list[int], counts: list[int]
) -> None:
    """Parts with samples left out move up, so that the rows that are there stand together."""
    offsets, _ = layout.places(rows)
    for leaf, offset in zip(layout.leaves, offsets, strict=True):
        size, end = leaf.item_bytes, 0
        for first, count in zip(first_rows, counts, strict=True):
            source = offset + first * size
            target = offset + end * size
            if source != target:
                memory[target : target + count * size] = memory[source : source + count * size]
            end += count


def _memory_of(ring: Ring, slot: Slot, num_bytes: int, *, is_kept: bool = False) -> np.ndarray:
    """The slot's bytes for a delivery: lent, or copied when the user holds many already."""
    if is_kept:
        ring.drop(slot)
        return slot.view(num_bytes)
    if ring.is_crowded():
        copied: np.ndarray = slot.view(num_bytes).copy()
        ring.give_back(slot)
        return copied
    return ring.lend(slot, num_bytes)
